"""The native kernels as JAX functions. Only this package knows the FFI and its target names."""
