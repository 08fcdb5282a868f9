"""The parts of a trainer's loop."""
