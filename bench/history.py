"""Rollout history: tokens per decode step, time per draft and bytes per token on replayed answers.

Two traces. Four language models' real answers to GSM8K's test questions (RLKERNELS_GSM8K_DIR) stand for four epochs,
tokenised by a BPE trained on the questions. And the rollouts of a run of our own trainer (RLKERNELS_TRACE, a file that
``python -m bench._trace`` writes). A replay walks through each answer as a decoder would: draft, accept what is right,
one more token; the answers of a step enter the history when it ends. Plain decoding is one token a step.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np
import torch

import rlkernels
from bench import Missing, Row

EPOCHS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
LIMIT = 16  # most draft tokens a step, for every provider
ARCTIC_SETTINGS: dict[str, dict[str, float]] = {
    "ArcticInference": {},
    "ArcticInference, max_spec_factor=4": {"max_spec_factor": 4.0},  # drafts up to four times the match's length
}


@dataclass
class Answer:
    prompt: int
    epoch: int
    step: int
    reward: float
    ids: np.ndarray  # int32


@dataclass
class Trace:
    name: str
    prompts: list[np.ndarray]  # int32
    answers: list[Answer]  # in order of their steps


def trainer_trace() -> Trace | Missing:
    path = Path(os.environ.get("RLKERNELS_TRACE", ""))
    if not path.is_file():
        return Missing("no trace; write one with python -m bench._trace FILE and set RLKERNELS_TRACE to FILE")
    return read_trace(path)


def read_trace(path: Path) -> Trace:
    """Return what ``python -m bench._trace`` has written."""
    with np.load(path) as file:
        data = dict(file)

    def rows(name: str) -> list[np.ndarray]:
        return np.split(data[f"{name}_ids"], data[f"{name}_lengths"].cumsum()[:-1])

    columns = [data[name].tolist() for name in ("key", "epoch", "step", "reward")]
    answers = [Answer(*values) for values in zip(*columns, rows("answer"))]
    return Trace(f"own trainer, {answers[-1].epoch + 1} epochs", rows("prompt"), answers)


def gsm8k_trace(questions: int) -> Trace | Missing:
    folder = Path(os.environ.get("RLKERNELS_GSM8K_DIR", ""))
    if not (folder / "example_model_solutions.jsonl").is_file():
        return Missing("GSM8K is not here; set RLKERNELS_GSM8K_DIR to its folder")
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        return Missing("pip install tokenizers")
    train = [json.loads(line)["question"] for line in (folder / "train.jsonl").open()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(train, trainer)

    def encode(text: str, end: list[int]) -> np.ndarray:
        return np.array(tokenizer.encode(text).ids + end, np.int32)

    rows = [json.loads(line) for line in (folder / "example_model_solutions.jsonl").open()][:questions]
    answers = [
        Answer(i, step, step, float(row[epoch]["is_correct"]), encode(row[epoch]["solution"], [0]))
        for step, epoch in enumerate(EPOCHS)
        for i, row in enumerate(rows)
    ]
    return Trace(f"GSM8K, {len(EPOCHS)} epochs", [encode(row["question"], []) for row in rows], answers)


@dataclass
class Replay:
    tokens_per_step: list[float]  # by epoch
    offered: int  # draft tokens
    accepted: int
    draft_s: float  # median over steps
    build_s: float  # per token
    bytes_per_token: float


class OurHistory:
    def __init__(self, use_feedback: bool = True) -> None:
        self.history = rlkernels.RolloutHistory()
        self.use_feedback = use_feedback

    def start(self, prompt: np.ndarray) -> None:
        self.handle = self.history.track(prompt)

    def draft(self) -> np.ndarray:
        ids, lengths = self.history.draft_tracked([self.handle], max_tokens=LIMIT)
        return ids[0, : lengths[0]].numpy()

    def accept(self, offered: int, accepted: int, new: np.ndarray) -> None:
        self.history.extend(self.handle, new)
        if self.use_feedback:
            self.history.observe([self.handle], [offered], [accepted])

    def stop(self) -> None:
        self.history.release(self.handle)

    def add(self, prompt: np.ndarray, answer: np.ndarray, reward: float, epoch: int) -> None:
        self.history.add(prompt, answer, reward=reward, epoch=epoch)

    def bytes(self) -> int:
        return self.history.stats["bytes"]


class ArcticHistory:
    """ArcticInference's suffix cache (pip install arctic-inference), used as its documentation does."""

    def __init__(self, cache_type: type, **options: float) -> None:
        self.cache = cache_type(max_tree_depth=24)
        self.options = options
        self.request = 0

    def start(self, prompt: np.ndarray) -> None:
        self.request += 1
        self.cache.start_request(self.request, prompt)
        self.context = prompt

    def draft(self) -> np.ndarray:
        found = self.cache.speculate(self.request, self.context[-24:], max_spec_tokens=LIMIT, **self.options)
        return np.array(found.token_ids, np.int32)

    def accept(self, offered: int, accepted: int, new: np.ndarray) -> None:
        self.cache.add_active_response(self.request, new)
        self.context = np.concatenate([self.context, new])

    def stop(self) -> None:
        self.cache.stop_request(self.request)
        self.cache.evict_cached_response(self.request)  # answers enter the history at the end of the step

    def add(self, prompt: np.ndarray, answer: np.ndarray, reward: float, epoch: int) -> None:
        self.request += 1
        self.cache.start_request(self.request, prompt)
        self.cache.add_active_response(self.request, answer)
        self.cache.stop_request(self.request)

    def bytes(self) -> int:
        return self.cache._global_tree.estimate_memory()


