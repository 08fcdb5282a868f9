"""Drafts in the first epoch, where a prompt has no earlier answers: what other prompts and siblings would save.

    python -m bench.studies siblings --output-dir runs/studies/siblings

Siblings are the answers to one prompt, which are generated side by side. The first epoch of three runs is recorded and
replayed pass by pass, with the trainer's drafter and the history's feedback, under rules that differ in what has been
given to the history. Tokens are known, so what is accepted is exact. Costs are a model: a pass costs so many tokens
(``--overheads``) on top of its own, those of prompts and wrong drafts included; a cell of the tables has the change
against no drafts. The last rule is a bound: of all that siblings have written by then after the same two tokens it
takes whatever goes on right for longest, up to 16 tokens, and nothing wrong.

CPU seconds are those of the drafter's calls. Answers in the making are stored by the plain Python history alone, which
is not timed. Traces that are there are kept. Writes bench/studies/results/siblings.md.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from bench._markdown import table_lines
from bench._runner import commit, cpu_model
from bench._trace import DEFAULTS, record
from bench.history import LIMIT, Answer, read_trace
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.files import write_text
from python_trainer.rollout.decoding import Decoding
from python_trainer.rollout.drafting import Drafter
from rlkernels import RolloutHistory
from rlkernels.history.reference import LOCAL_GRAM, SHARED_GRAMS, START, History, Place
from rlkernels.history.reference import Rollout as Stored

RUNS = {"lattice_paths": (7, 12), "sums": (7, 12), "arithmetic": (0, 16)}  # seed, steps of the first epoch
MAX_BATCH_TOKENS = 8192  # PagedEngine's default; all answers of a step fit into a pass


@dataclass(eq=False)
class Known(Decoding):
    """An answer that is generated once more."""

    answer: list[int] = field(default_factory=list)


@dataclass
class Epoch:
    prompts: Sequence[np.ndarray]  # int32, by key
    steps: Sequence[Sequence[Answer]]
    longest: int  # most tokens that an answer may have


@dataclass
class Spent:
    """On an epoch of generation."""

    passes: int = 0
    tokens: int = 0  # computed
    draws: int = 0  # samples, summed over passes
    seconds: float = 0.0  # of the drafter's calls

    def cost(self, overhead: float) -> float:
        """In tokens."""
        return overhead * self.passes + self.tokens


class Plain(Drafter):
    """No drafts, as in training where passes are cheap: prompts have no earlier answers yet."""

    scored = True

    def start(self, samples: Sequence[Decoding]) -> None:
        pass

    def keep(self, samples: Sequence[Decoding]) -> None:
        """Puts answers into the history: those of a step, at its end."""
        for sample in samples:
            rollout = sample.rollout
            self.history.add(rollout.prompt_ids, rollout.response_ids, reward=rollout.reward if self.scored else 0.0)


class Scored(Plain):
    """New prompts are drafted too, as in training where passes are dear."""

    def start(self, samples: Sequence[Decoding]) -> None:
        for sample in samples:
            self.handles[sample] = self.history.track(sample.rollout.prompt_ids)


class Others(Scored):
    """And no rewards are told, as siblings have none before the end of a step."""

    scored = False


class Finished(Others):
    """And an answer is there as soon as it is finished."""

    def stop(self, samples: Sequence[Decoding]) -> None:
        super().keep(samples)
        super().stop(samples)

    def keep(self, samples: Sequence[Decoding]) -> None:
        pass


class Omniscient(Plain):
    """The bound: the longest that siblings have written, after the same two tokens, of what comes next."""

    def __init__(self, history: RolloutHistory, *, pass_overhead: float):
        super().__init__(history, pass_overhead=pass_overhead)
        self.places: dict[tuple[int, ...], list[tuple[Decoding, int]]] = defaultdict(list)  # after prompt, two tokens

    def draft(self, samples: Sequence[Decoding], budget: int) -> None:
        for sample in samples:
            assert isinstance(sample, Known)
            wanted = sample.answer[sample.drawn : -1][:LIMIT]  # the last token is drawn by the pass itself
            places = self.places[self.before(sample, sample.drawn)]
            known = [other.rollout.response_ids[at : at + LIMIT] for other, at in places if other is not sample]
            sample.draft = wanted[: max((agreement(tokens, wanted) for tokens in known), default=0)]

    def learn(self, samples: Sequence[Decoding], accepted: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        for sample, tokens in zip(samples, new):
            for at in range(sample.drawn - len(tokens), sample.drawn):
                self.places[self.before(sample, at)].append((sample, at))

    def before(self, sample: Decoding, at: int) -> tuple[int, ...]:
        """The prompt, and what stands before a place in the answer."""
        tokens = [START] * LOCAL_GRAM + sample.rollout.response_ids[max(at - LOCAL_GRAM, 0) : at]
        return (sample.rollout.prompt_key, *tokens[-LOCAL_GRAM:])


class Growing(History):
    """A history that stores what a tracked sequence has generated as it comes, for all sequences but that one.

    Args:
        alone: nothing but answers to the same prompt votes: no other prompts, and not what the sequence itself says.
    """

    def __init__(self, alone: bool):
        super().__init__()
        self.alone = alone
        self.copies: dict[int, Stored] = {}  # by handle

    def track(self, prompt: np.ndarray) -> int:
        handle = super().track(prompt)
        copy = self.copies[handle] = Stored(self.handles[handle].prompt, [], 0.0, 0, next(self.serials))
        self.rollouts[copy.serial] = copy
        return handle

    def extend_tracked(self, handles: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> None:
        super().extend_tracked(handles, ids, lengths)
        for handle, new in zip(handles.tolist(), np.split(ids, lengths.cumsum()[:-1])):
            copy, pad = self.copies[handle], max(SHARED_GRAMS)
            padded = [START] * pad + copy.tokens + new.tolist()
            for at in range(pad + len(copy.tokens), len(padded)):
                for prompt, size in ((copy.prompt, LOCAL_GRAM), *((None, size) for size in SHARED_GRAMS)):
                    places = self.occurrences.setdefault((prompt, *padded[at - size : at]), [])
                    places.append((copy.serial, at - pad))
            copy.tokens += new.tolist()

    def draft_tracked(
        self, handles: np.ndarray, limit: int, token_cost: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = []
        for handle in handles:
            own = self.rollouts.pop(self.copies[int(handle)].serial)
            rows.append(super().draft_tracked(handle[None], limit, token_cost))
            self.rollouts[own.serial] = own
        ids, lengths = zip(*rows)
        return np.concatenate(ids), np.concatenate(lengths)

    def add(self, prompt: np.ndarray, response_ids: np.ndarray, reward: float, epoch: int) -> None:
        """Finished answers are here already."""

    def _places(self, prompt: tuple[int, ...] | None, size: int, context: list[int]) -> tuple[list[Place], int]:
        return ([], 0) if self.alone and prompt is None else super()._places(prompt, size, context)

    def _own_places(self, prompt: tuple[int, ...], generated: list[int]) -> list[Place]:
        return [] if self.alone else super()._own_places(prompt, generated)


def growing(*, alone: bool = False) -> RolloutHistory:
    history = RolloutHistory(backend="torch")
    history._core = Growing(alone)
    return history


RULES: dict[str, tuple[type[Plain], Callable[[], RolloutHistory]]] = {
    "other prompts, their rewards told, and the answer itself": (Scored, RolloutHistory),
    "other prompts and the answer itself": (Others, RolloutHistory),
    "and siblings that are finished": (Finished, RolloutHistory),
    "and siblings in the making, token by token": (Finished, growing),
    "siblings in the making alone": (Finished, partial(growing, alone=True)),
    "siblings alone, by one who knows all": (Omniscient, RolloutHistory),
}


def agreement(draft: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens of a draft are right."""
    wrong = (i for i, (ours, right) in enumerate(zip(draft, wanted)) if ours != right)
    return next(wrong, min(len(draft), len(wanted)))


