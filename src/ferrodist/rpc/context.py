"""`RpcContext`: an agent for the length of a with-block, which drains at its end."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from ferrodist.deadline import check_timeout
from ferrodist.rpc.agent import RpcAgent
from ferrodist.rpc.transport import RpcBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from ferrodist.backends.base import Backend

_OPTIONS = tuple(
    name for name, each in inspect.signature(RpcAgent).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"RpcContext has no option {name!r}; there are drain_timeout, {', '.join(_OPTIONS)}")


class RpcContext:
    """Makes and serves calls in a with-block: ``with RpcContext(group, {"add": add}) as agent:``.

    The end of the block waits until all ranks have reached the end of theirs and no call is under way, and serves calls
    until then; a rank that only serves has an empty block. A block that raises ends at once, and its rank is lost to
    the others.

    Args:
        backend: The transport between ranks; or a group, whose messages carry the calls.
        functions: The functions that other ranks may call, by name.
        drain_timeout: Seconds that the end of the block may take; None takes the backend's timeout.
        options: The options of `RpcAgent`.

    Raises:
        TypeError: An option is unknown. The backend is closed, unless an agent uses it.
        DistributedTimeoutError: At the end: it takes too long. Rank 0's error names the ranks that the others wait for.
        PeerLostError: At the end: rank 0, which coordinates it, is gone.
    """

    def __init__(
        self,
        backend: RpcBackend | Backend,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        *,
        drain_timeout: float | None = None,
        **options: Any,
    ) -> None:
        try:
            self._drain_timeout = None if drain_timeout is None else check_timeout(drain_timeout)
            _check_options(options)
        except (TypeError, ValueError):
            if isinstance(backend, RpcBackend):
                backend.refuse()
            raise
        self._make = functools.partial(RpcAgent, backend, functions, **options)
        self._agent: RpcAgent | None = None

    def __enter__(self) -> RpcAgent:
        if self._agent is not None:
            raise RuntimeError("this RpcContext has been entered already: make another one")
        self._agent = self._make()
        return self._agent

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._agent is not None
        try:
            if kind is None:
                self._agent.drain(self._drain_timeout)
        finally:
            self._agent.close()
