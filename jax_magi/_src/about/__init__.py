"""What this installation has, and what its functions choose here: `python -m jax_magi`."""
