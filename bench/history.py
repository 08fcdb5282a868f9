"""Rollout history: tokens per decode step, time per draft and bytes per token on replayed answers.

Four language models' real answers to GSM8K's test questions (RLKERNELS_GSM8K_DIR) stand for four epochs, tokenised by
a BPE trained on the questions. A replay walks through each answer as a decoder would: draft, accept what is right,
one more token, and at the end of an epoch its answers enter the history. The greedy bound is one token a step.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

import rlkernels
from bench import Missing, Row

EPOCHS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
LIMIT = 16  # most draft tokens a step, for every provider


@dataclass
class Trace:
    prompts: list[np.ndarray]  # int32
    answers: list[list[np.ndarray]]  # by epoch and prompt
    rewards: list[list[float]]


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
    return Trace(
        [encode(row["question"], []) for row in rows],
        [[encode(row[epoch]["solution"], [0]) for row in rows] for epoch in EPOCHS],
        [[float(row[epoch]["is_correct"]) for row in rows] for epoch in EPOCHS],
    )


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

    def __init__(self, cache_type: type) -> None:
        self.cache = cache_type(max_tree_depth=24)
        self.request = 0

    def start(self, prompt: np.ndarray) -> None:
        self.request += 1
        self.cache.start_request(self.request, prompt)
        self.context = prompt

    def draft(self) -> np.ndarray:
        return np.array(
            self.cache.speculate(self.request, self.context[-24:], max_spec_tokens=LIMIT).token_ids, np.int32
        )

    def accept(self, offered: int, accepted: int, new: np.ndarray) -> None:
        self.cache.add_active_response(self.request, new)
        self.context = np.concatenate([self.context, new])

    def stop(self) -> None:
        self.cache.stop_request(self.request)
        self.cache.evict_cached_response(self.request)  # answers enter the history at the end of the epoch

    def add(self, prompt: np.ndarray, answer: np.ndarray, reward: float, epoch: int) -> None:
        self.request += 1
        self.cache.start_request(self.request, prompt)
        self.cache.add_active_response(self.request, answer)
        self.cache.stop_request(self.request)

    def bytes(self) -> int:
        return self.cache._global_tree.estimate_memory()


def replay(trace: Trace, drafter) -> Replay:
    rates, times, offered, accepted = [], [], 0, 0
    build_s = stored = 0.0
    for epoch, answers in enumerate(trace.answers):
        tokens = steps = 0
        for prompt, answer in zip(trace.prompts, answers):
            drafter.start(prompt)
            done = 0
            while done < len(answer):
                before = time.perf_counter()
                draft = drafter.draft()
                times.append(time.perf_counter() - before)
                draft = draft[: len(answer) - done - 1]  # the verifier adds a token of its own
                right = int((np.append(draft != answer[done : done + len(draft)], True)).argmax())
                offered, accepted = offered + len(draft), accepted + right
                drafter.accept(len(draft), right, answer[done : done + right + 1])
                done += right + 1
                steps += 1
            tokens += len(answer)
            drafter.stop()
        before = time.perf_counter()
        for prompt, answer, reward in zip(trace.prompts, answers, trace.rewards[epoch]):
            drafter.add(prompt, answer, reward, epoch)
        build_s += time.perf_counter() - before
        stored += tokens
        rates.append(tokens / steps)
    return Replay(rates, offered, accepted, median(times), build_s / stored, drafter.bytes() / stored)


def batched_draft_s(trace: Trace, batch: int = 256) -> float:
    """Seconds per draft through handles, a whole batch a call, after all four epochs; answers half done."""
    history = rlkernels.RolloutHistory(token_cost=0.0)
    for epoch, answers in enumerate(trace.answers):
        for prompt, answer in zip(trace.prompts, answers):
            history.add(prompt, answer, epoch=epoch)
    handles = [history.track(prompt) for prompt in trace.prompts[:batch]]
    for handle, answer in zip(handles, trace.answers[-1]):
        history.extend(handle, answer[: len(answer) // 2])
    known, times = np.array(handles), []
    for _ in range(50):
        before = time.perf_counter()
        history.draft_tracked(known, max_tokens=LIMIT)
        times.append(time.perf_counter() - before)
    return median(times) / len(handles)


def row(name: str, shape: str, make: Callable[[], object], trace: Trace, extra: str = "") -> Row:
    seen = replay(trace, make())
    rates = " ".join(f"{r:.2f}" for r in seen.tokens_per_step)
    share = seen.accepted / max(seen.offered, 1)
    text = (
        f"tokens/step by epoch {rates}; {share:.0%} of {seen.offered} draft tokens accepted; "
        f"build {seen.build_s * 1e6:.2f} us/token; {seen.bytes_per_token:.1f} bytes/token"
    )
    return Row("rollout_history", name, shape, "int32", median_s=seen.draft_s, extra=text + extra)


def cases(quick: bool) -> Iterator[Row]:
    trace = gsm8k_trace(200 if quick else 1319)
    shape = "GSM8K, 4 epochs of answers, one draft a call"
    if isinstance(trace, Missing):
        yield Row("rollout_history", "rlkernels", shape, missing=trace.reason)
        return
    torch.set_num_threads(1)
    yield row("rlkernels", shape, OurHistory, trace)
    yield row("rlkernels, no feedback", shape, lambda: OurHistory(use_feedback=False), trace)
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        yield Row("rollout_history", "ArcticInference", shape, missing=f"{error}; pip install arctic-inference")
    else:
        yield row("ArcticInference", shape, lambda: ArcticHistory(SuffixDecodingCache), trace)
    yield Row(
        "rollout_history", "rlkernels", "256 handles a call, 16 draft tokens", "int32", median_s=batched_draft_s(trace)
    )
