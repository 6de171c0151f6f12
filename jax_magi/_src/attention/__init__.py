"""Attention: the public functions, what callers can get wrong, and the differentiable op."""
