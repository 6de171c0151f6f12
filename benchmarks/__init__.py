"""Benchmarks. Each is a module to run. `python -m benchmarks` runs several."""
