"""Build, check and time everything on a GPU: ``python -m bench.gpu``. See bench/gpu/README.md."""
