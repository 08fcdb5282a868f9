"""The files of a run, what they hold, and the callbacks that follow it."""
