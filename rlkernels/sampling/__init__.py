"""Keyed random numbers, token sampling and exact draft verification."""

import math
import operator
import reprlib
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels.sampling import reference

__all__ = ["keyed_uniform", "sample_tokens", "verify_drafts"]

MAX_VOCABULARY = 2**20


def keyed_uniform(
    seed: int, sample_ids: torch.Tensor, positions: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Return random numbers that depend on (seed, sample, position) alone, on every device and in any batch order.

    Philox4x32-10 with the seed as key and (sample, position) as counter (Salmon et al., SC'11).

    Args:
        seed: integer of 64 bits, -2**63 .. 2**64 - 1; negative ones equal those 2**64 above.
        sample_ids: int64 [T].
        positions: int64 [T].

    Returns:
        float32 [T], uniform on the open interval (0, 1), multiples of 2**-24.

    Raises:
        TypeError, ValueError: a wrong dtype, rank, length or device, or a seed out of range.
    """
    _check.tensor("sample_ids", sample_ids, ndim=1, dtype=torch.int64)
    _check.tensor("positions", positions, ndim=1, dtype=torch.int64, device=sample_ids.device)
    _check.shape("positions", positions, sample_ids.shape)
    seed = _check.seed(seed)
    if _backend.choose("keyed_uniform", sample_ids.device, backend) == "cpu":
        return torch.ops.rlkernels.keyed_uniform(seed, sample_ids.contiguous(), positions.contiguous())
    return reference.keyed_uniform(seed, sample_ids, positions)


@torch.no_grad()
def sample_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_p: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    validate: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: invert the cumulative distribution, in order of token ids, at one number per row.

    The temperature divides the logits; then ``top_k`` keeps the largest, and ``top_p`` the smallest set of the largest
    whose share is at least ``top_p`` of the rest. Among equal logits lower ids come first. Probabilities are integers
    in units of 2**-42 of the largest, so sums have no rounding order: a row gives the same token in any batch, on any
    number of threads and on every backend.

    Args:
        logits: floating point [T, V], V <= 2**20; -inf rules a token out. Worked on in float32.
        uniforms: float32 [T] in [0, 1), from :func:`keyed_uniform`; rounded down to multiples of 2**-24.
        temperature: >= 0, number or [T]; 0 takes the largest logit (the first of equals).
        top_p: in (0, 1], number or [T]; 1 is off.
        top_k: >= 0, number or integer [T]; 0 is off.
        validate: False leaves bad rows to the caller (id -1, log-probability NaN), and on a GPU waits for nothing.
            Plain torch waits once if it must find the rows for which 1,024 candidates are too few.

    Returns:
        ids int64 [T] and logprobs float32 [T], natural log, of the distribution sampled from (0 when greedy). For a
        gradient use :func:`rlkernels.token_logprobs` of the ids.

    Raises:
        ValueError: a setting out of range, or a row with NaN, with +inf, with nothing but -inf, or with a uniform
            outside [0, 1).
        TypeError: a wrong dtype.
    """
    _check_logits(logits, uniforms)
    rows = logits.shape[0]
    settings = _settings(temperature, top_p, top_k, rows, logits.device)
    chosen = _backend.choose("sample_tokens", logits.device, backend)
    if chosen == "cpu":
        ids, logprobs = torch.ops.rlkernels.sample_tokens(_rows(logits), uniforms.contiguous(), *settings)
    elif chosen == "triton":
        from rlkernels.sampling import triton_kernels

        filtered = _filters(top_p, top_k)
        ids, logprobs = triton_kernels.sample_tokens(_rows(logits), uniforms.contiguous(), *settings, filtered)
    else:
        known: dict[str, Any] = {"filtered": _filters(top_p, top_k), "few": _few(top_k)}
        ids, logprobs = reference.sample_tokens(logits, uniforms, *settings, **known)
    if validate:
        _raise_bad_rows(logprobs, logits, uniforms)
    return ids, logprobs


@torch.no_grad()
def verify_drafts(
    logits: torch.Tensor,
    drafts: Sequence[Sequence[int]] | torch.Tensor,
    starts: torch.Tensor | Sequence[int],
    uniforms: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_p: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    validate: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the part of each draft that plain decoding with the same numbers would have produced.

    Every row is sampled with its own number, as in :func:`sample_tokens`; the draft is accepted while it equals the
    samples. So a draft token x has the acceptance probability p(x), as in speculative sampling from a one-hot draft
    (Leviathan et al., 2023), and the tokens are those of decoding without drafts.

    Args:
        logits: floating point [R, V], R = sum(len(draft) + 1), rows ordered by sequence. The first row of a sequence
            is the distribution of its first draft token, the last that of the token after the whole draft.
        drafts: B lists of token ids, or all of them concatenated, int64 [R - B].
        starts: [B + 1], first row of each sequence; ``starts[B] == R``.
        uniforms: float32 [R].
        temperature, top_p, top_k: as in :func:`sample_tokens`, number or [B].
        validate: as in :func:`sample_tokens`; on a GPU ``starts`` and lists of drafts still make it wait.

    Returns:
        accepted int64 [B], number of draft tokens accepted; ids int64 [R] and logprobs float32 [R], of which
        ``starts[b] .. starts[b] + accepted[b]`` (inclusive) are the new tokens of sequence b. The other rows were
        conditioned on a rejected token: -1 and 0. Not differentiable, as in :func:`sample_tokens`.

    Raises:
        ValueError, TypeError: as :func:`sample_tokens`; starts that do not fit the drafts.
    """
    _check_logits(logits, uniforms)
    flat, starts = _drafts(drafts, starts, logits)
    settings = _settings(temperature, top_p, top_k, len(starts) - 1, logits.device)
    chosen = _backend.choose("verify_drafts", logits.device, backend)
    if chosen == "cpu":
        native = torch.ops.rlkernels.verify_drafts
        accepted, ids, logprobs = native(_rows(logits), flat, starts, uniforms.contiguous(), *settings)
    elif chosen == "triton":
        from rlkernels.sampling import triton_kernels

        owner = torch.repeat_interleave(starts.diff(), output_size=logits.shape[0])  # [R], the sequence of each row
        given = _rows(logits), uniforms.contiguous(), *(s[owner] for s in settings), _filters(top_p, top_k)
        ids, logprobs = triton_kernels.sample_tokens(*given)
        accepted, ids, logprobs = reference.accept(ids, logprobs, flat, starts, owner)
    else:
        known: dict[str, Any] = {"filtered": _filters(top_p, top_k), "few": _few(top_k)}
        accepted, ids, logprobs = reference.verify_drafts(logits, flat, starts, uniforms, *settings, **known)
    if validate:
        _raise_bad_rows(logprobs, logits, uniforms)
    return accepted, ids, logprobs


def _check_logits(logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    _check.tensor("logits", logits, ndim=2, floating=True)
    _check.in_range("the vocabulary, logits.shape[1],", logits.shape[1], 1, MAX_VOCABULARY)
    _check.tensor("uniforms", uniforms, ndim=1, dtype=torch.float32, device=logits.device)
    _check.shape("uniforms", uniforms, logits.shape[:1])


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as the kernels take them: contiguous, float32 or bfloat16."""
    return (logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()).contiguous()


def _filters(top_p: float | torch.Tensor, top_k: int | torch.Tensor) -> bool:
    """Return False if a look without waiting for a GPU shows that nothing is cut off."""
    return isinstance(top_p, torch.Tensor) or isinstance(top_k, torch.Tensor) or top_p < 1 or top_k > 0


def _few(top_k: int | torch.Tensor) -> bool:
    """Return True if a look without waiting for a GPU shows that every row keeps only a few of the largest."""
    return not isinstance(top_k, torch.Tensor) and 0 < top_k <= reference.CANDIDATES


def _settings(
    temperature: float | torch.Tensor,
    top_p: float | torch.Tensor,
    top_k: int | torch.Tensor,
    rows: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three settings as tensors [rows]: float32, float32, int64."""

    def expand(name: str, value: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return torch.full((rows,), value, dtype=dtype, device=device)
        _check.tensor(name, value, ndim=(0, 1), device=device)
        if dtype == torch.int64 and value.dtype.is_floating_point:
            raise TypeError(f"{name} must have an integer dtype, got {value.dtype}")
        if value.ndim:
            _check.shape(name, value, [rows])
        return value.to(dtype).expand(rows).contiguous()

    if not isinstance(top_k, torch.Tensor):
        top_k = min(_check.integer("top_k", top_k, 0), MAX_VOCABULARY)
    for name, value in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k)):
        # Tensors on a GPU are not read back: that would wait for it
        if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.numel() == 0):
            continue
        if not isinstance(value, torch.Tensor):
            _check.number(name, value)
        low, high = (float(value.min()), float(value.max())) if isinstance(value, torch.Tensor) else (value, value)
        if name == "top_p":
            if not (low > 0 and high <= 1):
                raise ValueError(f"top_p must be > 0 and <= 1, got {low if not low > 0 else high!r}")
        else:
            _check.positive(name, low, zero=True)
            if high > torch.finfo(torch.float32).max:
                raise ValueError(f"{name} must be finite in float32, got {high}")
    return (
        expand("temperature", temperature, torch.float32),
        expand("top_p", top_p, torch.float32),
        expand("top_k", top_k, torch.int64),
    )


def _drafts(
    drafts: Sequence[Sequence[int]] | torch.Tensor, starts: torch.Tensor | Sequence[int], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts concatenated [R - B] and starts [B + 1], both int64 on the device of the logits, checked against R."""
    if not hasattr(starts, "__iter__"):
        raise TypeError(f"starts must be a tensor or a list of integers, got {starts!r}")
    if isinstance(starts, torch.Tensor):
        bounds = _check.tensor("starts", starts, ndim=1, dtype=(torch.int64, torch.int32)).tolist()
    else:
        bounds = [_check.integer("an entry of starts", start) for start in starts]
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != logits.shape[0]:
        raise ValueError(f"starts must run from 0 to the number of rows, {logits.shape[0]}, got {bounds}")
    lengths = [after - before - 1 for before, after in pairwise(bounds)]
    if min(lengths, default=0) < 0:
        raise ValueError(f"starts must ascend: each sequence has at least one row, got {bounds}")
    if isinstance(drafts, torch.Tensor):
        _check.tensor("drafts", drafts, ndim=1, dtype=torch.int64, device=logits.device)
        _check.shape("drafts", drafts, [sum(lengths)])
        flat = drafts
    else:
        try:
            given = [len(draft) for draft in drafts]
        except TypeError:
            message = "drafts must be a tensor of all tokens or hold a sequence of tokens for each sequence, got"
            raise TypeError(f"{message} {reprlib.repr(drafts)}") from None
        if given != lengths:
            raise ValueError(f"drafts must have the lengths {lengths} that starts leaves room for, got {given}")
        try:
            ids = [operator.index(token) for draft in drafts for token in draft]
            flat = torch.tensor(ids, dtype=torch.int64, device=logits.device)
        except (TypeError, ValueError):
            for token in chain.from_iterable(drafts):
                _check.integer("an entry of drafts", token, -(2**63), 2**63 - 1)
            raise
    return flat.contiguous(), torch.tensor(bounds, dtype=torch.int64, device=logits.device)


def _raise_bad_rows(logprobs: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    bad = logprobs.isnan()
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        where = f"in row {row} ({int(bad.sum())} bad rows)"
        uniform, largest = float(uniforms[row]), float(logits[row].float().max())
        if not 0 <= uniform < 1:
            raise ValueError(f"uniforms must lie in [0, 1), got {uniform} {where}")
        if not math.isfinite(largest):
            found = "nothing but -inf" if largest == -math.inf else largest
            raise ValueError(f"logits must be finite or -inf, one of a row finite at least, got {found} {where}")
        raise ValueError(f"temperature must be >= 0, top_p > 0 and <= 1, top_k >= 0, got others {where}")
