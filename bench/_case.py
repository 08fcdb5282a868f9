"""The interface between a benchmark file and the runner."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Missing:
    """A provider that cannot run here; the table names it with the reason."""

    reason: str


# A function of no arguments; or (setup, function): setup() runs untimed before every timed call and its result
# is passed to the function; or Missing.
Provider = Callable[[], Any] | tuple[Callable[[], Any], Callable[[Any], Any]] | Missing


@dataclass(frozen=True)
class Case:
    """One op at one shape, run by several providers on the same inputs.

    Attributes:
        op: name of the op, as in ``rlkernels.registry.OPS``, or of the claim.
        shape: what the inputs look like, as text: ``"64 x 64 pairs, 512 x 512"``.
        providers: by name; each returns its output (tensors, numbers, or lists and tuples of them).
        dtype: dtype of the inputs, as text.
        device: where the inputs are.
        reference: the provider whose output the others are matched against, or a function that gives that
            output once, untimed. None: nothing to compare.
        limit: (name, seconds): the resource that bounds the op, and the least time that it needs.
        work: (unit, amount per call): reported as amount / median, ``("cells", 64 * 64 * 512 * 512)``.
        compare: (output, reference output) -> text, in place of the runner's match.
    """

    op: str
    shape: str
    providers: dict[str, Provider]
    dtype: str = "float32"
    device: str = "cpu"
    reference: str | Callable[[], Any] | None = "torch reference"
    limit: tuple[str, float] | None = None
    work: tuple[str, float] | None = None
    compare: Callable[[Any, Any], str] | None = None


@dataclass
class Row:
    """One line of the CSV."""

    op: str
    provider: str
    shape: str
    dtype: str = ""
    device: str = "cpu"
    median_s: float | None = None
    q20_s: float | None = None
    q80_s: float | None = None
    peak_bytes: int | None = None  # above the memory held before the call
    match: str = ""  # "exact", or max |out - reference| / max |reference|
    of_limit: float | None = None  # limit_s / median_s
    limit: str = ""
    extra: str = ""  # "1.9 Gcells/s"
    missing: str = ""  # why the provider did not run; the figures are empty then

    def timed(self, samples: Sequence[float]) -> Self:
        """Fill in median and quantiles of seconds per call, and return this row."""
        self.median_s, self.q20_s, self.q80_s = np.quantile(samples, (0.5, 0.2, 0.8)).tolist()
        return self


@dataclass(frozen=True)
class Measurement:
    """Rows that a benchmark file measures itself, if ``--only`` picks one of their shapes.

    Attributes:
        shapes: of the rows, see :class:`Case`.
        rows: does the work, and gives the rows.
    """

    shapes: Sequence[str]
    rows: Callable[[], Iterable[Row]]

    @classmethod
    def missing(cls, *rows: Row) -> Self:
        """Return rows that say why nothing runs."""
        return cls([row.shape for row in rows], lambda: rows)


def optional(module: str, make: Callable[[Any], Provider], install: str | None = None) -> Provider:
    """Return ``make(imported module)``, or :class:`Missing` when the package is not installed."""
    try:
        return make(importlib.import_module(module))
    except ImportError as error:
        return Missing(f"{error}; pip install {install or module.partition('.')[0]}")