def replay(trace: Trace, drafter) -> Replay:
    times, offered, accepted = [], 0, 0
    build_s = 0.0
    tokens, steps = ([0] * (trace.answers[-1].epoch + 1) for _ in range(2))  # by epoch
    for _, group in groupby(trace.answers, lambda answer: answer.step):
        answers = list(group)
        for answer in answers:
            drafter.start(trace.prompts[answer.prompt])
            ids, done = answer.ids, 0
            while done < len(ids):
                before = time.perf_counter()
                draft = drafter.draft()
                times.append(time.perf_counter() - before)
                draft = draft[: len(ids) - done - 1]  # the verifier adds a token of its own
                right = int((np.append(draft != ids[done : done + len(draft)], True)).argmax())
                offered, accepted = offered + len(draft), accepted + right
                drafter.accept(len(draft), right, ids[done : done + right + 1])
                done += right + 1
                steps[answer.epoch] += 1
            tokens[answer.epoch] += len(ids)
            drafter.stop()
        before = time.perf_counter()
        for answer in answers:
            drafter.add(trace.prompts[answer.prompt], answer.ids, answer.reward, answer.epoch)
        build_s += time.perf_counter() - before
    rates = [count / taken for count, taken in zip(tokens, steps)]
    stored = sum(tokens)
    return Replay(rates, offered, accepted, median(times), build_s / stored, drafter.bytes() / stored)


def batched_draft_s(trace: Trace, batch: int = 256) -> float:
    """Seconds per draft through handles, a whole batch a call, with the whole trace stored; answers half done."""
    history = rlkernels.RolloutHistory(token_cost=0.0)
    for answer in trace.answers:
        history.add(trace.prompts[answer.prompt], answer.ids, reward=answer.reward, epoch=answer.epoch)
    handles = []
    for answer in trace.answers[-batch:]:
        handles.append(history.track(trace.prompts[answer.prompt]))
        history.extend(handles[-1], answer.ids[: len(answer.ids) // 2])
    known, times = np.array(handles), []
    for _ in range(50):
        before = time.perf_counter()
        history.draft_tracked(known, max_tokens=LIMIT)
        times.append(time.perf_counter() - before)
    return median(times) / len(handles)


def row(name: str, make: Callable[[], object], trace: Trace) -> Row:
    seen = replay(trace, make())
    rates = " ".join(f"{r:.2f}" for r in seen.tokens_per_step)
    share = seen.accepted / max(seen.offered, 1)
    text = (
        f"tokens/step by epoch {rates}; {share:.0%} of {seen.offered} draft tokens accepted; "
        f"build {seen.build_s * 1e6:.2f} us/token; {seen.bytes_per_token:.1f} bytes/token"
    )
    return Row("rollout_history", name, f"{trace.name}, one draft a call", "int32", median_s=seen.draft_s, extra=text)


def cases(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        arctic, why = None, f"{error}; pip install arctic-inference"
    else:
        arctic, why = SuffixDecodingCache, ""
    for trace in (gsm8k_trace(200 if quick else 1319), trainer_trace()):
        if isinstance(trace, Missing):
            yield Row("rollout_history", "rlkernels", "replay", missing=trace.reason)
            continue
        yield row("rlkernels", OurHistory, trace)
        yield row("rlkernels, no feedback", lambda: OurHistory(use_feedback=False), trace)
        for name, options in (
            ("ArcticInference", {}),
            ("ArcticInference, max_spec_factor=4", {"max_spec_factor": 4.0}),
        ):
            if arctic is None:
                yield Row("rollout_history", name, trace.name, missing=why)
            else:
                yield row(name, partial(ArcticHistory, arctic, **options), trace)
        shape = f"{trace.name}, 256 handles a call"
        yield Row("rollout_history", "rlkernels", shape, "int32", median_s=batched_draft_s(trace))
