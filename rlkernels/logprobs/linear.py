"""Log-probabilities straight from hidden states: the logits of all tokens never exist at one time.

The forward pass computes a block at a time: the logits of some vocabulary entries for all tokens. It stores only the
block's log-sum-exp, its entropy and the logits of the chosen tokens. The backward pass computes each block again,
replaces it by the gradient of the logits and multiplies it. So the gradient of the weight, the largest result, is
written once, block by block, without an accumulator. The gradient of the hidden states is a sum over the blocks. In
bfloat16 each term would be rounded, so a CPU computes it from whole rows of a few tokens, in another pass; a GPU adds
products that are not rounded.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch

from rlkernels import _check, _contexts, _gradients
from rlkernels import backend as _backend
from rlkernels.logprobs import reference
from rlkernels.logprobs._autograd import choose, given_gradients

ROWS_PER_PASS = 8192  # tokens that the forward pass scores at a time; the backward pass takes all at a time
CPU_BLOCK_LOGITS = 1 << 22  # logits in a block on a CPU, if the vocabulary is large enough: 16 MiB in float32
MAX_GPU_BLOCK_LOGITS = 1 << 26  # most logits in a block on a GPU, whose matrix products need more at a time
GPU_MEMORY_DIVISOR = 256  # a block in float32 is at most 1 / 256 of a GPU's memory
MIN_BLOCK_COLUMNS = 256  # fewest vocabulary entries in a block; matrix products of narrower ones are slow
MIN_GRADIENT_ROWS = 64  # fewest tokens with whole rows of logits, for the gradient of hidden states in 16 bits


def _check_types(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None = None,
                 **_: object) -> None:  # fmt: skip
    _check.tensor("hidden", hidden, floating=True)
    if hidden.ndim == 0:
        raise ValueError(f"hidden must have shape [..., H], got {list(hidden.shape)}")
    like: dict[str, Any] = {"dtype": hidden.dtype, "device": hidden.device}
    _check.tensor("weight", weight, ndim=2, **like)
    if bias is not None:
        _check.tensor("bias", bias, ndim=1, **like)
    _check.tensor("ids", ids, dtype=torch.int64, device=hidden.device)


@overload
def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    chunk: int | None = None,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: Literal[True],
    chunk: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@_contexts.public_op("linear_token_logprobs", _check_types)
def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk: int | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`token_logprobs` of the logits ``hidden @ weight.T + bias``, never stored as a whole.

    Both results are differentiable with respect to ``hidden``, ``weight`` and ``bias``. After CCE (arXiv 2411.09009)
    and Liger-Kernel (arXiv 2410.10989), with a matrix product of torch for each block of the vocabulary.

    Args:
        hidden: floating point [..., H], last hidden states.
        weight: [V, H] of the dtype of ``hidden``: the output projection.
        ids: int64 [...], in [0, V).
        bias: [V] of the dtype of ``hidden``; -inf rules a token out.
        temperature: > 0. Below 1.2e-38 plain torch computes in float64, whatever the backend.
        return_entropy: also return the entropy in nats.
        chunk: vocabulary entries whose logits exist at one time. None: at least 256, and so many that a block has
            about four million logits on a CPU, 67 million on a GPU of 64 GiB or more, fewer on a smaller GPU.
        backend: What scores a block of logits; torch multiplies the matrices in any case.

    Returns:
        logprobs [...] (and entropy [...]), float32; float64 for float64 inputs.

    Raises:
        ValueError: a shape that does not fit, a temperature or chunk that is not positive, an id outside the
            vocabulary (on a GPU nothing is raised for it and its log-probability is NaN), float64 with a backend of
            our kernels.
        TypeError: a wrong dtype.
    """
    vocab, width = weight.shape
    if width != hidden.shape[-1]:
        _check.shape("weight", weight, (None, hidden.shape[-1]))
    if vocab == 0:
        raise ValueError(f"weight must have shape [V, H] with V >= 1, got {list(weight.shape)}")
    if bias is not None:
        _check.shape("bias", bias, (vocab,))
    _check.shape("ids", ids, hidden.shape[:-1])
    _check.positive("temperature", temperature)
    if chunk is not None:
        chunk = _check.integer("chunk", chunk, 1)
    chosen = choose("linear_token_logprobs", hidden, backend)
    temperature = reference.bounded(temperature, hidden.dtype)
    if temperature < reference.MIN_FLOAT32_TEMPERATURE and hidden.dtype != torch.float64:
        bias = None if bias is None else bias.double()
        logprobs, entropy = linear_token_logprobs(hidden.double(), weight.double(), ids, bias=bias, chunk=chunk,
                                                  temperature=temperature, return_entropy=True)  # fmt: skip
        return (logprobs.float(), entropy.float()) if return_entropy else logprobs.float()
    rows, row_ids = hidden, ids.contiguous()  # the kernels know no stride
    if hidden.ndim != 2:
        rows, row_ids = hidden.reshape(-1, width), row_ids.flatten()
    if chunk is not None:
        forward_chunk = backward_chunk = chunk
    else:
        cuda = hidden.device.type == "cuda"
        memory = torch.cuda.get_device_properties(hidden.device).total_memory if cuda else None
        forward_chunk, backward_chunk = (
            block_columns(n, memory) for n in (min(rows.shape[0], ROWS_PER_PASS), rows.shape[0])
        )
    chunks = min(forward_chunk, vocab), min(backward_chunk, vocab)
    logprobs, entropy, _ = _gradients.apply(
        LinearTokenLogprobs, rows, weight, bias, row_ids, temperature, return_entropy, *chunks, chosen
    )
    if hidden.ndim != 2:
        logprobs = logprobs.view(ids.shape)
        entropy = entropy.view(ids.shape) if return_entropy else entropy
    return (logprobs, entropy) if return_entropy else logprobs


