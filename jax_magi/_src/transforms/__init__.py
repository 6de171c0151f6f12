"""How an op over a batch meets JAX: platforms, vmap, shardings, varying mesh axes."""
