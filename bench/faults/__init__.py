"""Real, small training runs that are killed, and hostile input: ``python -m bench.faults``. See docs/trust.md."""
