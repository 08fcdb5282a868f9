"""Long runs: random operations against plain models, and the growth of memory. ``python -m bench.soak``."""
