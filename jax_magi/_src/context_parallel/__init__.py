"""Attention with the sequence split over devices: the plan, and its execution."""
