"""How each library is called: the calls that one who wants its speed would write.

Arrays exist before the clock starts, results go into given arrays, and whatever can be computed once is. Each adapter
imports nothing but the library that it calls: the MPI peers' interpreters have neither torch nor ferrodist.
"""

from __future__ import annotations

from ferrodist.bench.adapters.base import Adapter, RankInfo, UnsupportedError
from ferrodist.bench.adapters.registry import open_adapter

__all__ = ["Adapter", "RankInfo", "UnsupportedError", "open_adapter"]