def block_columns(rows: int, gpu_memory: int | None) -> int:
    """Return the vocabulary entries in a block of ``rows`` tokens, on a GPU with so many bytes, or on a CPU (None).

    On a GPU the logits of a block are a power of two that depends on its total memory, not on free memory, so that runs
    repeat.
    """
    logits = CPU_BLOCK_LOGITS
    if gpu_memory is not None:
        logits = max(
            CPU_BLOCK_LOGITS,
            min(MAX_GPU_BLOCK_LOGITS, 1 << ((gpu_memory // (4 * GPU_MEMORY_DIVISOR)).bit_length() - 1)),
        )
    return max(MIN_BLOCK_COLUMNS, logits // max(1, rows))


def _blocks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (vocabulary entries, their logits [N, C]); the next block overwrites the logits."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    buffer = hidden.new_empty(rows, chunk)
    starts = range(0, vocab, chunk)
    sizes = [min(chunk, vocab - start) for start in starts]
    weights = weight.T.split_with_sizes(sizes, 1)
    biases = itertools.repeat(None) if bias is None else bias.split_with_sizes(sizes)
    for start, columns, block_weight, block_bias in zip(starts, sizes, weights, biases):
        # also a narrower block is contiguous
        logits = buffer if columns == chunk else buffer.as_strided((rows, columns), (columns, 1))
        if block_bias is None:
            torch.mm(hidden, block_weight, out=logits)
        else:
            torch.addmm(block_bias, hidden, block_weight, out=logits)
        yield slice(start, start + columns), logits


def _within(ids: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each id is in the block, bool [N], and its column there, int64 [N] (any column if not)."""
    inside = (ids >= block.start) & (ids < block.stop)
    return inside, torch.where(inside, ids - block.start, 0)


def _work_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _for_cpu(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in a dtype of the C++ kernels."""
    return logits.float() if logits.dtype == torch.float16 else logits


def _summary(
    logits: torch.Tensor, ids: torch.Tensor, start: int, temperature: float, with_entropy: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a block's largest logit, log of the sum of exp((logit - largest) / temperature) and entropy, [N] each.

    The block holds the logits of the vocabulary entries from ``start`` on. Rows with all logits -inf give -inf, -inf
    and 0; rows with NaN or inf give a sum of NaN.
    """
    if backend == "torch":
        work = logits.to(_work_dtype(logits))
        top = work.amax(1)
        z = (work - top[:, None]) / temperature
        exps = z.exp()
        total = exps.sum(1)
        log_sum = total.log()
        entropy = top
        if with_entropy:
            entropy = log_sum - (exps * z.masked_fill(exps == 0, 0.0)).sum(1) / total
    else:
        score = torch.ops.rlkernels.token_logprobs.default
        _, entropy, stats = score(_for_cpu(logits), ids, temperature, with_entropy, start)
        top, log_sum = stats.unbind(1)
        entropy = entropy if with_entropy else top
    is_empty = top == -torch.inf  # all logits are -inf: a row with NaN has NaN here
    return top, torch.where(is_empty, -torch.inf, log_sum), torch.where(is_empty, 0.0, entropy)


def _empty_outputs(hidden: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = hidden.shape[0]
    dtype = _work_dtype(hidden)
    logprobs = hidden.new_empty(rows, dtype=dtype)
    entropies = hidden.new_empty(rows if with_entropy else 0, dtype=dtype)
    stats = hidden.new_empty(rows, 2, dtype=dtype)
    return logprobs, entropies, stats


@_backend.kernel_op(
    "rlkernels::linear_token_logprobs",
    lambda hidden, weight, bias, ids, temperature, with_entropy, *_: _empty_outputs(hidden, with_entropy),
)
def score_op(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, temperature: float,
    with_entropy: bool, chunk: int, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Score hidden [N, H], ids int64 [N]; return logprobs [N], entropies [N] or [0], stats [N, 2] for the gradient."""
    _check.indices("ids", ids, weight.shape[0])
    logprobs, entropies, stats = _empty_outputs(hidden, with_entropy)
    for start in range(0, hidden.shape[0], ROWS_PER_PASS):
        rows = slice(start, start + ROWS_PER_PASS)
        if backend == "triton":
            of_rows: Any = hidden, ids, logprobs, entropies, stats
            if hidden.shape[0] > ROWS_PER_PASS:
                of_rows = tuple(tensor[rows] for tensor in of_rows)
            _score(weight, bias, temperature, chunk, *of_rows)
            continue
        chosen = torch.full_like(logprobs[rows], torch.nan)
        summaries = []
        for block, logits in _blocks(hidden[rows], weight, bias, chunk):
            summaries.append(_summary(logits, ids[rows], block.start, temperature, with_entropy, backend))
            inside, column = _within(ids[rows], block)
            chosen = torch.where(inside, logits.gather(1, column[:, None])[:, 0], chosen)
        tops, log_sums, block_entropies = map(torch.stack, zip(*summaries))  # [blocks, N] each
        top = tops.amax(0)
        # in a block of -inf only, -inf - -inf would be NaN
        shares = torch.where(log_sums == -torch.inf, -torch.inf, (tops - top) / temperature + log_sums)
        log_sum = torch.where(top == -torch.inf, torch.nan, shares.logsumexp(0))
        logprobs[rows] = (chosen - top) / temperature - log_sum
        stats[rows, 0] = top
        stats[rows, 1] = log_sum
        if with_entropy:
            block_logprobs = shares - log_sum
            block_probs = block_logprobs.exp()
            terms = block_entropies - torch.where(block_probs == 0, 0.0, block_logprobs)
            entropies[rows] = (block_probs * terms).sum(0)
    return logprobs, entropies, stats


def _score(
    weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, chunk: int, hidden: torch.Tensor,
    ids: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor, stats: torch.Tensor,
) -> None:  # fmt: skip
    """Fill the outputs of :func:`score_op` with two launches a block."""
    from rlkernels.logprobs import triton_kernels

    state = hidden.new_empty(hidden.shape[0], 4, dtype=torch.float32)
    for block, logits in _blocks(hidden, weight, bias, chunk):
        is_last = block.stop == weight.shape[0]
        triton_kernels.score_block(logits, ids, block.start, is_last, state, logprobs, entropies, stats, temperature)


def _logit_gradient(
    logits: torch.Tensor, block: slice, temperature: float, backend: str, ids: torch.Tensor, stats: torch.Tensor,
    entropies: torch.Tensor, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of a block of logits [N, C] in their dtype; it may overwrite them.

    ``entropies`` [0]: no gradient reaches the entropies.
    """
    if backend == "triton":
        from rlkernels.logprobs import triton_kernels

        return triton_kernels.differentiate_block(
            logits, ids, block.start, stats, entropies, grad_logprobs, grad_entropies, temperature
        )
    if backend == "cpu":
        differentiate = torch.ops.rlkernels.token_logprobs_backward.default
        grads = grad_logprobs, grad_entropies
        grad = differentiate(_for_cpu(logits), ids, stats, entropies, *grads, temperature, block.start)
        return grad.to(logits.dtype)
    log_p = (logits.to(stats.dtype) - stats[:, :1]) / temperature - stats[:, 1:]
    p = log_p.exp()
    factor = grad_logprobs[:, None]
    if entropies.numel():
        factor = factor + grad_entropies[:, None] * (torch.where(p == 0, 0.0, log_p) + entropies[:, None])
    grad = -p * factor / temperature
    inside, column = _within(ids, block)
    grad.scatter_add_(1, column[:, None], torch.where(inside, grad_logprobs / temperature, 0.0)[:, None])
    return grad.to(logits.dtype)


def _empty_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_hidden = hidden.new_empty(hidden.shape if wanted[0] else [0])
    grad_weight = hidden.new_empty(weight.shape if wanted[1] else [0])
    grad_bias = hidden.new_empty(weight.shape[:1] if wanted[2] else [0])
    return grad_hidden, grad_weight, grad_bias


@_backend.kernel_op(
    "rlkernels::linear_token_logprobs_backward",
    lambda hidden, weight, *others: _empty_gradients(hidden, weight, others[-1]),
)
def gradient_op(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, stats: torch.Tensor,
    entropies: torch.Tensor, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor, temperature: float,
    chunk: int, backend: str, wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of hidden, weight and bias, [0] if not ``wanted``; entropies [0]: none reaches them."""
    grad_hidden, grad_weight, grad_bias = _empty_gradients(hidden, weight, wanted)
    rounded = hidden.dtype != _work_dtype(hidden)
    by_rows = wanted[0] and rounded and not hidden.is_cuda  # matrix products of a CPU round their results to bfloat16
    of_tokens = ids, stats, entropies, grad_logprobs, grad_entropies
    if by_rows:
        step = max(MIN_GRADIENT_ROWS, CPU_BLOCK_LOGITS // weight.shape[0])
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            of_rows = [tensor[rows] if tensor.numel() else tensor for tensor in of_tokens]
            for block, logits in _blocks(hidden[rows], weight, bias, weight.shape[0]):
                grad = _logit_gradient(logits, block, temperature, backend, *of_rows)
                torch.mm(grad, weight, out=grad_hidden[rows])
    if not any(wanted[1:]) and (by_rows or not wanted[0]):
        return grad_hidden, grad_weight, grad_bias
    total = hidden.new_zeros(hidden.shape if wanted[0] and not by_rows else [0], dtype=_work_dtype(hidden))
    for block, logits in _blocks(hidden, weight, bias, chunk):
        grad = _logit_gradient(logits, block, temperature, backend, *of_tokens)
        if total.numel() and rounded:
            torch.ops.aten.addmm.dtype_out(total, grad, weight[block], torch.float32, out=total)
        elif total.numel():
            total.addmm_(grad, weight[block])
        if wanted[1]:
            torch.mm(grad.T, hidden, out=grad_weight[block])
        if wanted[2]:
            grad_bias[block] = grad.sum(0, dtype=total.dtype)
    if total.numel():
        grad_hidden.copy_(total)
    return grad_hidden, grad_weight, grad_bias


class LinearTokenLogprobs(torch.autograd.Function):
    """Autograd of :func:`score_op` and :func:`gradient_op`."""

    @staticmethod
    def forward(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, temperature: float,
        with_entropy: bool, chunk: int, backward_chunk: int, backend: str,
    ) -> Any:  # fmt: skip
        return score_op(hidden, weight, bias, ids, temperature, with_entropy, chunk, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, bias, ids, ctx.temperature, _, _, ctx.chunk, ctx.backend = inputs
        _, entropies, stats = output
        ctx.save_for_backward(hidden, weight, bias, ids, stats, entropies)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    @_gradients.once("linear_token_logprobs", "; token_logprobs with backend='torch' has one")
    def backward(ctx: Any, saved: Any, grad_logprobs: Any, grad_entropies: Any, _: Any) -> Any:
        hidden, weight, bias, ids, stats, entropies = saved
        given = given_gradients(stats, entropies, grad_logprobs, grad_entropies)
        wanted = list(ctx.needs_input_grad[:3])
        with _contexts.gathered(weight, bias):
            gradients = gradient_op(
                hidden, weight, bias, ids, stats, *given, ctx.temperature, ctx.chunk, ctx.backend, wanted
            )
        needed = [gradient if is_needed else None for gradient, is_needed in zip(gradients, wanted)]
        return (*needed, *[None] * 6)
