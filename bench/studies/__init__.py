"""Studies: one for each claim of the papers, over seeds, on one harness. ``python -m bench.studies``."""
