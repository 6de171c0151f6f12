"""Benchmarks; each is a module to run, and `python -m benchmarks` runs several."""
