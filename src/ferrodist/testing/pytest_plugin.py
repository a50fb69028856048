"""The pytest plugin: a test that runs as every rank of a group.

::

    @pytest.mark.ranks(4)
    def test_ranks_meet(group):
        group.barrier()

The body runs once for each rank, with the rank's ``group``, through `ferrodist.testing.run_ranks`. Other fixtures are
set up once and shared by the ranks; ranks that are processes have copies. Ranks that are threads also share torch's
random generator: ``torch.manual_seed`` in one rank affects all, and gives a warning. pytest imports this module at
every start, so it imports only the standard library and pytest; the first marked test imports the rest.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from ferrodist.testing.backend_names import RANKS_BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from _pytest._io import TerminalWriter

    from ferrodist.backends.base import Backend
    from ferrodist.testing.backend_names import BackendName
    from ferrodist.testing.ranks import BackendFactory

__all__: list[str] = []

_DEFAULT_TIMEOUT = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--ranks-backend``."""
    parser.getgroup("ferrodist").addoption(
        "--ranks-backend",
        choices=RANKS_BACKENDS,
        default=RANKS_BACKENDS[0],
        help="the backend of tests marked with ranks, where the marker does not name one (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(world_size, backend=None, timeout=60): run the test on each of world_size ranks; the test's argument"
        " 'group' is the rank's group. backend is a function that makes the groups, or one of"
        f" {', '.join(RANKS_BACKENDS)}.",
    )


@pytest.fixture(name="group")
def _group(request: pytest.FixtureRequest) -> None:
    """The group of the rank that runs the test; the test must be marked with ranks."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("the argument 'group' needs the marker: @pytest.mark.ranks(world_size)", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from ferrodist.errors import RankFailedError  # noqa: PLC0415 - see the module's docstring
    from ferrodist.testing.ranks import run_ranks  # noqa: PLC0415

    options = _read_marker(marker)
    names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 - as pytest's own implementation of this hook does
    if "group" not in names:
        pytest.fail("a test marked with ranks must take the argument 'group'", pytrace=False)
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail(
            "a test marked with ranks is a plain function, whose ranks are threads or processes: this one is async;"
            " call asyncio.run in it",
            pytrace=False,
        )
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "group"}
    backend: BackendName | BackendFactory = options.backend or pyfuncitem.config.getoption("--ranks-backend")
    body: Callable[..., Any] = pyfuncitem.obj

    def program(group: Backend) -> None:
        try:
            body(group=group, **arguments)
        except _OUTCOMES as outcome:
            raise _RankOutcome(type(outcome).__name__, str(outcome)) from None

    try:
        run_ranks(program, options.world_size, backend=backend, timeout=options.timeout)
    except RankFailedError as error:
        if isinstance(error.__cause__, _RankOutcome):
            name, reason = error.__cause__.args
            kind = next(kind for kind in _OUTCOMES if kind.__name__ == name)
            raise kind(reason) from None
        raise
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the tracebacks of the ranks, without those of this module and `run_ranks`."""
    report = yield
    if item.get_closest_marker("ranks") is not None and call.excinfo is not None and report.failed:
        from ferrodist.errors import RankFailedError  # noqa: PLC0415

        error = call.excinfo.value
        if isinstance(error, RankFailedError):
            path, line, _ = item.location
            # pytest asks of a long representation no more than what _RankReport has.
            report.longrepr = _RankReport(text=str(error), path=path, line=(line or 0) + 1)  # type: ignore[assignment]
    return report


_OUTCOMES: tuple[type[BaseException], ...] = (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception)


class _RankOutcome(BaseException):
    """A skip, xfail or exit on a rank. pytest's own exceptions for these do not pickle."""


@dataclass(frozen=True)
class _Options:
    """The marker's arguments."""

    world_size: int
    backend: BackendName | BackendFactory | None = None
    timeout: float = _DEFAULT_TIMEOUT


def _read_marker(marker: pytest.Mark) -> _Options:
    """The arguments of a marker; the test fails with one sentence where they are wrong."""
    options = None
    with contextlib.suppress(TypeError):
        options = _Options(*marker.args, **marker.kwargs)
    if options is None:
        given = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
        _fail(f"takes (world_size, backend=None, timeout=60), not ({', '.join(given)})")
    size: object = options.world_size  # of any type, as the others
    backend: object = options.backend
    timeout: object = options.timeout
    if isinstance(size, (list, tuple, set, frozenset, range)):
        _fail(
            f"takes one number of ranks, not {size!r}: for several, give the test an argument n, and"
            f" @pytest.mark.parametrize('n', [pytest.param(n, marks=pytest.mark.ranks(n)) for n in {size!r}])"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        _fail(f"takes a number of ranks, of 1 or more, not {size!r}")
    if backend is not None and not callable(backend) and backend not in RANKS_BACKENDS:
        _fail(f"takes as backend a function or {', '.join(RANKS_BACKENDS)}, not {backend!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        _fail(f"takes as timeout a number of seconds, not {timeout!r}")
    return options


def _fail(why: str) -> NoReturn:
    pytest.fail(f"the marker ranks {why}", pytrace=False)


@dataclass(frozen=True, kw_only=True)
class _RankReport:
    """The text of a `RankFailedError`, as pytest shows failures."""

    text: str
    path: str
    line: int

    @property
    def reprcrash(self) -> SimpleNamespace:
        return SimpleNamespace(path=self.path, lineno=self.line, message=self.text.partition("\n")[0])

    def toterminal(self, tw: TerminalWriter) -> None:
        for line in self.text.splitlines():
            if line.startswith("--------"):
                tw.line(line, bold=True)
            elif line.startswith((" ", "Traceback")):
                tw.line(line)
            else:
                tw.line(line, red=True)
        tw.line(f"{self.path}:{self.line}", bold=True)

    def __str__(self) -> str:
        return self.text
