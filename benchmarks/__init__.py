"""Benchmarks; each is a module to run."""
