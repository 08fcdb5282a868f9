"""Many steps and many operations: ``python -m bench.soak``. docs/trust.md has what came of it."""
