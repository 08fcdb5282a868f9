"""Runs a study: ``python -m bench.studies alpha --output-dir runs/studies/alpha``. Each goes on where it stopped."""

import argparse
import importlib
import sys

STUDIES = {
    "alpha": "extrapolated weights: what rank 1 keeps, what prediction adds after 40 % of the steps, what the gate did",
    "alpha_rivals": "what rivals do in place of extrapolated weights: higher rates, averages, ranks, free gates",
    "rpo": "suffix rollouts against plain GRPO and DAPO: tokens, seconds to the same accuracy, final accuracy",
    "ground": "tasks of mixed difficulty: plain training tuned, and rivals without history",
    "curriculum": "prompts chosen by history against plain GRPO and rules without history, task by task",
    "replay": "what stages of earlier runs, of this task or another, could have told a run of its answers and accuracy",
    "gradients": "what the choice of prompts expects, against what gradients show of it, by token and by second",
    "drafts": "lossless drafts: forward passes and rollout seconds by epoch, and that training does not change",
    "siblings": "drafts in the first epoch: what other prompts and the other answers of a group would save",
    "continued": "earlier answers kept up to what the present policy rejects, and continued: what that keeps and saves",
    "lossless": "how often the engine draws each token, against the exact probabilities, over random settings",
    "scheduling": "rollouts over several workers: how well lengths are predicted, what balancing by them saves",
    "trl": "this trainer against TRL's: seconds to the same accuracy",
    "profile": "where the seconds of a training step go, operation by operation",
    "together": "the four accelerators of the papers, alone, in pairs and all: their worth, what they do to each other",
    "rhyme": "training guided by history: what a database of a small policy's run saves, and what does not help",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=__doc__)
    commands = parser.add_subparsers(dest="study", required=True, metavar=" | ".join(STUDIES))
    modules = {name: importlib.import_module(f"bench.studies.{name}") for name in STUDIES if name in sys.argv[1:2]}
    for name, words in STUDIES.items():  # each needs packages of its own, so only the one that is asked for is loaded
        command = commands.add_parser(name, help=words.replace("%", "%%"),  # argparse formats help texts
                                      formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        if module := modules.get(name):
            command.description = module.__doc__
            module.add_arguments(command)
    args = parser.parse_args()
    modules[args.study].run(args)


if __name__ == "__main__":
    main()
