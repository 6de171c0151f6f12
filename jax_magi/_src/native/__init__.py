"""The native kernels as JAX functions. Nothing else knows the FFI or its target names."""
