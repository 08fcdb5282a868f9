"""Faults injected into real, small training runs: ``python -m bench.faults``. docs/trust.md has what came of it."""
