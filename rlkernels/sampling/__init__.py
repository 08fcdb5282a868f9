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
from rlkernels._contexts import public_op
from rlkernels.sampling import reference

__all__ = ["keyed_uniform", "sample_tokens", "verify_drafts"]

MAX_VOCABULARY = 2**20
MAX_TEMPERATURE = torch.finfo(torch.float32).max
SETTINGS = {"temperature": torch.float32, "top_p": torch.float32, "top_k": torch.int64}
Settings = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MAX_CACHED_SETTINGS = 64
_cached_settings: dict[tuple[Any, ...], Settings] = {}  # by numbers, rows, device and stream


def _check_keys(sample_ids: torch.Tensor, positions: torch.Tensor, **_: object) -> None:
    _check.tensor("sample_ids", sample_ids, ndim=1, dtype=torch.int64)
    _check.tensor("positions", positions, ndim=1, dtype=torch.int64, device=sample_ids.device)


@public_op("keyed_uniform", _check_keys)
def keyed_uniform(
    seed: int, sample_ids: torch.Tensor, positions: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Return random numbers that depend on (seed, sample, position) only, on every device and in any batch order.

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
    _check.shape("positions", positions, sample_ids.shape)
    seed = _check.seed(seed)
    if _backend.choose("keyed_uniform", sample_ids.device, backend) == "cpu":
        return torch.ops.rlkernels.keyed_uniform(seed, sample_ids.contiguous(), positions.contiguous())
    return reference.keyed_uniform(seed, sample_ids, positions)


def _check_logits(logits: torch.Tensor, uniforms: torch.Tensor, **settings: Any) -> None:
    _check.tensor("logits", logits, ndim=2, floating=True)
    _check.tensor("uniforms", uniforms, ndim=1, dtype=torch.float32, device=logits.device)
    for name in SETTINGS:
        value = settings.get(name)
        if isinstance(value, torch.Tensor):
            _check.tensor(name, value, ndim=(0, 1), device=logits.device)
            if name == "top_k" and value.dtype.is_floating_point:
                raise TypeError(f"top_k must have an integer dtype, got {value.dtype}")


@public_op("sample_tokens", _check_logits)
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
    logits, uniforms = _checked_sizes(logits, uniforms)
    settings = _settings(temperature, top_p, top_k, logits.shape[0], logits.device)
    chosen = _backend.choose("sample_tokens", logits.device, backend)
    if chosen == "cpu":
        ids, logprobs = torch.ops.rlkernels.sample_tokens(_rows(logits), uniforms.contiguous(), *settings)
    else:
        ids, logprobs = _draw(chosen, logits, uniforms, settings, top_p, top_k)
    if validate:
        _raise_bad_rows(logprobs, logits, uniforms)
    return ids, logprobs


@public_op("verify_drafts", _check_logits)
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
    """Accept the prefix of each draft that plain decoding with the same numbers would have produced.

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
        validate: as in :func:`sample_tokens`; the host still waits for a tensor of ``starts`` and for lists of drafts.

    Returns:
        accepted int64 [B], number of draft tokens accepted; ids int64 [R] and logprobs float32 [R], of which
        ``starts[b] .. starts[b] + accepted[b]`` (inclusive) are the new tokens of sequence b. The other rows were
        conditioned on a rejected token: -1 and 0. Not differentiable, as in :func:`sample_tokens`.

    Raises:
        ValueError, TypeError: as :func:`sample_tokens`; starts that do not fit the drafts.
    """
    logits, uniforms = _checked_sizes(logits, uniforms)
    draft_ids, bounds = _drafts(drafts, starts, logits)
    sequences = len(bounds) - 1
    device = logits.device
    chosen = _backend.choose("verify_drafts", device, backend)
    if chosen == "cpu":
        row_starts = torch.tensor(bounds, dtype=torch.int64, device=device)
        settings = _settings(temperature, top_p, top_k, sequences, device)
        native = torch.ops.rlkernels.verify_drafts
        accepted, ids, logprobs = native(_rows(logits), draft_ids, row_starts, uniforms.contiguous(), *settings)
    else:
        rows = reference.draft_rows(bounds, device)
        values: list[Any] = [
            _per_row(name, value, sequences, rows.owner) if isinstance(value, torch.Tensor) else value
            for name, value in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k))
        ]
        row_settings = _settings(values[0], values[1], values[2], logits.shape[0], device)
        drawn = _draw(chosen, logits, uniforms, row_settings, top_p, top_k)
        accepted, ids, logprobs = reference.accept(*drawn, draft_ids, rows)
    if validate:
        _raise_bad_rows(logprobs, logits, uniforms)
    return accepted, ids, logprobs


