"""Attention: the public functions, the checks of their arguments, and the differentiable op."""
