"""Studies: what an accelerator is worth end to end, measured over seeds with intervals. ``python -m bench.studies``."""

PAPERS = ("rhyme", "rpo", "drafts", "alpha")  # the accelerators that docs/together.md and docs/speed.md speak of
