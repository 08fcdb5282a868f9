"""Memory told before a run: ``python -m python_trainer plan``, and checkpointing by need. See docs/scale.md."""
