"""Studies: what an accelerator is worth end to end, measured over seeds with intervals. ``python -m bench.studies``."""
