"""Answers continued (after SPEC-RL, arXiv 2509.23232): what of them the present policy keeps, and what that saves.

    python -m bench.studies continued
    python -m bench.studies continued --parts measure --tasks sums --seeds 7 8 --steps 60

The parts: `measure` trains plainly, and at every later visit to a prompt puts its answers of the visit before to the
present policy. They are kept up to the first reject, by one of two rules, and continued by the engine beside the fresh
answers, which alone are trained on. *min(1, p_new / p_old)* is the chance of each token to be kept; by *same numbers*
it is kept while the random number that drew it draws it again. `train` trains on answers continued with the same
numbers, the earlier answer being checked by the engine as one draft, and plainly. Seconds are CPU seconds of a thread.

A finished run is a row of bench/studies/results/continued.jsonl, and is not made again. Writes continued.md beside it.
"""

import argparse
import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from bench._runner import cpu_model
from bench.faults.records import append_row, read_rows
from bench.studies.continued_report import BY_CHANCE, FRESH, RULES, SAME_NUMBERS, report
from python_trainer.accelerators.base import StepContext
from python_trainer.callbacks import Callback
from python_trainer.config import load_config
from python_trainer.data import Example, Request, Rollout, by_group, merits
from python_trainer.files import write_text
from python_trainer.keyed import keyed_seed
from python_trainer.model.packing import micro_batches, pack
from python_trainer.rollout import SamplingParams
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics
from rlkernels import keyed_uniform, sample_tokens

RECORDS = Path(__file__).parent / "results" / "continued.jsonl"
MEASURED = {"lattice_paths": (60, (7, 8)), "sums": (30, (7,)), "countdown": (30, (7,))}  # steps, seeds
TRAINED, TRAINED_STEPS, TRAINED_SEEDS = "lattice_paths", 120, (0, 1)
COMMON = ["accelerators.curriculum.database=null", "save.save_model=false"]
MEASURING = ["evaluation.eval_steps=0", "evaluation.eval_limit=16", "save.save_steps=0"]
TRAINING = ["accelerators.enabled=['bench.studies.continuing:ContinuedSettings']", "evaluation.eval_steps=20",
            "evaluation.eval_limit=512", "evaluation.eval_limit_during=512"]  # fmt: skip


def by_chance(new: Tensor, old: Tensor, uniforms: Tensor) -> Tensor:
    """Whether each token is kept with chance min(1, p_new / p_old), bool.

    Args:
        new, old: log-probabilities of the token by the present policy and by that which drew it.
        uniforms: in [0, 1).
    """
    return uniforms < (new - old).exp()


