"""How each library is called: the calls that one who wants its speed would write.

Arrays exist before the clock starts, results go into given arrays, what can be worked out once is. Nothing is imported
here but what is measured: the MPI peers' interpreters have no torch, and no ferrodist.
"""

from __future__ import annotations

from ferrodist.bench.adapters.base import Adapter, NotOfferedError, Place
from ferrodist.bench.adapters.opening import open_adapter

__all__ = ["Adapter", "NotOfferedError", "Place", "open_adapter"]
