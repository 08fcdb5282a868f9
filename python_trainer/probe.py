"""What training would find: ``python -m python_trainer probe`` answers a sample of training prompts and tells.

How to read it: docs/probe.md.
"""

import json
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from rich.console import Console

from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.bounds import Bound, all_bounds
from python_trainer.config import Config
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_seed, prompt_order
from python_trainer.run_directory import write_text
from python_trainer.run_state import Clock, device_name, versions
from python_trainer.trainer import Trainer

FIRST_PROMPTS = 4  # their answers tell how long the others take
SHARE = 0.6  # of the seconds, for answers; the rest is for an update
BARS = 40  # characters of the longest bar of a histogram


@dataclass
class Answers:
    """Scored answers to some training prompts, the same number to each."""

    groups: list[list[Rollout]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # rollout, reward: of the timed ones
    timed: int = 0  # prompts
    tokens: int = 0  # generated, in that time


def spread_chance(right: int, tries: int, group: int) -> float:
    """The chance that a group of answers holds right and wrong ones, judged by ``right`` out of ``tries`` answers.

    Unbiased where there are as many tries as answers in a group: the share of all such subsets of them that do.
    Otherwise the chance at p = right / tries, which is too low.
    """
    if tries >= group:
        return 1 - (math.comb(right, group) + math.comb(tries - right, group)) / math.comb(tries, group)
    p = right / tries
    return 1 - p**group - (1 - p) ** group


def wrong_chance(right: int, tries: int, group: int) -> float:
    """The chance that a group of answers holds no right one; as unbiased as :func:`spread_chance` is."""
    return math.comb(tries - right, group) / math.comb(tries, group) if tries >= group else (1 - right / tries) ** group


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None where one of them does not vary."""
    ranks = []
    for values in (x, y):
        _, place, counts = numpy.unique(numpy.asarray(values), return_inverse=True, return_counts=True)
        ranks.append((numpy.cumsum(counts) - (counts - 1) / 2)[place])
    if any(numpy.ptp(rank) == 0 for rank in ranks):
        return None
    return float(numpy.corrcoef(ranks[0], ranks[1])[0, 1])


def reward_spread(groups: Sequence[Sequence[Rollout]], size: int) -> float | None:
    """Share of groups of ``size`` answers whose rewards differ; None where there are fewer tries than that."""
    cut = [g[i : i + size] for g in groups for i in range(0, len(g) - size + 1, size)]
    return sum(len({answer.reward for answer in part}) > 1 for part in cut) / len(cut) if cut else None


def ask(trainer: Trainer, prompts: int, tries: int, seconds: float) -> Answers:
    """Answers to prompts drawn at random, as many as fit into the time; the first few are not timed."""
    found, begun = Answers(), time.perf_counter()
    size = len(trainer.prompts.ids["train"])
    order = prompt_order(trainer.config.seed, 0, min(prompts, size), size)
    count = FIRST_PROMPTS
    while order and count:
        keys, order = order[:count], order[count:]
        groups = trainer.prompts.groups(keys)
        for number, group in enumerate(groups, start=len(found.groups)):
            group.num_samples, group.sample_id = tries, number * tries
        clock, tokens = Clock(), trainer.state.counts.get("generated_tokens", 0)
        with clock.measure("rollout"):
            rollouts = trainer.generate(groups, keyed_seed(trainer.config.seed, "probe"))
        with clock.measure("reward"):
            trainer.scorer.score(groups, rollouts)
        if len(found.groups) == FIRST_PROMPTS:
            found.seconds, found.timed, found.tokens = {}, 0, 0
        for name, spent in clock.seconds.items():
            found.seconds[name] = found.seconds.get(name, 0.0) + spent
        found.timed += len(keys)
        found.tokens += trainer.state.counts["generated_tokens"] - tokens
        found.groups += [rollouts[i : i + tries] for i in range(0, len(rollouts), tries)]
        left = seconds - (time.perf_counter() - begun)
        fit = int(left / sum(found.seconds.values()) * found.timed)
        count = max(min(2 * len(keys), fit, trainer.config.rollout.prompts_per_step), 0)
    return found


def update_seconds(trainer: Trainer, groups: Sequence[Sequence[Rollout]]) -> float:
    """Seconds of one update on a step's worth of answers, by one on the first of these groups that make a step."""
    settings = trainer.config.rollout
    part = [
        replace(answer, group=number)
        for number, group in enumerate(groups[: settings.prompts_per_step])
        for answer in group[: settings.num_generations]
    ]
    warm = next((g for g in groups if len({answer.reward for answer in g}) > 1), groups[0])
    trainer.learn([replace(answer, group=0) for answer in warm], 1)  # moments and the like are made once
    begun = time.perf_counter()
    trainer.learn(part, 1)
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize(trainer.policy.device)
    wanted = settings.prompts_per_step * settings.num_generations
    return (time.perf_counter() - begun) * wanted / len(part)


def peak_memory(device: torch.device) -> int:
    """Most bytes that were taken at once: on a GPU by tensors, otherwise by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def probe(config: Config, *, seconds: float = 60.0, prompts: int = 1 << 30, tries: int | None = None) -> dict[str, Any]:
    """Answers some training prompts and makes one update, then tells what was seen; nothing is kept.

    Args:
        config: all settings; accelerators in it must be off.
        seconds: about how long it may take, loading not counted; the first prompts are always answered.
        prompts: most prompts to ask.
        tries: answers to each; None: ``rollout.num_generations``.

    Returns:
        What ``--json`` writes; :func:`lines` says it in words.

    Raises:
        UserError: a number is out of range, or as of :class:`Trainer`.
    """
    tries = config.rollout.num_generations if tries is None else tries
    for name, value in (("seconds", seconds), ("prompts", prompts), ("tries", tries)):
        if not 0 < value < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, got {value}")
    if config.parallel != "none":
        raise UserError(f"probe runs in one process: parallel must be none, got {config.parallel}")
    with TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder), label="probe", console=Console(stderr=True))
        trainer.logger.max_steps = 1
        try:
            with trainer.logger.recording():
                answers = ask(trainer, prompts, tries, SHARE * seconds)
                trainer.logger.log_work("update", 0, 1)
                updating = update_seconds(trainer, answers.groups)
        finally:
            trainer.engine.close()
        return describe(trainer, answers, updating)


def describe(trainer: Trainer, answers: Answers, updating: float) -> dict[str, Any]:
    """The findings as plain data."""
    config, settings, groups = trainer.config, trainer.config.rollout, answers.groups
    tries, size, whole = len(groups[0]), settings.num_generations, [a for group in groups for a in group]
    right = [sum(answer.accuracy > 0.5 for answer in group) for group in groups]
    p, prompt_lengths = [count / tries for count in right], [len(group[0].prompt_ids) for group in groups]
    lengths = [sum(len(answer.response_ids) for answer in group) / tries for group in groups]
    judged = all(answer.merit is None for answer in whole)  # else nothing is right or wrong
    chances = [spread_chance(count, tries, size) for count in right]
    of_step = settings.prompts_per_step * size / (answers.timed * tries)
    found: dict[str, Any] = {
        "p": p,
        "tries": tries,
        "lengths": lengths,
        "prompt_lengths": prompt_lengths,
        "mean_p": sum(p) / len(p),
        "group_size": size,
        "judged": judged,
        "spread": sum(chances) / len(p) if judged else reward_spread(groups, min(size, tries)),
        "spread_of_p": sum(1 - x**size - (1 - x) ** size for x in p) / len(p),
        "reward_spread": reward_spread(groups, size),
        "all_wrong": sum(wrong_chance(count, tries, size) for count in right) / len(p) if judged else 0.0,
        "mean_length": sum(lengths) / len(lengths),
        "truncated": sum(answer.finish_reason == "length" for answer in whole) / len(whole),
        "spearman": {"prompt_length": spearman(p, prompt_lengths), "answer_length": spearman(p, lengths)},
        "tokens_per_second": answers.tokens / max(answers.seconds["rollout"], 1e-9),
        "seconds": {
            "generation": answers.seconds["rollout"] * of_step,
            "rewards": answers.seconds["reward"] * of_step,
            "update": updating,
        },
        "memory_bytes": peak_memory(trainer.policy.device),
        "train_prompts": len(trainer.prompts.ids["train"]),
        "steps": config.max_steps,
        "epochs": config.max_steps * settings.prompts_per_step / len(trainer.prompts.ids["train"]),
        "device": device_name(trainer.policy.device),
        "versions": versions(),
    }
    curriculum: CurriculumSettings = getattr(config.accelerators, CurriculumSettings.name)
    bounds: list[Bound] = all_bounds(
        found, answers_of_step=settings.prompts_per_step * size, rare_share=curriculum.rare_share
    )
    return found | {"bounds": {bound.name: {"at_most": bound.at_most, "why": bound.why} for bound in bounds}}


def histogram(p: Sequence[float]) -> list[tuple[str, int]]:
    """Prompts never answered right, by fifths of p in between, and always."""
    inner = [x for x in p if 0 < x < 1]
    fifths = [sum(int(x * 5) == i for x in inner) for i in range(5)]
    names = [f"{i / 5:.1f} to {(i + 1) / 5:.1f}" for i in range(5)]
    return [("0", p.count(0)), *zip(names, fifths), ("1", p.count(1))]


def lines(found: dict[str, Any]) -> list[str]:
    """The findings in words."""
    p, size, seconds = found["p"], found["group_size"], found["seconds"]
    bins, whole = histogram(p), sum(seconds.values())
    longest = max(count for _, count in bins)
    said = [
        f"{len(p)} prompts, {found['tries']} answers each; p is the share of right ones: mean {found['mean_p']:.3f}"
    ]
    said += [f"  p {name:>10} {count:5d} {'#' * round(BARS * count / longest)}" for name, count in bins]
    if not found["judged"]:
        said += ["nothing is right or wrong in this task: p has no meaning, and groups are compared by rewards"]
    of_rewards = found["reward_spread"]
    rewards = "" if of_rewards is None else f"; {of_rewards:.1%} have different rewards"
    speed, memory = found["tokens_per_second"], found["memory_bytes"] / 2**30
    said += [
        f"groups of {size} with right and wrong answers: {found['spread']:.1%}{rewards}",
        f"answers: {found['mean_length']:.0f} tokens, {found['truncated']:.1%} truncated",
        f"a step of {whole:.1f} s: " + ", ".join(f"{n} {s:.1f} s ({s / whole:.0%})" for n, s in seconds.items()),
        f"generation: {speed:,.0f} tokens/s; memory: {memory:.1f} GiB at most",
        f"epochs: {found['epochs']:.2f} in {found['steps']} steps over {found['train_prompts']} prompts",
    ]
    for name, value in found["spearman"].items():
        if value is not None:
            said.append(f"rank correlation of p with {name.replace('_', ' ')}: {value:+.2f}")
    said.append("what could pay, at most as many times as fast:")
    for name, bound in found["bounds"].items():
        most = "   ?" if bound["at_most"] is None else f"{bound['at_most']:.2f}"
        said.append(f"  {name:<17} {most:>5}  {bound['why']}")
    return said


def draw(found: dict[str, Any], path: Path) -> None:
    """p as a histogram and over the length of answers, and where the seconds go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    edges = [(i - 0.5) / found["tries"] for i in range(found["tries"] + 2)]
    left.hist(found["p"], edges)
    left.set(xlabel="p of a prompt", ylabel="prompts", title=f"{found['spread']:.0%} of groups have a spread")
    middle.plot(found["lengths"], found["p"], ".", alpha=0.5)
    middle.set(xlabel="tokens of its answers", ylabel="p of a prompt", title="Difficulty and length")
    right.barh(list(found["seconds"]), list(found["seconds"].values()))
    right.invert_yaxis()
    right.set(xlabel="seconds of a step", title=f"{found['tokens_per_second']:,.0f} tokens/s of generation")
    figure.savefig(path, dpi=120)


def run(config: Config, *, json_file: Path | None, plot: Path | None, **limits: Any) -> None:
    """The command: prints, and writes what is asked for."""
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent} for {path.name}")
    found = probe(config, **limits)
    print("\n".join(lines(found)))
    if json_file is not None:
        write_text(json_file, json.dumps(found, indent=1) + "\n")
    if plot is not None:
        draw(found, plot)
