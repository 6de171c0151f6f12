"""Reports the build, the devices and the implementations in use: `python -m jax_magi`."""