def replay(epoch: Epoch, drafter: Plain) -> Spent:
    """As ``PagedEngine`` would: the first pass computes the prompts, every other one the last token and the draft."""
    spent = Spent()

    def call(method: Callable[..., None], *arguments: object) -> None:
        before = time.process_time()
        method(*arguments)
        spent.seconds += time.process_time() - before

    for answers in epoch.steps:
        samples = [
            Known(Rollout(epoch.prompts[a.prompt].tolist(), [], prompt_key=a.prompt, reward=a.reward), i,
                  epoch.longest, answer=a.ids.tolist())
            for i, a in enumerate(answers)
        ]  # fmt: skip
        call(drafter.start, samples)
        running, tokens = samples, sum(len(epoch.prompts[key]) for key in {a.prompt for a in answers})
        while running:
            spent.passes += 1
            spent.tokens += tokens
            spent.draws += len(running)
            accepted, new = [], []
            for sample in running:
                wanted = sample.answer[sample.drawn :]
                accepted.append(agreement(sample.draft, wanted))
                new.append(wanted[: accepted[-1] + 1])
                sample.rollout.response_ids += new[-1]
                sample.rollout.logprobs += [0.0] * len(new[-1])
            call(drafter.learn, running, accepted, new)
            call(drafter.stop, [sample for sample in running if sample.drawn == len(sample.answer)])
            running = [sample for sample in running if sample.drawn < len(sample.answer)]
            for sample in running:
                sample.draft = []
            call(drafter.draft, running, MAX_BATCH_TOKENS - len(running) - 1)
            tokens = sum(1 + len(sample.draft) for sample in running)
        call(drafter.keep, samples)
    return spent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/siblings"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS, metavar="NAME")
    parser.add_argument("--overheads", type=float, nargs="+", default=[30, 300, 3000], metavar="TOKENS")


