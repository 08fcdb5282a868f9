"""Cases of ops on logits: log-probabilities, sampling, drafts."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.logprobs import reference
from rlkernels.proof.problem import Case, Problem
from rlkernels.proof.workload import Workload

Device = torch.device
Settings = tuple[float, float, int]  # temperature, top-p, top-k
BF16 = torch.bfloat16
F32 = torch.float32
MIXED: list[Settings] = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 1.0, 20), (1.0, 0.9, 0), (1.3, 0.8, 5)]
LOGIT_ROWS = 1024  # of a timed case; plain torch holds several float32 copies of them


def peaked_logits(rows: int, vocab: int, dtype: torch.dtype, on: Device) -> torch.Tensor:
    """Return peaked rows as of a language model, with some tokens at minus infinity."""
    logits = torch.randn(rows, vocab, device=on) * 3
    logits[:, 0] += 20
    if vocab > 2:
        logits[::3, 1] = -torch.inf
    return logits.to(dtype)


def logprobs(rows: int, vocab: int, dtype: torch.dtype, backward: bool, on: Device) -> Problem:
    """Make a problem of log-probability and entropy; with ``backward`` also the gradient of the logits."""
    logits = peaked_logits(rows, vocab, dtype, on)
    ids = torch.randint(0, vocab, (rows,), device=on)
    ids[::3] = 0  # a token with a finite logit
    grads = torch.randn(2, rows, device=on)

    def run(function: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        leaf = tensor.detach().requires_grad_(backward)
        out = list(function(leaf))
        if backward:
            out += torch.autograd.grad(out, [leaf], list(grads.to(out[0].dtype)))
        return out

    def score(backend: str, leaf: torch.Tensor) -> Any:
        return rlkernels.token_logprobs(leaf, ids, temperature=0.7, return_entropy=True, backend=backend)

    return Problem(
        lambda backend: run(partial(score, backend), logits),
        lambda: run(lambda leaf: reference.token_logprobs(leaf, ids, 0.7), logits.double()),
        nbytes=logits.nbytes * (3 if backward else 1),
        dtype=dtype,
        inputs={"logits": logits, "ids": ids, "run": run},
    )


def linear_logprobs(rows: int, vocab: int, width: int, dtype: torch.dtype, on: Device) -> Problem:
    """Make the same problem from hidden states, with the gradients of states and weight."""
    hidden = torch.randn(rows, width, device=on)
    weight = torch.randn(vocab, width, device=on) * 3 / width**0.5
    inputs = hidden.to(dtype), weight.to(dtype)
    ids = torch.randint(0, vocab, (rows,), device=on)
    grads = torch.randn(2, rows, device=on)

    def run(function: Any, tensors: Any) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = list(function(*leaves, ids))
        return out + list(torch.autograd.grad(out, leaves, list(grads.to(out[0].dtype))))

    def score(backend: str) -> list[torch.Tensor]:
        return run(partial(rlkernels.linear_token_logprobs, return_entropy=True, backend=backend), inputs)

    return Problem(
        score,
        lambda: run(reference.linear_token_logprobs, [x.double() for x in inputs]),
        nbytes=sum(x.nbytes for x in inputs) * 2,
        flops=8 * rows * vocab * width,
        dtype=dtype,
        inputs={"states": inputs, "run": run},
    )


def _per_row(settings: list[Settings], rows: int, on: Device) -> dict[str, Any]:
    """Return settings of sampling that alternate between rows; plain numbers if all rows share them."""
    names = ("temperature", "top_p", "top_k")
    if len(settings) == 1:
        return dict(zip(names, settings[0]))
    columns = zip(*itertools.islice(itertools.cycle(settings), rows))
    return {name: torch.tensor(column, device=on) for name, column in zip(names, columns)}


def sample(rows: int, vocab: int, dtype: torch.dtype, settings: list[Settings], on: Device) -> Problem:
    logits = torch.randn(rows, vocab, device=on).mul(3).to(dtype)
    uniforms = torch.rand(rows, device=on)
    options = _per_row(settings, rows, on)
    return Problem(
        lambda backend: rlkernels.sample_tokens(logits, uniforms, **options, validate=False, backend=backend),
        nbytes=logits.nbytes,
        dtype=dtype,
        inputs={"logits": logits, "settings": settings},
    )


def verify(lengths: list[int], vocab: int, dtype: torch.dtype, settings: list[Settings], on: Device) -> Problem:
    """Make a problem of drafts with these lengths, most of whose tokens are right."""
    starts = [0, *itertools.accumulate(n + 1 for n in lengths)]
    rows = starts[-1]
    logits = peaked_logits(rows, vocab, dtype, on)
    uniforms = torch.rand(rows, device=on)
    options = _per_row(settings, len(lengths), on)
    owner = torch.repeat_interleave(torch.tensor(lengths, device="cpu") + 1).to(on)
    per_row: dict[str, Any] = {name: x[owner] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    ids, _ = rlkernels.sample_tokens(logits, uniforms, **per_row, backend="torch")
    guesses = torch.where(torch.rand(rows, device=on) < 0.8, ids, (ids + 1) % vocab).tolist()
    drafts = [guesses[start : end - 1] for start, end in itertools.pairwise(starts)]
    bounds = torch.tensor(starts, device=on)
    return Problem(
        lambda backend: rlkernels.verify_drafts(logits, drafts, bounds, uniforms, **options, backend=backend),
        nbytes=logits.nbytes,
        dtype=dtype,
        inputs={"logits": logits, "drafts": drafts, "starts": bounds, "settings": settings},
    )


SMALL = [
    Case("token_logprobs", "13 x 2053, backward", partial(logprobs, 13, 2053, BF16, True)),
    Case("token_logprobs", "5 x 1023, float32, backward", partial(logprobs, 5, 1023, F32, True)),
    Case("token_logprobs", "1 x 1 float32", partial(logprobs, 1, 1, F32, True)),
    Case("linear_token_logprobs", "37 x 64 x 2053", partial(linear_logprobs, 37, 2053, 64, BF16)),
    Case("linear_token_logprobs", "37 x 64 x 1023, float32", partial(linear_logprobs, 37, 1023, 64, F32)),
    Case("sample_tokens", "17 x 2053, top-p 0.9, top-k 20", partial(sample, 17, 2053, BF16, [(0.7, 0.9, 20)])),
    Case("sample_tokens", "17 x 2053, mixed settings", partial(sample, 17, 2053, BF16, MIXED)),
    Case("sample_tokens", "9 x 1023 float32, mixed settings", partial(sample, 9, 1023, F32, MIXED)),
    Case("verify_drafts", "lengths 0 1 7 3, 2053", partial(verify, [0, 1, 7, 3], 2053, BF16, MIXED)),
]


def timed(work: Workload) -> Iterator[Case]:
    """Yield cases: scoring of completions, both ways, and sampling of a token for every sequence."""
    dtype = work.torch_dtype
    vocab = work.vocab
    settings = [(work.temperature, work.top_p, work.top_k)]
    yield Case("token_logprobs", f"{LOGIT_ROWS} x {vocab}, forward and backward",
               partial(logprobs, LOGIT_ROWS, vocab, dtype, True), timed=True)  # fmt: skip
    yield Case("linear_token_logprobs", f"{LOGIT_ROWS} x {work.hidden} x {vocab}, forward and backward",
               partial(linear_logprobs, LOGIT_ROWS, vocab, work.hidden, dtype), timed=True)  # fmt: skip
    yield Case("sample_tokens", f"{work.sequences} x {vocab}",
               partial(sample, work.sequences, vocab, dtype, settings), timed=True)  # fmt: skip
    drafts = max(1, work.sequences // 8)
    yield Case("verify_drafts", f"{drafts} drafts of 7, {vocab}",
               partial(verify, [7] * drafts, vocab, dtype, settings), timed=True)  # fmt: skip
