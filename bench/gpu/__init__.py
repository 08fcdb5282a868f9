"""Builds, checks and times everything on a GPU: ``python -m bench.gpu``. See bench/gpu/README.md."""
