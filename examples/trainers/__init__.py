"""Adapters of trainers: see docs/trainers.md."""