def by_number(logits: Tensor, tokens: Tensor, numbers: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Whether each number still draws its token, bool [R], and what it draws, int64 [R].

    Args:
        logits: [R, V] of the present policy.
        tokens: int64 [R].
        numbers: float32 [R] that drew them.
    """
    drawn, _ = sample_tokens(logits, numbers, temperature=temperature)
    return drawn == tokens, drawn


def until_reject(kept: Tensor) -> Tensor:
    """Tokens before the first that is not kept, int64 [B], of answers [B, L] that are rejected beyond their ends."""
    return kept.long().cumprod(1).sum(1)


@dataclass
class Numbered:
    """An answer of the visit before, and the numbers that drew it, float32 [L]."""

    rollout: Rollout
    numbers: Tensor


def numbers_of(answer: Rollout, seed: int, sample_id: int) -> Tensor:
    """Those that the engine drew its tokens with, float32 [L]."""
    first, count = len(answer.prompt_ids), len(answer.response_ids)
    return keyed_uniform(seed, torch.full((count,), sample_id), torch.arange(first, first + count))


@dataclass
class Checked:
    """What one rule leaves of each of B answers: so many tokens, and what comes instead of the one that is rejected."""

    kept: list[int]
    instead: list[list[int]]  # nothing where the engine draws it


def check(
    context: StepContext, earlier: Sequence[Numbered], timer: Callable[[], float]
) -> tuple[dict[str, Checked], float]:
    """What either rule keeps, and the seconds of the forward pass of training over these answers."""
    policy, temperature, seconds = context.policy, context.generation.temperature, 0.0
    rollouts = [answer.rollout for answer in earlier]
    found = {rule: Checked([0] * len(earlier), [[] for _ in earlier]) for rule in RULES}
    generator = torch.Generator().manual_seed(keyed_seed(context.seed, "chances"))
    for part in micro_batches(rollouts, range(len(rollouts)), context.micro_batch_tokens):
        begun = timer()
        packed = pack(rollouts, part)
        with torch.no_grad(), policy.packed_attention():
            new, _, states = policy.score_with_states(packed, temperature)
        seconds += timer() - begun
        logits = policy.model.get_output_embeddings()(states).detach()
        numbers = torch.cat([earlier[i].numbers for i in packed.samples])  # answers stand there one after the other
        same, drawn = by_number(logits, packed.targets, numbers, temperature)
        old = torch.zeros_like(new)
        old[packed.mask] = torch.tensor([p for i in packed.samples for p in rollouts[i].logprobs])
        likely = by_chance(new, old, torch.rand(new.shape, generator=generator)) & packed.mask
        drawn = packed.spread(drawn)
        for rule, kept in ((SAME_NUMBERS, packed.spread(same) > 0), (BY_CHANCE, likely)):
            for row, (i, count) in enumerate(zip(packed.samples, until_reject(kept).tolist())):
                found[rule].kept[i] = count
                if rule == SAME_NUMBERS and count < len(rollouts[i].response_ids):
                    found[rule].instead[i] = [int(drawn[row, count])]
    return found, seconds


def go_on(
    context: StepContext, earlier: Sequence[Numbered], checked: Checked, key: str, timer: Callable[[], float]
) -> tuple[list[list[int]], float]:
    """The tokens of the answers continued by the engine, and its seconds; what is there is prefilled."""
    settings, ends = context.generation, context.policy.eos_token_ids
    answers, requests, owners = [], [], []
    for i, answer in enumerate(earlier):
        whole = answer.rollout.response_ids
        start = [*whole[: checked.kept[i]], *checked.instead[i]]
        answers.append(start)
        left = settings.max_completion_length - len(start)
        if checked.kept[i] < len(whole) and left > 0 and not (start and start[-1] in ends):
            requests.append(Request(answer.rollout.prompt_ids, start, 1, left, i))
            owners.append(i)
    sampling = SamplingParams(settings.temperature, seed=keyed_seed(context.seed, key))
    context.engine.policy_updated()  # what others left of these prompts in the cache is gone
    begun = timer()
    rollouts = context.engine.generate(requests, sampling)
    seconds = timer() - begun
    for i, rollout in zip(owners, rollouts):
        answers[i] = rollout.response_ids
    return answers, seconds


class Continuations(Callback):
    """Of a run without accelerators; it changes nothing in it.

    Attributes:
        found: what was counted, over the steps in which all prompts have come before.
        steps: these steps.
        spreads: by kind of answer, over groups: whether the answers of the visit before, and these, are not all alike.
        gains: by rule, over groups: mean accuracy less that of the fresh answers.
    """

    def __init__(self, timer: Callable[[], float]):
        self.timer = timer
        self.before: dict[int, list[Numbered]] = {}  # by prompt
        self.steps: list[int] = []
        self.found: dict[str, float] = {"tokens": 0, "answers": 0, "check_s": 0}
        self.found |= {f"{what}, {rule}": 0 for rule in RULES for what in ("tokens", "answers", "continuing_s")}
        self.spreads: dict[str, list[tuple[bool, bool]]] = {kind: [] for kind in (FRESH, *RULES)}
        self.gains: dict[str, list[float]] = {rule: [] for rule in RULES}

    def on_rollouts(self, trainer: Any, step: int, rollouts: Sequence[Rollout]) -> None:
        context, groups = trainer.context(step), list(by_group(rollouts).values())
        keys = [group[0].prompt_key for group in groups]
        if all(key in self.before for key in keys):
            self.steps.append(step)
            self._compare(context, [self.before[key] for key in keys], groups)
        ids = itertools.count()  # as the loop numbers the samples
        for key, group in zip(keys, groups):
            self.before[key] = [Numbered(answer, numbers_of(answer, context.seed, next(ids))) for answer in group]

    def _compare(self, context: StepContext, before: list[list[Numbered]], fresh: list[list[Rollout]]) -> None:
        earlier = [answer for group in before for answer in group]
        lengths = [len(answer.rollout.response_ids) for answer in earlier]
        examples = [context.task.train[answer.rollout.prompt_key] for answer in earlier]
        checked, seconds = check(context, earlier, self.timer)
        self.found["tokens"] += sum(lengths)
        self.found["answers"] += len(lengths)
        self.found["check_s"] += seconds
        were = [has_spread(merits(answer.rollout for answer in group)) for group in before]
        self.spreads[FRESH] += zip(were, (has_spread(merits(group)) for group in fresh))
        for rule in RULES:
            answers, seconds = go_on(context, earlier, checked[rule], rule, self.timer)
            self.found[f"tokens, {rule}"] += sum(checked[rule].kept)
            whole = [kept == length for kept, length in zip(checked[rule].kept, lengths)]
            self.found[f"answers, {rule}"] += sum(whole)
            self.found[f"continuing_s, {rule}"] += seconds
            right = iter(self._right(context, examples, answers))
            for was, group in zip(were, fresh):
                ours = [next(right) for _ in group]
                self.spreads[rule].append((was, has_spread(ours)))
                self.gains[rule].append(fmean(ours) - fmean(merits(group)))

    @staticmethod
    def _right(context: StepContext, examples: Sequence[Example], answers: Sequence[Sequence[int]]) -> list[float]:
        return list(context.judge(examples, [context.policy.decode(ids) for ids in answers], answers).accuracy)

    def row(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """For the records.

        Args:
            metrics: rows of the run.
        """
        rows = [row for row in metrics if row["step"] in self.steps]
        row: dict[str, Any] = {name: round(value, 2) for name, value in self.found.items()}
        row["rollout_s"] = round(sum(row["time/rollout_s"] for row in rows), 2)
        row["step_s"] = round(sum(row[f"time/{part}_s"] for row in rows for part in ("rollout", "reward", "train")), 2)
        for kind, seen in self.spreads.items():
            for was, name in ((False, "without"), (True, "with")):
                row[f"groups {name} spread, {kind}"] = [sum(now for old, now in seen if old == was),
                                                        sum(old == was for old, _ in seen)]  # fmt: skip
        for rule, gains in self.gains.items():
            row[f"right, {rule}"] = [round(fmean(gains), 5), round(stdev(gains) / len(gains) ** 0.5, 5)]
        return row


def has_spread(values: Sequence[float]) -> bool:
    return min(values) < max(values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/continued"), metavar="DIR")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"{', '.join(PARTS)}; default: both")  # fmt: skip
    parser.add_argument("--tasks", nargs="+", choices=list(MEASURED), default=list(MEASURED), metavar="TASK",
                        help=f"of the part measure: {', '.join(MEASURED)}; default: all")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of each part and task")
    parser.add_argument("--steps", type=int, help="default: as many as each part and task has")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records that are there")


def measure(args: argparse.Namespace) -> None:
    for task in args.tasks:
        steps, seeds = MEASURED[task]
        for seed in args.seeds or seeds:
            watch = Continuations(time.process_time)
            key = {"part": "measure", "task": task, "seed": seed, "steps": args.steps or steps}
            record(args, key, MEASURING, watch.row, watch)


def train(args: argparse.Namespace) -> None:
    for seed in args.seeds or TRAINED_SEEDS:
        for part in ("plain", "continued"):
            key = {"part": part, "task": TRAINED, "seed": seed, "steps": args.steps or TRAINED_STEPS}
            record(args, key, [*TRAINING, f"accelerators.continued.reuse={part == 'continued'}"], trained)


def record(
    args: argparse.Namespace,
    key: dict[str, Any],
    options: list[str],
    outcome: Callable[[list[dict[str, float]]], dict[str, Any]],
    *callbacks: Callback,
) -> None:
    """Makes a run and its row of the records, unless that is there; ``outcome`` is what its metrics say."""
    if any({name: row[name] for name in key} == key for row in read_rows(args.records)):
        return
    folder = args.output_dir / "-".join(map(str, key.values()))
    if callbacks:  # what they have counted of a run that was interrupted is lost
        shutil.rmtree(folder, ignore_errors=True)
    options = [*COMMON, *options, f"seed={key['seed']}", f"max_steps={key['steps']}"]
    config = load_config(f"configs/{key['task']}.yaml", options)
    Trainer(config, folder, callbacks=callbacks, resume=True, label=folder.name, timer=time.process_time).run()
    append_row(args.records, key | outcome(read_metrics(folder)), {"cpu": cpu_model(), "torch": torch.__version__})


def trained(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What came of a run with the accelerator, on or off."""
    rows = [row for row in metrics if row["step"]]
    curve = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {
        "rollout_s": round(sum(row["time/rollout_s"] for row in rows), 2),
        "accelerator_s": round(sum(row["time/accelerator/continued_s"] for row in rows), 2),
        "forward_passes": sum(row["continued/forward_passes"] for row in rows),
        "taken_over": sum(row["continued/taken_over"] for row in rows),
        "tokens": sum(row["tokens/generated"] for row in rows),
        "accuracy": round(fmean(curve), 4),
        "final": round(curve[-1], 4),
    }


PARTS = {"measure": measure, "train": train}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for part in args.parts if not args.report_only else ():
        PARTS[part](args)
    text = report(read_rows(args.records))
    print(text)
    write_text(args.records.with_suffix(".md"), text)
