"""What a finished run can still do: pass@8 of its last policy on unseen prompts."""

import shutil
from pathlib import Path
from statistics import fmean

from python_trainer.config import Config
from python_trainer.export import export
from python_trainer.model.policy import load_policy
from python_trainer.rollout import PagedEngine, Request, SamplingParams
from python_trainer.tasks.rewards import score

PROMPTS, ANSWERS = 512, 8


def pass_at_8(folder: Path, config: Config) -> float:
    """Share of the first test prompts that at least one of eight answers, at temperature 1, is right to.

    Args:
        folder: of the run, with a checkpoint of its last step.
        config: its settings.
    """
    model = folder / "last"
    shutil.rmtree(model, ignore_errors=True)
    policy = load_policy(config.model.model_copy(update={"path": str(export(folder, output=model))}))
    shutil.rmtree(model)
    task = config.task.load()
    examples = task.test[:PROMPTS]
    longest = config.rollout.max_completion_length
    requests = [
        Request(ids, num_samples=ANSWERS, sample_id=ANSWERS * i, max_new_tokens=longest)
        for i, ids in enumerate(policy.encode([example.prompt for example in examples]))
    ]
    engine = PagedEngine(policy.whole, eos_token_ids=policy.eos_token_ids)
    ids = [rollout.response_ids for rollout in engine.generate(requests, SamplingParams(seed=1))]
    owners = [example for example in examples for _ in range(ANSWERS)]
    right = score(task, owners, [policy.decode(row) for row in ids], ids).accuracy
    return round(fmean(any(right[i : i + ANSWERS]) for i in range(0, len(right), ANSWERS)), 4)
