"""What works on logits: log-probabilities, sampling, drafts; and the keyed numbers behind sampling."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from bench.gpu.cases import samplers
from bench.gpu.problem import GpuCase, Problem, Rival
from rlkernels.logprobs import reference

Device = torch.device


def _logits(rows: int, vocab: int, dtype: torch.dtype, on: Device) -> torch.Tensor:
    """Peaked rows as a language model gives them, with some tokens ruled out."""
    logits = torch.randn(rows, vocab, device=on) * 3
    logits[:, 0] += 20
    if vocab > 2:
        logits[::3, 1] = -torch.inf
    return logits.to(dtype)


def logprobs(rows: int, vocab: int, dtype: torch.dtype, backward: bool, on: Device) -> Problem:
    """Log-probability and entropy; with ``backward`` the gradient of the logits too."""
    logits = _logits(rows, vocab, dtype, on)
    ids = torch.randint(0, vocab, (rows,), device=on)
    ids[::3] = 0  # not the token that was ruled out
    grads = torch.randn(2, rows, device=on)

    def run(backend: str) -> list[torch.Tensor]:
        leaf = logits.detach().requires_grad_(backward)
        out = list(rlkernels.token_logprobs(leaf, ids, temperature=0.7, return_entropy=True, backend=backend))
        return out + list(torch.autograd.grad(out, [leaf], list(grads))) if backward else out

    def exact() -> list[torch.Tensor]:
        leaf = logits.double().requires_grad_(backward)
        out = list(reference.token_logprobs(leaf, ids, 0.7))
        return out + list(torch.autograd.grad(out, [leaf], list(grads.double()))) if backward else out

    def compiled() -> Callable[[], Any]:
        plain = torch.compile(reference.token_logprobs, dynamic=False)

        def call() -> list[torch.Tensor]:
            leaf = logits.detach().requires_grad_(backward)
            out = list(plain(leaf, ids, 0.7))
            return out + list(torch.autograd.grad(out, [leaf], list(grads))) if backward else out

        return call

    rivals = {"torch.compile": Rival(compiled)} if on.type == "cuda" else {}
    return Problem(run, exact, nbytes=logits.nbytes * (3 if backward else 1), dtype=dtype, rivals=rivals)


def linear_logprobs(rows: int, vocab: int, width: int, dtype: torch.dtype, on: Device) -> Problem:
    """The same from hidden states, with the gradients of states and weight."""
    hidden, weight = torch.randn(rows, width, device=on), torch.randn(vocab, width, device=on) * 3 / width**0.5
    inputs = hidden.to(dtype), weight.to(dtype)
    ids, grads = torch.randint(0, vocab, (rows,), device=on), torch.randn(2, rows, device=on)

    def run(backend: str) -> list[torch.Tensor]:
        h, w = (x.detach().requires_grad_() for x in inputs)
        out = list(rlkernels.linear_token_logprobs(h, w, ids, return_entropy=True, backend=backend))
        return out + list(torch.autograd.grad(out, [h, w], list(grads)))

    def exact() -> list[torch.Tensor]:
        h, w = (x.double().requires_grad_() for x in inputs)
        out = list(reference.linear_token_logprobs(h, w, ids))
        return out + list(torch.autograd.grad(out, [h, w], list(grads.double())))

    return Problem(run, exact, nbytes=sum(x.nbytes for x in inputs) * 2, dtype=dtype)


def cross_entropy(rows: int, vocab: int, width: int, dtype: torch.dtype, on: Device) -> Problem:
    """Minus the sum of all log-probabilities from hidden states, and its gradients: what others have kernels for."""
    hidden, weight = torch.randn(rows, width, device=on), torch.randn(vocab, width, device=on) * 3 / width**0.5
    inputs, ids = (hidden.to(dtype), weight.to(dtype)), torch.randint(0, vocab, (rows,), device=on)

    def with_gradients(loss: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = loss(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves)]

    def ours(backend: str, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -rlkernels.linear_token_logprobs(h, w, ids, backend=backend).sum()

    def exact() -> list[torch.Tensor]:
        loss = lambda h, w: -reference.linear_token_logprobs(h, w, ids)[0].sum()  # noqa: E731
        return with_gradients(loss, [x.double() for x in inputs])

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((h @ w.T).float(), ids, reduction="sum")

    def compiled() -> Callable[[], Any]:
        return partial(with_gradients, torch.compile(plain, dynamic=False), inputs)

    def liger() -> Callable[[], Any]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return partial(with_gradients, lambda h, w: loss(w, h, ids), inputs)

    return Problem(
        lambda backend: with_gradients(partial(ours, backend), inputs),
        exact,
        nbytes=sum(x.nbytes for x in inputs) * 2,
        flops=8 * rows * vocab * width,
        dtype=dtype,
        # the logits of others are rounded to 16 bits, and so are the gradients of logits
        floor=2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps,
        rivals={"torch.compile": Rival(compiled), "Liger": Rival(liger)} if on.type == "cuda" else {},
    )


def _settings(rows: int, on: Device) -> dict[str, Any]:
    """Greedy, plain, top-k, nucleus and both, in turn."""
    choices = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 1.0, 20), (1.0, 0.9, 0), (1.3, 0.8, 5)]
    temperature, top_p, top_k = zip(*itertools.islice(itertools.cycle(choices), rows))
    return {
        "temperature": torch.tensor(temperature, device=on),
        "top_p": torch.tensor(top_p, device=on),
        "top_k": torch.tensor(top_k, device=on),
    }


def sample(rows: int, vocab: int, dtype: torch.dtype, on: Device) -> Problem:
    logits, uniforms = _logits(rows, vocab, dtype, on), torch.rand(rows, device=on)
    settings = _settings(rows, on)
    return Problem(
        lambda backend: rlkernels.sample_tokens(logits, uniforms, **settings, backend=backend),
        nbytes=logits.nbytes,
        dtype=dtype,
    )


def sample_alike(rows: int, vocab: int, dtype: torch.dtype, temperature: float, top_p: float, top_k: int, on: Device
                 ) -> Problem:  # fmt: skip
    """All rows with the same settings, as in training; others draw other tokens, which must be possible ones."""
    logits, uniforms = torch.randn(rows, vocab, device=on).mul(3).to(dtype), torch.rand(rows, device=on)
    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return Problem(
        lambda backend: rlkernels.sample_tokens(logits, uniforms, **settings, backend=backend),
        nbytes=logits.nbytes,
        dtype=dtype,
        rivals=samplers.rivals(logits, **settings) if on.type == "cuda" else {},
    )


def verify(lengths: list[int], vocab: int, dtype: torch.dtype, on: Device) -> Problem:
    """Drafts of these lengths that are right about half of the time."""
    starts = [0, *itertools.accumulate(n + 1 for n in lengths)]
    rows = starts[-1]
    logits, uniforms = _logits(rows, vocab, dtype, on), torch.rand(rows, device=on)
    settings = _settings(len(lengths), on)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) + 1).to(on)
    per_row = {name: value[owner] for name, value in settings.items()}
    ids, _ = rlkernels.sample_tokens(logits, uniforms, **per_row, backend="torch")
    guess = torch.where(torch.rand(rows, device=on) < 0.8, ids, (ids + 1) % vocab).tolist()
    drafts = [guess[a : b - 1] for a, b in itertools.pairwise(starts)]
    bounds = torch.tensor(starts, device=on)
    return Problem(
        lambda backend: rlkernels.verify_drafts(logits, drafts, bounds, uniforms, **settings, backend=backend),
        nbytes=logits.nbytes,
        dtype=dtype,
    )


def uniform(n: int, on: Device) -> Problem:
    ids, positions = torch.randint(0, 2**40, (n,)).to(on), torch.arange(n, device=on)
    return Problem(
        lambda backend: rlkernels.keyed_uniform(-7, ids, positions, backend=backend), nbytes=20 * n, floor=0.0
    )


BF16, F32, QWEN = torch.bfloat16, torch.float32, 151_936

CASES = [
    GpuCase("token_logprobs", "13 x 2053, backward", partial(logprobs, 13, 2053, BF16, True)),
    GpuCase("token_logprobs", "5 x 1023, float32, backward", partial(logprobs, 5, 1023, F32, True)),
    GpuCase("token_logprobs", "1 x 1 float32", partial(logprobs, 1, 1, F32, True)),
    GpuCase("linear_token_logprobs", "37 x 64 x 2053", partial(linear_logprobs, 37, 2053, 64, BF16)),
    GpuCase("linear_token_logprobs", "37 x 64 x 1023, float32", partial(linear_logprobs, 37, 1023, 64, F32)),
    GpuCase("linear_token_logprobs", "cross entropy, 37 x 64 x 1023", partial(cross_entropy, 37, 1023, 64, BF16)),
    GpuCase("sample_tokens", "17 x 2053, top-p 0.9, top-k 20", partial(sample_alike, 17, 2053, BF16, 0.7, 0.9, 20)),
    GpuCase("sample_tokens", "17 x 2053", partial(sample, 17, 2053, BF16)),
    GpuCase("sample_tokens", "9 x 1023 float32", partial(sample, 9, 1023, F32)),
    GpuCase("verify_drafts", "lengths 0 1 7 3, 2053", partial(verify, [0, 1, 7, 3], 2053, BF16)),
    GpuCase("keyed_uniform", "2053", partial(uniform, 2053)),
    GpuCase("token_logprobs", "8192 x 151936, forward", partial(logprobs, 8192, QWEN, BF16, False), timed=True),
    GpuCase("token_logprobs", "4096 x 151936, both ways", partial(logprobs, 4096, QWEN, BF16, True), timed=True),
    GpuCase(
        "linear_token_logprobs", "4096 x 896 x 151936", partial(linear_logprobs, 4096, QWEN, 896, BF16), timed=True
    ),
    GpuCase("linear_token_logprobs", "cross entropy, 4096 x 896 x 151936",
            partial(cross_entropy, 4096, QWEN, 896, BF16), timed=True),
    GpuCase("sample_tokens", "256 x 151936, temperature 1", partial(sample_alike, 256, QWEN, BF16, 1.0, 1.0, 0), True),
    GpuCase("sample_tokens", "256 x 151936, top-p 0.95, top-k 50",
            partial(sample_alike, 256, QWEN, BF16, 1.0, 0.95, 50), timed=True),
    GpuCase("sample_tokens", "256 x 151936, five kinds of rows", partial(sample, 256, QWEN, BF16), timed=True),
    GpuCase("verify_drafts", "64 drafts of 7, 151936", partial(verify, [7] * 64, QWEN, BF16), timed=True),
    GpuCase("keyed_uniform", "2**24", partial(uniform, 2**24), timed=True),
]  # fmt: skip
