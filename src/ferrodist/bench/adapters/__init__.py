"""Adapters of the libraries: each makes the calls that a program tuned for speed would make.

Arrays exist before the clock starts, results go into given arrays, and constants are computed once. Each adapter
imports nothing but the library that it calls: the MPI peers' interpreters have neither torch nor ferrodist.
"""

from __future__ import annotations

from ferrodist.bench.adapters.base import Adapter, RankInfo, UnsupportedError
from ferrodist.bench.adapters.registry import open_adapter

__all__ = ["Adapter", "RankInfo", "UnsupportedError", "open_adapter"]
