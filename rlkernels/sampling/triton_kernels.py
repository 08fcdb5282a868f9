"""sample_tokens as a Triton kernel: the integer weights of ``reference.token_weights``, so the very same tokens."""

import torch
import triton
import triton.language as tl

from rlkernels._fakes import FAKES
from rlkernels.backend import kernel_op, next_power_of_2
from rlkernels.sampling import reference

LOG2_E = tl.constexpr(reference.LOG2_E)
ROUND = tl.constexpr(reference.ROUND)
WEIGHT_BITS = tl.constexpr(reference.WEIGHT_BITS)
C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in reference.EXP2_COEFFICIENTS)
UNIT = tl.constexpr(2.0**-reference.WEIGHT_BITS)
RUNS = tl.constexpr(128)  # of 8,192 tokens each, so of 2**20
GROUP = tl.constexpr(4)  # tokens that are listed together
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _weights(x, largest, inverse):
    """Return floor(exp((x - largest) * inverse) * 2**42) as int64, step for step the reference, without FMA."""
    y = tl.maximum((x - largest) * inverse * LOG2_E, -100.0)
    rounded = y + ROUND
    f = y - (rounded - ROUND)
    p = C6 * f + C5
    p = p * f + C4
    p = p * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + 1.0
    # the last bits of `rounded` are the integer n: adding it to the exponent multiplies by 2**n, exactly
    exponent = (rounded.to(tl.int32, bitcast=True) << 23) + (WEIGHT_BITS << 23)
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _key(logit):
    """Return an integer that orders like the float32 ``logit``; -0 equals 0."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits).to(tl.int64)


@triton.jit
def _logit(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, -2147483648 - bits, bits).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_share(fraction, total):
    units = (fraction.to(tl.float64) * 16777216.0).to(tl.int64)
    return units * (total >> 24) + ((units * (total & 0xFFFFFF)) >> 24)


@triton.jit
def _load(row, groups, start, size, BLOCK: tl.constexpr):
    """Return ids and logits of a block of the row, or of all the tokens in the ``groups`` listed."""
    ids = start + tl.arange(0, BLOCK)
    if groups is not None:
        listed = tl.load(groups + tl.arange(0, BLOCK // GROUP))
        ids = tl.reshape(listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [BLOCK])
    return ids, tl.load(row + ids, mask=ids < size, other=-float("inf")).to(tl.float32)


@triton.jit
def _measure(row, size, low, largest, inverse, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weight, or number, of the tokens that reach ``low`` in each run of two blocks: int64 [RUNS]."""
    runs, amounts = tl.arange(0, RUNS), tl.zeros([RUNS], tl.int64)
    for start in range(0, size, 2 * BLOCK):
        _, x = _load(row, None, start, size, 2 * BLOCK)
        if WEIGH:
            if low is not None:
                x = tl.where(x >= low, x, -float("inf"))
            amount = tl.sum(_weights(x, largest, inverse))
        else:
            amount = tl.sum((x >= low).to(tl.int32))
        amounts += tl.where(runs == start // (2 * BLOCK), amount, 0)
    return amounts


@triton.jit
def _search(low, largest, needed, x, amounts, row, size, inverse, SHIFT: tl.constexpr, WEIGH: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Find the largest logit from ``low`` on that tokens of the number or weight ``needed`` reach, by bisection.

    Args:
        low: a logit that they reach.
        x, amounts: the tokens to look at, and what each adds. None: the whole row.
        SHIFT: last bits of the logit that are not looked at.

    Returns:
        the logit, and the number or weight of the tokens above it.
    """
    low = _key(low) >> SHIFT
    high = (_key(largest) >> SHIFT) + 1
    above = tl.zeros([], tl.int64)
    while low + 1 < high:
        middle = (low + high) >> 1
        logit = _logit(middle << SHIFT)
        if x is not None:
            reached = tl.sum(tl.where(x >= logit, amounts, 0)).to(tl.int64)
        else:
            reached = tl.sum(_measure(row, size, logit, largest, inverse, WEIGH, BLOCK))
        enough = reached >= needed
        low, high, above = (
            tl.where(enough, middle, low), tl.where(enough, high, middle), tl.where(enough, above, reached)
        )  # fmt: skip
    return _logit(low << SHIFT), above


@triton.jit
def _lower_bound(lanes, largest, inverse, vocab, total, top_k, top_p):
    """Return a logit from which on there are enough tokens for top-k or, without it, top-p.

    The largest of each lane are enough already, if they can be; so unless the row is flat the tokens are few.
    """
    if top_k > 0:
        low = tl.where(top_k <= lanes.shape[0], tl.min(lanes), -float("inf"))
        low = tl.where(top_k == 1, largest, low)
        low, _ = _search(low, largest, top_k, lanes, 1, None, 0, inverse, 16, False, 0)
    else:
        needed = tl.maximum(_scaled_share(top_p, total), 1)
        # All the tokens of at most this weight together are not needed
        slack = tl.maximum((total - needed) // vocab, 1).to(tl.float32)
        low = largest + tl.div_rn(tl.log(slack * UNIT) - 0.01, inverse)
        weights = _weights(lanes, largest, inverse)
        low, _ = _search(low, largest, needed, lanes, weights, None, 0, inverse, 16, True, 0)
    return low


@triton.jit
def _list_groups(row, groups, size, low, BLOCK: tl.constexpr):
    """List the groups of tokens one of which reaches ``low`` in order; return whether a block holds them all."""
    tl.store(groups + tl.arange(0, BLOCK // GROUP), tl.full([BLOCK // GROUP], NOWHERE // GROUP, tl.int32))
    tl.debug_barrier()
    count, start = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while (start < size) & (count <= BLOCK // GROUP):
        _, x = _load(row, None, start, size, 2 * BLOCK)
        hit = (tl.max(tl.reshape(x, [2 * BLOCK // GROUP, GROUP]), 1) >= low).to(tl.int32)
        hits = tl.sum(hit)
        if hits > 0:
            place = count + tl.cumsum(hit) - 1
            group = start // GROUP + tl.arange(0, 2 * BLOCK // GROUP)
            tl.store(groups + place, group, mask=(hit > 0) & (place < BLOCK // GROUP))
        count += hits
        start += 2 * BLOCK
    tl.debug_barrier()
    return count <= BLOCK // GROUP


@triton.jit
def _filter(row, groups, size, low, total, largest, inverse, top_k, top_p, BLOCK: tl.constexpr):
    """Cut off by top-k, then top-p, among the tokens from ``low`` on, all of which are in ``groups`` if there are any.

    Returns:
        the smallest logit that is kept, how many of its equals are, and the weight of all that is kept.
    """
    SHIFT: tl.constexpr = 32 - row.dtype.element_ty.primitive_bitwidth  # bits that 16-bit logits do not have
    x, weights, ones = None, None, None
    if groups is not None:
        _, x = _load(row, groups, 0, size, BLOCK)
        weights, ones = _weights(x, largest, inverse), 1
    ties = tl.zeros([], tl.int64)
    if top_k > 0:
        low, count = _search(low, largest, top_k, x, ones, row, size, inverse, SHIFT, False, BLOCK)
        ties = top_k - count
        if groups is not None:
            total = tl.sum(tl.where(x > low, weights, 0))
        else:
            total = tl.sum(_measure(row, size, _logit(_key(low) + 1), largest, inverse, True, BLOCK))
        total += _weights(low, largest, inverse) * ties
    if top_p < 1:
        needed = tl.maximum(_scaled_share(top_p, total), 1)
        low, above = _search(low, largest, needed, x, weights, row, size, inverse, SHIFT, True, BLOCK)
        weight = _weights(low, largest, inverse)  # of each tie
        ties = (needed - above + weight - 1) // tl.maximum(weight, 1)
        total = above + weight * ties
    return low, ties, total


@triton.jit
def _find(row, groups, start, size, cut, ties, weight_before, uniform, total, largest, inverse, BLOCK: tl.constexpr):
    """Return the id drawn of those above ``cut`` and its first ``ties``; left of ``start`` weighs ``weight_before``."""
    target, token = _scaled_share(uniform, total), tl.full([], NOWHERE, tl.int32)
    while (token == NOWHERE) & (start < size):
        ids, x = _load(row, groups, start, size, BLOCK)
        equal = (x == cut).to(tl.int32)
        is_allowed = (x > cut) | ((equal > 0) & (tl.cumsum(equal) <= ties))
        sums = weight_before + tl.cumsum(_weights(tl.where(is_allowed, x, -float("inf")), largest, inverse))
        weight_before = tl.max(sums)
        token = tl.min(tl.where(sums > target, ids, NOWHERE))
        ties -= tl.sum(equal)
        start += BLOCK
    return token


@triton.jit
def _sample_kernel(
    logits, uniforms, temperatures, top_ps, top_ks, groups, out_ids, out_logprobs, vocab, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * row_stride
    lanes = tl.full([BLOCK], -float("inf"), tl.float32)  # the largest of the ids that leave the same remainder
    for start in range(0, vocab, 2 * BLOCK):
        _, x = _load(row, None, start, vocab, BLOCK)
        _, y = _load(row, None, start + BLOCK, vocab, BLOCK)
        lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
        lanes = tl.maximum(lanes, y, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(lanes)
    uniform, temperature = tl.load(uniforms + program), tl.load(temperatures + program)
    invalid = (tl.max((lanes != lanes).to(tl.int32)) > 0) | (tl.abs(largest) == float("inf"))
    invalid = invalid | (uniform < 0) | (uniform >= 1) | (uniform != uniform)
    size, uniform = tl.where(invalid, 0, vocab), tl.where(invalid, 0.0, uniform)
    greedy = temperature == 0
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))
    inverse = tl.where(inverse < 3.4028234663852886e38, inverse, 3.4028234663852886e38)

    # The tokens kept: those above `cut`, and the first `ties` of those that equal it. Greedy is a top-k of 1
    top_k, top_p = greedy.to(tl.int64), 1.0
    if groups is not None:
        top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)
        top_k = tl.where(greedy, 1, tl.where((top_k > 0) & (top_k < vocab), top_k, 0))
    cut, ties = tl.where(greedy, largest, -float("inf")), top_k
    total = tl.full([], 1, tl.int64) << WEIGHT_BITS
    start, weight_before, token = tl.zeros([], tl.int32), tl.zeros([], tl.int64), tl.full([], NOWHERE, tl.int32)
    if top_k == 0:
        amounts = _measure(row, size, None, largest, inverse, True, BLOCK)
        total = tl.sum(amounts)
        if top_p == 1:  # go on where the token is
            sums = tl.cumsum(amounts)
            is_before = sums <= _scaled_share(uniform, total)
            start, weight_before = tl.sum(is_before.to(tl.int32)) * (2 * BLOCK), tl.max(tl.where(is_before, sums, 0))
    if groups is not None:
        groups += program.to(tl.int64) * (BLOCK // GROUP)
        if (top_k > 0) | (top_p < 1):
            low = _lower_bound(lanes, largest, inverse, vocab, total, top_k, top_p)
            if _list_groups(row, groups, size, low, BLOCK):
                cut, ties, total = _filter(row, groups, size, low, total, largest, inverse, top_k, top_p, BLOCK)
                token = _find(
                    row, groups, start, size, cut, ties, weight_before, uniform, total, largest, inverse, BLOCK
                )
            else:
                cut, ties, total = _filter(row, None, size, low, total, largest, inverse, top_k, top_p, BLOCK)
    if token == NOWHERE:
        token = _find(row, None, start, size, cut, ties, weight_before, uniform, total, largest, inverse, BLOCK)

    token = tl.minimum(token, vocab - 1)
    chosen = tl.load(row + token).to(tl.float32)
    z = ((chosen - largest) * inverse).to(tl.float64)
    logprob = (z - tl.log(total.to(tl.float64) * UNIT)).to(tl.float32)
    logprob = tl.where(greedy, 0.0, logprob)
    tl.store(out_ids + program, tl.where(invalid, -1, token).to(tl.int64))
    tl.store(out_logprobs + program, tl.where(invalid, float("nan"), logprob))


# an op, since torch.compile would take the kernel itself into its graph and there forget enable_fp_fusion
@kernel_op("rlkernels::sample_tokens_triton", FAKES["sample_tokens"])
def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor,
                  top_k: torch.Tensor, filtered: bool = True) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute ``reference.sample_tokens``; filtered: some row may have top_k or top_p on."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(4096, max(128, next_power_of_2(vocab)))
        groups = torch.empty(rows, block // GROUP.value, dtype=torch.int32, device=logits.device) if filtered else None
        _sample_kernel[(rows,)](
            logits, uniforms, temperature, top_p, top_k, groups, ids, logprobs, vocab, logits.stride(0),
            BLOCK=block, num_warps=8 if block >= 2048 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, logprobs
