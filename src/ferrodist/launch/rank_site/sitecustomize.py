"""A ``sitecustomize`` for ranks' interpreters: stacks on SIGUSR1 and after a crash, whatever the program.

Python's ``site`` imports this before the program, since `rank_environment` puts the folder first in PYTHONPATH. It
registers the handlers, takes the folder out of PYTHONPATH and `sys.path` again, and runs the ``sitecustomize`` that it
hides, if there is one. So neither the program nor its children see any of this.

SIGUSR1 prints the stacks of all threads, and the program continues. A program's own handler replaces this one.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(__file__)  # noqa: PTH120 - pathlib takes some milliseconds to import


def _leave_path() -> None:
    with contextlib.suppress(ValueError):
        sys.path.remove(_FOLDER)
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    with contextlib.suppress(ValueError):
        rest.remove(_FOLDER)
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def _register() -> None:
    if sys.stderr is None:  # closed, and its number may be a file's by now
        return
    if not faulthandler.is_enabled():
        faulthandler.enable()
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _run_next() -> None:
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_leave_path()
_register()
_run_next()
