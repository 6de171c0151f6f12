"""Support of an op for JAX's features: platforms, vmap, shardings, varying mesh axes."""
