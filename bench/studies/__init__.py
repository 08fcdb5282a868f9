"""Studies: what an accelerator is worth end to end, measured over seeds with intervals. ``python -m bench.studies``."""

PAPERS = ("rhyme", "rpo", "drafts", "alpha")  # the accelerators of the papers, as docs/speed.md speaks of them
