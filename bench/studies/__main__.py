"""Runs a study: ``python -m bench.studies alpha --output-dir runs/studies/alpha``. Each goes on where it stopped."""

import argparse
import importlib
import sys

STUDIES = {
    "alpha": "extrapolated weights: what rank 1 keeps, what prediction adds after 40 % of the steps, what the gate did",
    "rpo": "suffix rollouts against plain GRPO and DAPO: tokens, seconds to the same accuracy, final accuracy",
    "drafts": "lossless drafts: forward passes and rollout seconds by epoch, and that training does not change",
    "lossless": "how often the engine draws each token, against the exact probabilities, over random settings",
    "trl": "this trainer against TRL's: seconds to the same accuracy",
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
