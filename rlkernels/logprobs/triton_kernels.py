"""token_logprobs as Triton kernels: one program per row, one read forward, one read and one write backward."""

import torch
import triton
import triton.language as tl

from rlkernels.backend import kernel_op, power_of_2, triton_interpreted


@triton.jit
def _forward_kernel(
    logits, ids, logprobs, entropies, stats, vocab, row_stride, inverse, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    # Per lane: largest logit so far, sum of exp(z) and of exp(z) z, with z = (x - largest) / T
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    exps = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    nan_seen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        nan_seen |= (x != x).to(tl.int32)
        new = tl.where(x > largest, x, largest)
        shift = tl.where(largest == -float("inf"), 0.0, (new - largest) * inverse)
        z = tl.where(x == -float("inf"), -200.0, (x - new) * inverse)
        z = tl.where(z > -200.0, z, -200.0)
        scale, e = tl.exp(-shift), tl.exp(z)
        if ENTROPY:
            weighted = tl.where(scale > 0, scale * (weighted - shift * exps), 0.0) + e * z
        exps = exps * scale + e
        largest = new
    top = tl.where(tl.max(nan_seen) == 0, tl.max(largest), float("nan"))
    shift = tl.where(largest == -float("inf"), 200.0, (top - largest) * inverse)
    scale = tl.exp(-shift)
    total = tl.sum(exps * scale)
    valid = (top > -float("inf")) & (top < float("inf"))
    log_sum = tl.where(valid, tl.log(total), float("nan"))
    tl.store(stats + 2 * program, top)
    tl.store(stats + 2 * program + 1, log_sum)
    index = tl.load(ids + program)
    inside = (index >= 0) & (index < vocab)
    chosen = tl.load(row + tl.where(inside, index, 0)).to(tl.float32)
    logprob = (chosen - top) * inverse - log_sum
    tl.store(logprobs + program, tl.where(inside, logprob, float("nan")))
    if ENTROPY:
        moved = tl.sum(tl.where(scale > 0, scale * (weighted - shift * exps), 0.0))
        tl.store(entropies + program, log_sum - moved / total)


@triton.jit
def _backward_kernel(
    logits, ids, stats, entropies, grad_logprobs, grad_entropies, grad, vocab, row_stride, inverse,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top, log_sum = tl.load(stats + 2 * program), tl.load(stats + 2 * program + 1)
    index, outer = tl.load(ids + program), tl.load(grad_logprobs + program)
    x = tl.load(row + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    log_p = (x - top) * inverse - log_sum
    factor = outer
    if ENTROPY:
        finite = tl.where(log_p > -200.0, log_p, -200.0)
        factor += tl.load(grad_entropies + program) * (finite + tl.load(entropies + program))
    g = (tl.where(at == index, outer, 0.0) - tl.exp(log_p) * factor) * inverse
    g = tl.where(log_sum == log_sum, g, float("nan"))
    tl.store(grad + program * vocab + at, g.to(grad.dtype.element_ty), mask=at < vocab)


@kernel_op("rlkernels::token_logprobs_triton")
def forward(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score logits [N, V], ids int64 [N] -> logprobs [N], entropies [N] or [0], stats [N, 2] for the gradient."""
    rows, vocab = logits.shape
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    entropies = logits.new_empty(rows if with_entropy else 0, dtype=torch.float32)
    stats = logits.new_empty((rows, 2), dtype=torch.float32)
    if rows:
        block = min(4096, power_of_2(vocab))
        _forward_kernel[(rows,)](
            logits, ids, logprobs, entropies, stats, vocab, logits.stride(0), 1 / temperature,
            ENTROPY=with_entropy, BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return logprobs, entropies, stats


@forward.register_fake
def _(logits, ids, temperature, with_entropy):
    shape = [logits.shape[0]]
    options = {"dtype": torch.float32, "device": logits.device}
    entropies = torch.empty(shape if with_entropy else [0], **options)
    return torch.empty(shape, **options), entropies, torch.empty([*shape, 2], **options)


@kernel_op("rlkernels::token_logprobs_triton_backward")
def backward(
    logits: torch.Tensor, ids: torch.Tensor, stats: torch.Tensor, entropies: torch.Tensor,
    grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient [N, V] in the dtype of the logits; entropies [0]: no gradient reaches them."""
    rows, vocab = logits.shape
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    dtype = torch.float32 if triton_interpreted() else logits.dtype
    grad = logits.new_empty((rows, vocab), dtype=dtype)
    if rows:
        block = min(4096, power_of_2(vocab))
        _backward_kernel[(rows, -(-vocab // block))](
            logits, ids, stats, entropies, grad_logprobs, grad_entropies, grad, vocab, logits.stride(0),
            1 / temperature, ENTROPY=entropies.numel() > 0, BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return grad.to(logits.dtype) if triton_interpreted() else grad


@backward.register_fake
def _(logits, ids, stats, entropies, grad_logprobs, grad_entropies, temperature):
    return torch.empty_like(logits)
