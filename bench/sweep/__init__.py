"""Training runs over a grid of learning rates and seeds: ``python -m bench.sweep --help``."""
