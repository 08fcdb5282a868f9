"""token_logprobs as Triton kernels: one program per row, one read forward, one read and one write backward.

linear_token_logprobs launches them on a block of the vocabulary after the other: what the forward kernel knows of a row
goes from block to block in a state, and the gradient of the logits replaces them.
"""

import torch
import triton
import triton.language as tl

from rlkernels._fakes import FAKES
from rlkernels.backend import kernel_op, next_power_of_2, triton_interpreted

MIN_EXPONENT = tl.constexpr(-200.0)  # exp of less counts as exp of this, which is 0; 0 times -inf would be NaN


@triton.jit(do_not_specialize=["start", "last"])
def _forward_kernel(
    logits, ids, logprobs, entropies, stats, vocab, row_stride, inverse, state, start, last, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Score a row of logits. With ``state``: add one block of the row, and write the results after the last block.

    state [N, 4]: largest logit, sum of exp(z), sum of exp(z) z, logit of the token (NaN before its block).
    """
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    # Per lane: largest logit so far, sum of exp(z) and of exp(z) z, with z = (x - largest) / T
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    exps = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    nan_seen = tl.zeros([BLOCK], tl.int32)
    logit_before = float("nan")  # the logit of the token, if it was in an earlier block
    if state is not None:
        state_row, lane = state + 4 * program, tl.arange(0, BLOCK) == 0
        top = tl.load(state_row, mask=start > 0, other=-float("inf"))
        largest = tl.zeros([BLOCK], tl.float32) + top
        nan_seen = (largest != largest).to(tl.int32)
        exps = tl.where(lane, tl.load(state_row + 1, mask=start > 0, other=0.0), 0.0)
        weighted = tl.where(lane, tl.load(state_row + 2, mask=start > 0, other=0.0), 0.0)
        logit_before = tl.load(state_row + 3, mask=start > 0, other=float("nan"))
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        nan_seen |= (x != x).to(tl.int32)
        new_largest = tl.where(x > largest, x, largest)
        shift = tl.where(largest == -float("inf"), 0.0, (new_largest - largest) * inverse)
        z = tl.where(x == -float("inf"), MIN_EXPONENT, (x - new_largest) * inverse)
        z = tl.where(z > MIN_EXPONENT, z, MIN_EXPONENT)
        scale, e = tl.exp(-shift), tl.exp(z)
        if ENTROPY:
            weighted = tl.where(scale > 0, scale * (weighted - shift * exps), 0.0) + e * z
        exps = exps * scale + e
        largest = new_largest
    top = tl.where(tl.max(nan_seen) == 0, tl.max(largest), float("nan"))
    shift = tl.where(largest == -float("inf"), -MIN_EXPONENT, (top - largest) * inverse)
    scale = tl.exp(-shift)
    total = tl.sum(exps * scale)
    total_weighted = 0.0
    if ENTROPY:
        total_weighted = tl.sum(tl.where(scale > 0, scale * (weighted - shift * exps), 0.0))
    index = tl.load(ids + program)
    if state is not None:
        index -= start
    inside = (index >= 0) & (index < vocab)
    chosen = tl.load(row + tl.where(inside, index, 0)).to(tl.float32)
    chosen = tl.where(inside, chosen, logit_before)
    if state is not None:
        tl.store(state_row, top)
        tl.store(state_row + 1, total)
        tl.store(state_row + 2, total_weighted)
        tl.store(state_row + 3, chosen)
        if last == 0:
            return
    valid = (top > -float("inf")) & (top < float("inf"))
    log_sum = tl.where(valid, tl.log(total), float("nan"))
    tl.store(stats + 2 * program, top)
    tl.store(stats + 2 * program + 1, log_sum)
    tl.store(logprobs + program, (chosen - top) * inverse - log_sum)
    if ENTROPY:
        tl.store(entropies + program, log_sum - total_weighted / total)


@triton.jit(do_not_specialize=["start"])
def _backward_kernel(
    logits, ids, stats, entropies, grad_logprobs, grad_entropies, grad, vocab, row_stride, inverse, start,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of part of a row of logits, or of a block of them from ``start`` on."""
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top, log_sum = tl.load(stats + 2 * program), tl.load(stats + 2 * program + 1)
    index, outer = tl.load(ids + program), tl.load(grad_logprobs + program)
    if start is not None:
        index -= start
    x = tl.load(row + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    log_p = (x - top) * inverse - log_sum
    factor = outer
    if ENTROPY:
        finite = tl.where(log_p > MIN_EXPONENT, log_p, MIN_EXPONENT)
        factor += tl.load(grad_entropies + program) * (finite + tl.load(entropies + program))
    g = (tl.where(at == index, outer, 0.0) - tl.exp(log_p) * factor) * inverse
    g = tl.where(log_sum == log_sum, g, float("nan"))
    tl.store(grad + program * vocab + at, g.to(grad.dtype.element_ty), mask=at < vocab)


def _block_size(columns: int) -> dict[str, int]:
    block = min(4096, next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": 8 if block >= 2048 else 4}


def score_block(
    logits: torch.Tensor, ids: torch.Tensor, start: int, last: bool, state: torch.Tensor, logprobs: torch.Tensor,
    entropies: torch.Tensor, stats: torch.Tensor, temperature: float,
) -> None:  # fmt: skip
    """Add the logits [N, C] of the tokens from ``start`` on to state [N, 4]; write the outputs after the last block."""
    rows, columns = logits.shape
    if rows:
        _forward_kernel[(rows,)](
            logits, ids, logprobs, entropies, stats, columns, columns, 1 / temperature, state, start, int(last),
            ENTROPY=entropies.numel() > 0, **_block_size(columns),
        )  # fmt: skip


def differentiate_block(
    logits: torch.Tensor, ids: torch.Tensor, start: int, stats: torch.Tensor, entropies: torch.Tensor,
    grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the logits [N, C] of the tokens from ``start`` on, in their place."""
    rows, columns = logits.shape
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    grad = torch.empty_like(logits, dtype=torch.float32) if triton_interpreted() else logits
    if rows:
        size = _block_size(columns)
        _backward_kernel[(rows, -(-columns // size["BLOCK"]))](
            logits, ids, stats, entropies, grad_logprobs, grad_entropies, grad, columns, columns, 1 / temperature,
            start, ENTROPY=entropies.numel() > 0, **size,
        )  # fmt: skip
    return logits.copy_(grad) if triton_interpreted() else grad


@kernel_op("rlkernels::token_logprobs_triton", FAKES["token_logprobs"])
def forward(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score logits [N, V], ids int64 [N]; return logprobs [N], entropies [N] or [0], stats [N, 2] for the gradient."""
    rows, vocab = logits.shape
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    entropies = logits.new_empty(rows if with_entropy else 0, dtype=torch.float32)
    stats = logits.new_empty(rows, 2, dtype=torch.float32)
    if rows:
        _forward_kernel[(rows,)](
            logits, ids, logprobs, entropies, stats, vocab, logits.stride(0), 1 / temperature, None, None, None,
            ENTROPY=with_entropy, **_block_size(vocab),
        )  # fmt: skip
    return logprobs, entropies, stats


@kernel_op("rlkernels::token_logprobs_triton_backward", FAKES["token_logprobs_backward"])
def backward(
    logits: torch.Tensor, ids: torch.Tensor, stats: torch.Tensor, entropies: torch.Tensor,
    grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient [N, V] in the dtype of the logits; entropies [0]: no gradient reaches them."""
    rows, vocab = logits.shape
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    dtype = torch.float32 if triton_interpreted() else logits.dtype
    grad = logits.new_empty(rows, vocab, dtype=dtype)
    if rows:
        size = _block_size(vocab)
        _backward_kernel[(rows, -(-vocab // size["BLOCK"]))](
            logits, ids, stats, entropies, grad_logprobs, grad_entropies, grad, vocab, logits.stride(0),
            1 / temperature, None, ENTROPY=entropies.numel() > 0, **size,
        )  # fmt: skip
    return grad.to(logits.dtype) if triton_interpreted() else grad
