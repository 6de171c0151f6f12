"""Tests the exchange of rows between devices: `python -m jax_magi.exchange --help`.

report = jax_magi.check_exchange(mesh, ranks_per_node=8)  # On all processes.
print(report)
report.raise_if_faulty()
"""

import sys

from jax_magi._src.exchange_check.api import check_exchange
from jax_magi._src.exchange_check.command import main
from jax_magi._src.exchange_check.report import ExchangeCheck, ExchangeRate, ExchangeReport

__all__ = ["ExchangeCheck", "ExchangeRate", "ExchangeReport", "check_exchange", "main"]

if __name__ == "__main__":
  sys.exit(main())
