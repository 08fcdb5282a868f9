"""Rollout history: tokens per decode step, time per draft and bytes per token on replayed answers.

Two traces. Real answers of four language models to GSM8K's test questions (RLKERNELS_GSM8K_DIR) stand for four epochs,
tokenised by a BPE trained on the questions. The other trace has the rollouts of a run of our trainer (RLKERNELS_TRACE,
a file that ``python -m bench._trace`` writes). A replay walks through each answer as a decoder does: draft, accept the
right tokens, add one more; the answers of a step enter the history when it ends. Plain decoding is one token a step.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import rlkernels
from bench import Measurement, Missing, Row, optional
from bench._runner import one_thread

EPOCHS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
MAX_DRAFT_TOKENS = 16  # a step, for every provider
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
    """Return the trace that ``python -m bench._trace`` wrote."""
    path = Path(os.environ.get("RLKERNELS_TRACE", ""))
    if not path.is_file():
        return Missing("no trace; write one with python -m bench._trace FILE and set RLKERNELS_TRACE to FILE")
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


class OurHistory:
    def __init__(self, use_feedback: bool = True) -> None:
        self.history = rlkernels.RolloutHistory()
        self.use_feedback = use_feedback

    def start(self, prompt: np.ndarray) -> None:
        self.handle = self.history.track(prompt)

    def draft(self) -> np.ndarray:
        ids, lengths = self.history.draft_tracked([self.handle], max_tokens=MAX_DRAFT_TOKENS)
        return ids[0, : lengths[0]].numpy()

    def accept(self, offered: int, accepted: int, tokens: np.ndarray) -> None:
        self.history.extend(self.handle, tokens)
        if self.use_feedback:
            self.history.observe([self.handle], [offered], [accepted])

    def stop(self) -> None:
        self.history.release(self.handle)

    def add(self, prompt: np.ndarray, answer: np.ndarray, reward: float, epoch: int) -> None:
        self.history.add(prompt, answer, reward=reward, epoch=epoch)

    def bytes(self) -> int:
        return self.history.stats["bytes"]


class ArcticHistory:
    """ArcticInference's suffix cache (pip install arctic-inference), used as in its documentation."""

    def __init__(self, cache_type: type, **options: float) -> None:
        self.cache = cache_type(max_tree_depth=24)
        self.options = options
        self.request = 0

    def start(self, prompt: np.ndarray) -> None:
        self.request += 1
        self.cache.start_request(self.request, prompt)
        self.context = prompt

    def draft(self) -> np.ndarray:
        draft = self.cache.speculate(self.request, self.context[-24:], max_spec_tokens=MAX_DRAFT_TOKENS, **self.options)
        return np.array(draft.token_ids, np.int32)

    def accept(self, offered: int, accepted: int, tokens: np.ndarray) -> None:
        self.cache.add_active_response(self.request, tokens)
        self.context = np.concatenate([self.context, tokens])

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


def row(name: str, drafter: OurHistory | ArcticHistory, trace: Trace, shape: str) -> Row:
    """Replay a trace; the row has the median time of a draft."""
    times = []
    offered = accepted = 0  # draft tokens
    build_s = 0.0
    num_epochs = trace.answers[-1].epoch + 1
    tokens = [0] * num_epochs
    steps = [0] * num_epochs
    for _, group in groupby(trace.answers, lambda answer: answer.step):
        answers = list(group)
        for answer in answers:
            drafter.start(trace.prompts[answer.prompt])
            ids = answer.ids
            position = 0
            while position < len(ids):
                start = time.perf_counter()
                draft = drafter.draft()
                times.append(time.perf_counter() - start)
                draft = draft[: len(ids) - position - 1]  # the verifier adds one more token
                is_wrong = np.append(draft != ids[position : position + len(draft)], True)
                num_right = int(is_wrong.argmax())
                offered += len(draft)
                accepted += num_right
                drafter.accept(len(draft), num_right, ids[position : position + num_right + 1])
                position += num_right + 1
                steps[answer.epoch] += 1
            tokens[answer.epoch] += len(ids)
            drafter.stop()
        start = time.perf_counter()
        for answer in answers:
            drafter.add(trace.prompts[answer.prompt], answer.ids, answer.reward, answer.epoch)
        build_s += time.perf_counter() - start
    tokens_per_step = " ".join(f"{num_tokens / num_steps:.2f}" for num_tokens, num_steps in zip(tokens, steps))
    stored_tokens = sum(tokens)
    text = (
        f"tokens/step by epoch {tokens_per_step}; {accepted / max(offered, 1):.0%} of {offered} draft tokens accepted; "
        f"build {build_s / stored_tokens * 1e6:.2f} us/token; {drafter.bytes() / stored_tokens:.1f} bytes/token"
    )
    return Row("rollout_history", name, shape, "int32", median_s=median(times), extra=text)


def batched_draft_s(trace: Trace, batch: int = 256) -> float:
    """Return seconds per draft through handles, with a batch a call, a stored trace, and half of each answer done."""
    history = rlkernels.RolloutHistory(token_cost=0.0)
    for answer in trace.answers:
        history.add(trace.prompts[answer.prompt], answer.ids, reward=answer.reward, epoch=answer.epoch)
    handles = []
    for answer in trace.answers[-batch:]:
        handles.append(history.track(trace.prompts[answer.prompt]))
        history.extend(handles[-1], answer.ids[: len(answer.ids) // 2])
    handle_array = np.array(handles)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        history.draft_tracked(handle_array, max_tokens=MAX_DRAFT_TOKENS)
        times.append(time.perf_counter() - start)
    return median(times) / len(handles)


def rows(trace: Trace, shape: str) -> Iterator[Row]:
    """Replay a trace by every drafter."""
    arctic: Any = optional("arctic_inference.suffix_decoding", lambda m: m.SuffixDecodingCache, "arctic-inference")
    yield row("rlkernels", OurHistory(), trace, shape)
    yield row("rlkernels, no feedback", OurHistory(use_feedback=False), trace, shape)
    for name, options in ARCTIC_SETTINGS.items():
        if isinstance(arctic, Missing):
            yield Row("rollout_history", name, shape, "int32", missing=arctic.reason)
        else:
            yield row(name, ArcticHistory(arctic, **options), trace, shape)


def batched_rows(trace: Trace, shape: str) -> Iterator[Row]:
    yield Row("rollout_history", "rlkernels", shape, "int32", median_s=batched_draft_s(trace))


def cases(quick: bool) -> Iterator[Measurement]:
    with one_thread():
        for trace in (gsm8k_trace(200 if quick else 1319), trainer_trace()):
            if isinstance(trace, Missing):
                yield Measurement.missing(Row("rollout_history", "rlkernels", "replay", missing=trace.reason))
                continue
            for kind, measure in (("one draft a call", rows), ("256 handles a call", batched_rows)):
                shape = f"{trace.name}, {kind}"
                yield Measurement([shape], partial(measure, trace, shape))
