"""Token log-probabilities: time and peak memory, forward and with the gradient, against plain torch and Liger."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import rlkernels
from bench import Case, copy_bandwidth, read_bandwidth
from rlkernels.logprobs import reference


def plain_torch(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])[:, 0]


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")


def with_gradient(function: Callable, logits: torch.Tensor, ids: torch.Tensor) -> Callable:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.detach().requires_grad_()
        out = function(leaf, ids)
        total = sum(part.sum() for part in out) if isinstance(out, tuple) else out.sum()
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    return run


def cases(quick: bool) -> Iterator[Case]:
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
            for what, functions, wanted in (
                ("forward + backward", {**forward, "cross_entropy": cross_entropy}, "log_softmax + gather"),
                ("with entropy, forward + backward", entropy, "torch reference"),
            ):
                nbytes = 3 * logits.nbytes  # read, read again, write the gradient
                yield Case(
                    op="token_logprobs",
                    shape=f"[{rows}, {vocab}] {what}",
                    dtype=name,
                    providers={n: with_gradient(f, logits, ids) for n, f in functions.items()},
                    reference=wanted,
                    limit=("copy bandwidth", nbytes / copy_bandwidth(nbytes)),
                    work=("tokens", rows),
                )
