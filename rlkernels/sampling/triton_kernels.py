"""sample_tokens as a Triton kernel: the integer weights of ``reference.token_weights``, so the very same tokens."""

import torch
import triton
import triton.language as tl

from rlkernels.backend import on_its_device
from rlkernels.sampling import reference

LOG2_E = tl.constexpr(reference.LOG2_E)
ROUND = tl.constexpr(reference.ROUND)
WEIGHT_BITS = tl.constexpr(reference.WEIGHT_BITS)
C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in reference.EXP2_COEFFICIENTS)


@triton.jit
def _weights(x, largest, inverse):
    """Return floor(exp((x - largest) * inverse) * 2**42) as int64, step for step the reference, without FMA."""
    y = (x - largest) * inverse * LOG2_E
    y = tl.where(y > -100.0, y, -100.0)
    n = (y + ROUND) - ROUND
    f = y - n
    p = C6 * f + C5
    p = p * f + C4
    p = p * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + 1.0
    power = ((n.to(tl.int32) + (WEIGHT_BITS + 127)) << 23).to(tl.float32, bitcast=True)
    return (p * power).to(tl.int64)


@triton.jit
def _keys(x):
    """Return int64 in [0, 2**32) that orders like the float32 x; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _scaled_share(fraction, total):
    units = (fraction.to(tl.float64) * 16777216.0).to(tl.int64)
    return units * (total >> 24) + ((units * (total & 0xFFFFFF)) >> 24)


@triton.jit
def _measure(row, vocab, largest, inverse, low, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weight, or number, of the tokens whose key is at least ``low``."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        amount = tl.full([BLOCK], 1, tl.int64)
        if WEIGH:
            amount = _weights(x, largest, inverse)
        total += tl.where((_keys(x) >= low) & (ids < vocab), amount, 0)
    return tl.sum(total)


@triton.jit
def _sample_kernel(
    logits, uniforms, temperatures, top_ps, top_ks, out_ids, out_logprobs, vocab, row_stride,
    FILTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * row_stride
    size = tl.full([], 0, tl.int64) + vocab  # a vocabulary of 1 is a constant, which has no .to
    uniform, temperature = tl.load(uniforms + program), tl.load(temperatures + program)
    top_p, top_k = tl.load(top_ps + program), tl.load(top_ks + program)

    largest_seen = tl.full([BLOCK], -float("inf"), tl.float32)
    nan_seen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        nan_seen |= (x != x).to(tl.int32)
        largest_seen = tl.where(x > largest_seen, x, largest_seen)
    largest = tl.max(largest_seen)
    invalid = (tl.max(nan_seen) > 0) | (largest == float("inf")) | (largest == -float("inf"))
    invalid = invalid | (uniform < 0) | (uniform >= 1) | (uniform != uniform)
    greedy = temperature == 0
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))
    inverse = tl.where(inverse < 3.4028234663852886e38, inverse, 3.4028234663852886e38)

    # The tokens kept: those with a key above `cut`, and the first `ties` of those whose key is `cut`
    cut = tl.full([], -1, tl.int64)
    ties = size
    total = _measure(row, vocab, largest, inverse, cut, True, BLOCK)
    if FILTER:
        if (top_k > 0) & (top_k < vocab):
            cut = tl.zeros([], tl.int64)
            for i in range(32):  # the largest key that top_k tokens reach, bit by bit
                bit = tl.full([], 1, tl.int64) << (31 - i)
                reached = _measure(row, vocab, largest, inverse, cut + bit, False, BLOCK)
                cut = tl.where(reached >= top_k, cut + bit, cut)
            ties = top_k - _measure(row, vocab, largest, inverse, cut + 1, False, BLOCK)
            above = _measure(row, vocab, largest, inverse, cut + 1, True, BLOCK)
            equal = _measure(row, vocab, largest, inverse, cut, True, BLOCK) - above
            count = _measure(row, vocab, largest, inverse, cut, False, BLOCK) + ties - top_k
            total = above + equal // count * ties  # ties weigh the same
        if top_p < 1:
            needed = _scaled_share(top_p, total)
            needed = tl.where(needed > 1, needed, 1)
            lowest, low = cut, tl.zeros([], tl.int64)
            for i in range(32):  # the largest key whose tokens weigh enough
                bit = tl.full([], 1, tl.int64) << (31 - i)
                held = _measure(row, vocab, largest, inverse, low + bit, True, BLOCK)
                held = tl.where(low + bit <= lowest, total, held)
                low = tl.where(held >= needed, low + bit, low)
            above = _measure(row, vocab, largest, inverse, low + 1, True, BLOCK)
            equal = _measure(row, vocab, largest, inverse, low, True, BLOCK) - above
            count = _measure(row, vocab, largest, inverse, low, False, BLOCK)
            count -= _measure(row, vocab, largest, inverse, low + 1, False, BLOCK)
            weight = equal // count
            ties = (needed - above + weight - 1) // tl.where(weight > 0, weight, 1)
            cut = low
            total = above + weight * ties

    target = _scaled_share(tl.where(invalid, 0.0, uniform), total)
    found = size
    before = tl.zeros([], tl.int64)  # weight of what was kept in the blocks before
    tied = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        keys = _keys(x)
        equals = ((keys == cut) & (ids < vocab)).to(tl.int64)
        rank = tied + tl.cumsum(equals, 0)
        kept = ((keys > cut) | ((equals > 0) & (rank <= ties))) & (ids < vocab)
        weights = tl.where(kept, _weights(x, largest, inverse), 0)
        cumulative = before + tl.cumsum(weights, 0)
        hit = tl.where(greedy, x == largest, cumulative > target) & (ids < vocab)
        found = tl.minimum(found, tl.min(tl.where(hit, ids.to(tl.int64), size)))
        before += tl.sum(weights)
        tied += tl.sum(equals)

    chosen = tl.load(row + tl.minimum(found, vocab - 1)).to(tl.float32)
    z = ((chosen - largest) * inverse).to(tl.float64)
    logprob = (z - tl.log(total.to(tl.float64) * 2.273736754432321e-13)).to(tl.float32)  # 2**-42
    logprob = tl.where(greedy, 0.0, logprob)
    tl.store(out_ids + program, tl.where(invalid, -1, found))
    tl.store(out_logprobs + program, tl.where(invalid, float("nan"), logprob))


# an op, since torch.compile would take the kernel itself into its graph and there forget enable_fp_fusion
@torch.library.custom_op("rlkernels::sample_tokens_triton", mutates_args=())
@on_its_device
def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor,
                  top_k: torch.Tensor, *, filtered: bool = True) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute ``reference.sample_tokens``; filtered: some row may have top_k or top_p on."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(4096, triton.next_power_of_2(vocab))
        _sample_kernel[(rows,)](
            logits, uniforms, temperature, top_p, top_k, ids, logprobs, vocab, logits.stride(0),
            FILTER=filtered, BLOCK=block, num_warps=8 if block >= 2048 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, logprobs


@sample_tokens.register_fake
def _(logits, uniforms, *_, **__):
    return torch.empty_like(uniforms, dtype=torch.int64), torch.empty_like(uniforms)
