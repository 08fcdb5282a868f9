"""Stored answers, judged by the rewards of the present run."""

from collections.abc import Sequence

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.rhyme.records import StoredAnswer, prompt_key


def judged(samples: Sequence[StoredAnswer], context: StepContext, *, unjudged: bool = True) -> list[StoredAnswer]:
    """Those that this run calls right, in their order; their rewards become what fresh answers would get.

    Where nothing is right or wrong all stay, as each was better than the mean of its group when it was given; or none,
    without ``unjudged``.

    Runs of other reward functions, weights or penalties, and an earlier part of a resumed run, have rewards of their
    own scale, which say nothing next to those of fresh answers. Answers that this run could not give are left out: to
    prompts that it does not have, and longer ones than it allows. Reward functions are called with as many answers as
    in a step, which is what their time limit is for.
    """
    examples, settings = {prompt_key(example.prompt): example for example in context.task.train}, context.generation
    size, longest, right = settings.prompts_per_step * settings.num_generations, settings.max_completion_length, []
    possible = [s for s in samples if s.prompt_key in examples and len(s.response_ids) <= longest]
    for first in range(0, len(possible), size):
        part = possible[first : first + size]
        ids = [sample.response_ids for sample in part]
        scores = context.judge([examples[sample.prompt_key] for sample in part], [s.text for s in part], ids)
        for sample, reward, accuracy in zip(part, scores.total, scores.accuracy):
            sample.reward = reward
            if unjudged if scores.merit is not None else accuracy > 0.5:
                right.append(sample)
    return right
