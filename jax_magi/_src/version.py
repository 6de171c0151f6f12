"""The version, which pyproject.toml states and the installed package carries."""

from importlib import metadata


def version_of(package: str) -> str | None:
  """The version of a package; None if it is not installed."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


# A checkout that was never installed has no version.
__version__ = version_of("jax-magi") or "unknown"