def _draw(
    chosen: str,
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    settings: Settings,
    top_p: float | torch.Tensor,
    top_k: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token of each row by Triton's kernel or plain torch; settings are tensors [T]."""
    filtered = _filters(top_p, top_k)
    if chosen == "triton":
        from rlkernels.sampling import triton_kernels

        return triton_kernels.sample_tokens(_rows(logits), uniforms.contiguous(), *settings, filtered)
    return reference.sample_tokens(logits, uniforms, *settings, filtered=filtered, few=_few(top_k))


def _checked_sizes(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the sizes, and return both detached: samples have no gradient."""
    rows, vocab = logits.shape
    if not 1 <= vocab <= MAX_VOCABULARY:
        _check.in_range("the vocabulary, logits.shape[1],", vocab, 1, MAX_VOCABULARY)
    _check.shape("uniforms", uniforms, (rows,))
    if logits.requires_grad or uniforms.requires_grad:
        return logits.detach(), uniforms.detach()
    return logits, uniforms


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits for the kernels: contiguous, float32 or bfloat16."""
    return (logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()).contiguous()


def _filters(top_p: float | torch.Tensor, top_k: int | torch.Tensor) -> bool:
    """Return False if top-p and top-k are known to be off without waiting for a GPU."""
    return isinstance(top_p, torch.Tensor) or isinstance(top_k, torch.Tensor) or top_p < 1 or top_k > 0


def _few(top_k: int | torch.Tensor) -> bool:
    """Return True if every row's top-k is known to be on and small without waiting for a GPU."""
    return not isinstance(top_k, torch.Tensor) and 0 < top_k <= reference.MAX_CANDIDATES


def _settings(
    temperature: float | torch.Tensor,
    top_p: float | torch.Tensor,
    top_k: int | torch.Tensor,
    rows: int,
    device: torch.device,
) -> Settings:
    """Return the three settings as tensors [rows]: float32, float32, int64. Nothing may write to them.

    Tensors made of numbers are cached for later calls: filling them takes three launches.
    """
    values: tuple[Any, Any, Any] = temperature, top_p, top_k
    are_numbers = type(temperature) is type(top_p) is float and type(top_k) is int
    if not (are_numbers and 0 <= temperature <= MAX_TEMPERATURE and 0 < top_p <= 1 and top_k >= 0):  # type: ignore[operator]
        values = _checked(*values)
        are_numbers = not any(isinstance(value, torch.Tensor) for value in values)
    on_gpu = device.type == "cuda"
    if not are_numbers or _is_recorded(on_gpu):
        return _expanded(values, rows, device)
    stream = torch.cuda.current_stream(device).stream_id if on_gpu else None
    key = values, rows, device, stream
    settings = _cached_settings.get(key)
    if settings is None:
        if len(_cached_settings) >= MAX_CACHED_SETTINGS:
            _cached_settings.clear()
        settings = _cached_settings[key] = _expanded(values, rows, device)
    return settings


def _is_recorded(on_gpu: bool) -> bool:
    """Return whether the call is being recorded, so that tensors that it makes belong to the recording."""
    if torch.compiler.is_compiling() or _backend.is_intercepted():
        return True
    if not on_gpu:
        return False
    return not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing()  # not: fake tensors


def _checked(temperature: Any, top_p: Any, top_k: Any) -> tuple[Any, Any, Any]:
    """Return the settings; raise for one out of range. Do not read tensors on a GPU: that would wait for it."""
    if not isinstance(top_k, torch.Tensor):
        top_k = _check.integer("top_k", top_k, 0)
    for name, value in zip(SETTINGS, (temperature, top_p, top_k)):
        if isinstance(value, torch.Tensor):
            if not (_check.on_host(value) and value.numel()):
                continue
            low = float(value.min())
            high = float(value.max())
        else:
            _check.number(name, value)
            low = high = value
        if name == "top_p":
            if not (low > 0 and high <= 1):
                raise ValueError(f"top_p must be > 0 and <= 1, got {low if not low > 0 else high!r}")
        else:
            _check.positive(name, low, zero=True)
            if name == "temperature" and high > MAX_TEMPERATURE:
                raise ValueError(f"{name} must be finite in float32, got {high}")
    temperature, top_p = (value if isinstance(value, torch.Tensor) else float(value) for value in (temperature, top_p))
    return temperature, top_p, top_k


def _expanded(values: tuple[Any, Any, Any], rows: int, device: torch.device) -> Settings:
    temperature, top_p, top_k = (_expand(name, value, rows, device) for name, value in zip(SETTINGS, values))
    return temperature, top_p, top_k


def _expand(name: str, value: Any, rows: int, device: torch.device) -> torch.Tensor:
    dtype = SETTINGS[name]
    if not isinstance(value, torch.Tensor):
        number = min(value, MAX_VOCABULARY) if name == "top_k" else value
        return torch.full((rows,), number, dtype=dtype, device=device)
    if value.ndim:
        _check.shape(name, value, (rows,))
    return value.detach().to(dtype).expand(rows).contiguous()


def _per_row(name: str, value: torch.Tensor, sequences: int, owner: torch.Tensor) -> torch.Tensor:
    """Return a setting of each sequence as one of each row; ``owner`` [R]: the sequence of each row."""
    if value.ndim == 0:
        return value
    _check.shape(name, value, (sequences,))
    return value.index_select(0, owner)


def _drafts(
    drafts: Sequence[Sequence[int]] | torch.Tensor, starts: torch.Tensor | Sequence[int], logits: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Return concatenated drafts, int64 [R - B] on the device of the logits, and starts [B + 1]; check both."""
    if not hasattr(starts, "__iter__"):
        raise TypeError(f"starts must be a tensor or a list of integers, got {starts!r}")
    if isinstance(starts, torch.Tensor):
        bounds = _check.tensor("starts", starts, ndim=1, dtype=(torch.int64, torch.int32)).tolist()
    else:
        bounds = [_check.integer("an entry of starts", start) for start in starts]
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != logits.shape[0]:
        raise ValueError(f"starts must run from 0 to the number of rows, {logits.shape[0]}, got {bounds}")
    lengths = [end - start - 1 for start, end in pairwise(bounds)]
    if any(length < 0 for length in lengths):
        raise ValueError(f"starts must ascend: each sequence has at least one row, got {bounds}")
    if isinstance(drafts, torch.Tensor):
        _check.tensor("drafts", drafts, ndim=1, dtype=torch.int64, device=logits.device)
        _check.shape("drafts", drafts, [sum(lengths)])
        draft_ids = drafts
    else:
        try:
            draft_lengths = [len(draft) for draft in drafts]
        except TypeError:
            message = "drafts must be a tensor of all tokens or hold a sequence of tokens for each sequence, got"
            raise TypeError(f"{message} {reprlib.repr(drafts)}") from None
        if draft_lengths != lengths:
            raise ValueError(f"drafts must have the lengths {lengths} that starts leaves room for, got {draft_lengths}")
        try:
            ids = [operator.index(token) for draft in drafts for token in draft]
            draft_ids = torch.tensor(ids, dtype=torch.int64, device=logits.device)
        except (TypeError, ValueError):
            for token in chain.from_iterable(drafts):
                _check.integer("an entry of drafts", token, -(2**63), 2**63 - 1)
            raise
    return draft_ids.contiguous(), bounds


def _raise_bad_rows(logprobs: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    """Raise ValueError if a log-probability is NaN, and name the fault of its row."""
    # log-probabilities are at most 0, so their sum is NaN only if one of them is
    if not _check.has_values(logits) or not math.isnan(logprobs.sum().item()):
        return
    bad_rows = logprobs.isnan()
    row = int(bad_rows.nonzero()[0, 0])
    location = f"in row {row} ({int(bad_rows.sum())} bad rows)"
    uniform = float(uniforms[row])
    largest = float(logits[row].float().max())
    if not 0 <= uniform < 1:
        raise ValueError(f"uniforms must lie in [0, 1), got {uniform} {location}")
    if not math.isfinite(largest):
        fault = "nothing but -inf" if largest == -math.inf else largest
        raise ValueError(f"logits must be finite or -inf, one of a row finite at least, got {fault} {location}")
    raise ValueError(f"temperature must be >= 0, top_p > 0 and <= 1, top_k >= 0, got others {location}")
