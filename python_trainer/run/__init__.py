"""The files of a run, and what they hold."""
