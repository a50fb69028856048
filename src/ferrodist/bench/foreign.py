"""Run a module of ferrodist.bench in an interpreter that has no ferrodist: ``python foreign.py MODULE ARGUMENT ...``.

The packages above the module are created here, empty. Their own ``__init__`` and this interpreter's search path stay
out, and with them torch and NumPy of the installation that ferrodist is part of.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path


def main() -> None:
    """Run the module that the first argument names, as ``__main__``."""
    folder = Path(__file__).resolve().parent
    # Python puts a script's folder first, where our modules would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]
    for name, path in (("ferrodist", folder.parent), ("ferrodist.bench", folder)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    del sys.argv[0]
    runpy.run_module(f"ferrodist.bench.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
