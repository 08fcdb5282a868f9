"""Token log-probabilities: time and peak memory, from logits and from hidden states, against those of others."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from bench import Case, Missing, copy_bandwidth, matmul_rate, optional, read_bandwidth
from bench._gradients import run_both_ways
from rlkernels.logprobs import reference


def plain_torch(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])[:, 0]


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")


def both_ways(function: Callable, ids: torch.Tensor, *tensors: torch.Tensor) -> Callable:
    return partial(run_both_ways, lambda *leaves: function(*leaves, ids), *tensors)


def from_logits(quick: bool) -> Iterator[Case]:
    for rows, vocab in ((64, 5000),) if quick else ((4096, 300), (256, 151_936)):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
            ids = torch.randint(vocab, (rows,), generator=generator)
            forward: dict[str, Callable] = {"rlkernels": rlkernels.token_logprobs, "log_softmax + gather": plain_torch}
            entropy: dict[str, Callable] = {
                "rlkernels": lambda x, i: rlkernels.token_logprobs(x, i, return_entropy=True),
                "torch reference": reference.token_logprobs,
            }
            name = str(dtype).removeprefix("torch.")
            yield Case(
                op="token_logprobs",
                shape=f"[{rows}, {vocab}] forward",
                dtype=name,
                providers={n: partial(f, logits, ids) for n, f in forward.items()},
                reference="log_softmax + gather",
                limit=("read bandwidth", logits.nbytes / read_bandwidth(logits.nbytes)),
                work=("tokens", rows),
            )
            for label, functions, reference_name in (
                ("forward + backward", {**forward, "cross_entropy": cross_entropy}, "log_softmax + gather"),
                ("with entropy, forward + backward", entropy, "torch reference"),
            ):
                nbytes = 3 * logits.nbytes  # read, read again, write the gradient
                yield Case(
                    op="token_logprobs",
                    shape=f"[{rows}, {vocab}] {label}",
                    dtype=name,
                    providers={n: both_ways(f, ids, logits) for n, f in functions.items()},
                    reference=reference_name,
                    limit=("copy bandwidth", nbytes / copy_bandwidth(nbytes)),
                    work=("tokens", rows),
                )


def through_logits(function: Callable) -> Callable:
    """Compute log-probabilities from hidden states through a full table of logits."""
    return lambda hidden, weight, ids: function(hidden @ weight.T, ids)


def by_torch(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)


def score_by_trl(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, bias: torch.Tensor | None = None,
                 temperature: float = 1.0, return_entropy: bool = False) -> Any:  # fmt: skip
    """Stand in for ``linear_token_logprobs``: the function behind the head of TRL's trainers."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as WIDTH

    returned = ("entropy",) if return_entropy else ()
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, bias, ids, temperature, WIDTH, None, 1.0, returned
    )
    return (logprobs, entropy) if return_entropy else logprobs


def by_liger(module: Any) -> Callable:
    apply = module._ChunkedSelectiveLogProbFunction.apply
    return lambda hidden, weight, ids: apply(hidden, weight, ids, None, 1.0, module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE)


# peers that compute them block by block: module, package, function that makes the provider
PEERS: dict[str, tuple[str, str, Callable]] = {
    "TRL": ("trl.kernels.chunked_logprob", "trl", lambda module: score_by_trl),
    "Liger": ("liger_kernel.chunked_loss.fused_linear_ppo", "liger-kernel", by_liger),
}


def from_hidden_states(quick: bool) -> Iterator[Case]:
    for rows, vocab, width in (
        ((64, 5000, 32),) if quick else ((2048, 32_768, 512), (8192, 32_768, 512), (2048, 151_936, 896))
    ):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            hidden, weight = (torch.randn(n, width, generator=generator) for n in (rows, vocab))
            inputs = torch.randint(vocab, (rows,)), hidden.to(dtype), (weight * 3 / width**0.5).to(dtype)
            functions: dict[str, Any] = {
                "rlkernels": rlkernels.linear_token_logprobs,
                "logits + rlkernels": through_logits(rlkernels.token_logprobs),
                "logits + log_softmax": through_logits(plain_torch),
                "torch linear_cross_entropy": by_torch,
            }
            functions |= {name: optional(module, make, package) for name, (module, package, make) in PEERS.items()}
            work = 8 * rows * vocab * width  # logits, logits again, two products with their gradient
            yield Case(
                op="linear_token_logprobs",
                shape=f"[{rows}, {width}] x {vocab} forward + backward",
                dtype=str(dtype).removeprefix("torch."),
                providers={n: f if isinstance(f, Missing) else both_ways(f, *inputs) for n, f in functions.items()},
                reference="logits + log_softmax",
                limit=("matrix products", work / matmul_rate(dtype)),
                work=("tokens", rows),
            )


def cases(quick: bool) -> Iterator[Case]:
    yield from from_logits(quick)
    yield from from_hidden_states(quick)
