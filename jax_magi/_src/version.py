"""The version, which pyproject.toml states and the installed package carries."""

from importlib import metadata


def version_of(package: str) -> str | None:
  """That of an installed package; None where it is not."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


# Run from a checkout that was never installed, nobody says.
__version__ = version_of("jax-magi") or "unknown"
