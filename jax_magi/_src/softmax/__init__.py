"""Fused scale + mask + softmax: the public functions and the differentiable op."""
