"""The process of a run: its place among others, its signals and its terminal."""
