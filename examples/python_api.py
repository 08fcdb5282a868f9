"""Training from Python: a task, rewards, a loss, an accelerator and a callback of one's own, all as objects.

    python examples/python_api.py [OUTPUT_DIR]

Takes a minute on a CPU.
"""

import random
import sys

import torch

from python_trainer import Accelerator, AcceleratorSettings, Callback, Example, Task, Trainer, load_config


def right(prompts, completions, completion_ids, total, **_):
    """Return 1 for an answer that ends in the sum, else 0."""
    return [float(text.endswith(f"A:{gold}")) for text, gold in zip(completions, total, strict=True)]


def brief(prompts, completions, completion_ids, **_):
    """Return a reward between 0 and 1, the larger the shorter the answer."""
    return [1 - len(ids) / 48 for ids in completion_ids]


def sums(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    drawn = [[rng.randint(10, 99) for _ in range(rng.randint(2, 4))] for _ in range(count)]
    return [Example("+".join(map(str, terms)) + "=", {"total": sum(terms)}) for terms in drawn]


def root_length(mask: torch.Tensor, *, num_sequences: int, lengths: torch.Tensor, **_: object) -> torch.Tensor:
    """Weight tokens by 1 / (all sequences x the root of the tokens of this one), between a sum and a mean."""
    return mask.float() / (lengths[:, None].clamp(min=1).sqrt() * max(num_sequences, 1))


class Cheerful(Accelerator):
    """Right answers of a group with wrong ones count a little more."""

    def collect(self, context, rollouts):
        for rollout in rollouts:
            rollout.reward += self.settings.bonus * rollout.accuracy
        return rollouts


class CheerfulSettings(AcceleratorSettings):
    """Its settings: the section ``accelerators.cheerful``."""

    name = "cheerful"
    accelerator = Cheerful
    bonus: float = 0.1


class Watch(Callback):
    """Print an answer of every step, and the results of evaluations."""

    def on_rollouts(self, trainer, step, rollouts):
        best = max(rollouts, key=lambda rollout: rollout.reward)
        print(f"step {step}: {trainer.task.train[best.prompt_index].prompt} {best.text!r}")

    def on_evaluate(self, trainer, step, metrics):
        print(f"step {step}: accuracy {metrics['eval/accuracy']:.3f}, pass@4 {metrics['eval/pass@4']:.3f}")


config = load_config(
    {
        "max_steps": 4,
        "task": Task(
            "sums",
            train=sums(64, seed=0),
            test=sums(16, seed=1),
            reward_functions={"right": right, "brief": brief},
            reward_weights={"brief": 0.1},
        ),
        "model": {"path": "small"},
        "rollout": {"prompts_per_step": 8, "num_generations": 4, "max_completion_length": 48},
        "algorithm": {"loss_type": root_length},
        "optimizer": {"learning_rate": 4e-4},
        "evaluation": {"samples": 4},
        "accelerators": {"enabled": [CheerfulSettings], "cheerful": {"bonus": 0.2}},
    }
)

if __name__ == "__main__":
    output_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/python_api"
    trainer = Trainer(config, output_dir, callbacks=[Watch()])
    summary = trainer.run()
    print(f"accuracy {summary['eval_accuracy_start']:.3f} -> {summary['eval_accuracy_final']:.3f}")
