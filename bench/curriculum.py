"""Curriculum: what its beliefs take of a training step, by the number of training prompts.

A step is the choice of its prompts, what is learned from their answers and what is trained on again: 16 groups of 8
answers of 100 tokens, three quarters of the groups without a right one. Beside it the rule that looks at every prompt:
Thompson sampling from one Beta posterior each (MoPPS).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import Case
from bench.studies.beta_bandit import BetaBanditSettings
from python_trainer.accelerators.base import Accelerator
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.data import Rollout

PROMPTS_PER_STEP, GROUP, TOKENS = 16, 8, 100


def step_of(settings: AcceleratorSettings, prompts: int) -> Callable[[], list[Rollout]]:
    """-> what a step asks of the accelerator; every call is the next step, and returns what is trained on again."""
    accelerator: Accelerator = settings.make()
    lengths = torch.randint(20, 400, (prompts,), generator=torch.Generator().manual_seed(0)).tolist()
    contents = [[1] * length for length in range(400)]  # no million lists: lengths are all that is looked at
    run: Any = SimpleNamespace(prompts=[contents[length] for length in lengths], output_dir=Path(), console=None)
    accelerator.begin(run)
    generator, done = torch.Generator().manual_seed(1), 0

    def step() -> list[Rollout]:
        nonlocal done
        done += 1
        context: Any = SimpleNamespace(
            step=done, seed=done, samples=0, telemetry={}, generation=SimpleNamespace(num_generations=GROUP),
            groups_of=lambda keys: keys,
        )  # fmt: skip
        chosen: Any = accelerator.choose(context, PROMPTS_PER_STEP)
        keys = chosen or torch.randint(prompts, (PROMPTS_PER_STEP,), generator=generator).tolist()
        rollouts = [
            Rollout([1], [5] * TOKENS, 0, [-0.2] * TOKENS, "stop", accuracy=float(i == 0 and group % 4 == 0),
                    prompt_key=key, group=group)
            for group, key in enumerate(keys)
            for i in range(GROUP)
        ]  # fmt: skip
        return accelerator.replay(context, accelerator.collect(context, rollouts))

    return step


def cases(quick: bool) -> Iterator[Case]:
    for prompts in (1_000, 10_000) if quick else (1_000, 100_000, 1_000_000):
        curriculum = CurriculumSettings(database=None)
        providers = {
            "curriculum": curriculum,
            "curriculum, prompts chosen": curriculum.model_copy(update={"least_gain": 0.0}),
            "Beta bandit": BetaBanditSettings(),
        }
        yield Case(
            op="curriculum step",
            shape=f"{prompts:,} prompts, {PROMPTS_PER_STEP} groups of {GROUP}",
            dtype="float64",
            providers={name: step_of(settings, prompts) for name, settings in providers.items()},
            reference=None,
        )