def first_epoch(name: str, folder: Path) -> tuple[Epoch, float]:
    """Of a run, and the CPU seconds of its generation; recorded unless it is there."""
    seed, steps = RUNS[name]
    config = load_config(f"configs/{name}.yaml", [*DEFAULTS, f"seed={seed}", f"max_steps={steps}"])
    path, aside = folder / f"{name}-{seed}.npz", folder / "aside.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        record(config, aside)
        aside.replace(path)
    trace = read_trace(path)
    answers = [list(group) for _, group in groupby(trace.answers, lambda answer: answer.step)]
    with np.load(path) as file:
        seconds = float(file["rollout_s"].sum())
    return Epoch(trace.prompts, answers, config.rollout.max_completion_length), seconds


def report(title: str, epoch: Epoch, overheads: Sequence[float], generation_s: float) -> list[str]:
    """A row for each rule, in its cells a figure for each overhead."""
    answers = [answer for step in epoch.steps for answer in step]
    written, prompts = sum(len(answer.ids) for answer in answers), len({answer.prompt for answer in answers})
    plain, rows = replay(epoch, Plain(RolloutHistory(), pass_overhead=None)), []
    for words, (kind, history) in RULES.items():
        spent = [replay(epoch, kind(history(), pass_overhead=overhead)) for overhead in overheads]
        timed = kind is not Omniscient and history is RolloutHistory
        rows.append([
            words, ", ".join(f"{100 * (s.cost(a) / plain.cost(a) - 1):+.0f}" for s, a in zip(spent, overheads)) + " %",
            ", ".join(f"{100 * (1 - s.passes / plain.passes):.0f}" for s in spent) + " %",
            ", ".join(f"{written / s.draws:.2f}" for s in spent),
            ", ".join(f"{s.seconds:.2f}" for s in spent) if timed else "-",
        ])  # fmt: skip
    facts = (
        f"{len(epoch.steps)} steps, {len(answers):,} answers in groups of {len(answers) // prompts}, {written:,} "
        f"tokens in {generation_s:.1f} CPU s. Without drafts {plain.passes:,} passes over {plain.tokens:,} tokens, "
        "prompts included."
    )
    head = ["what drafts", "cost of generation", "passes saved", "tokens per pass and sample", "drafter, CPU s"]
    return [f"## {title}", "", facts, "", *table_lines(head, rows)]


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    overheads = ", ".join(f"{overhead:.0f}" for overhead in args.overheads)
    lines = [
        "# Drafts in the first epoch", "",
        f"By `python -m bench.studies siblings` (its docstring says how); {cpu_model()}, 1 thread, commit {commit()}. "
        f"The figures in a cell are for passes that cost {overheads} tokens on top of their own.",
    ]  # fmt: skip
    print("\n".join(lines))
    for name in args.runs:
        epoch, seconds = first_epoch(name, args.output_dir)
        found = ["", *report(f"{name}, seed {RUNS[name][0]}", epoch, args.overheads, seconds)]
        print("\n".join(found), flush=True)
        lines += found
    args.results.mkdir(parents=True, exist_ok=True)
    write_text(args.results / "siblings.md", "\n".join(lines) + "\n")
