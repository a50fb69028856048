"""Prepared collectives, which are called many times with the same tensors, as MPI's persistent operations are.

call = fd.prepare_allreduce(tensor)
for _ in range(1000):
    ...  # changes the elements of `tensor`
    total = call()
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.backends.native.binding import ReportingModule, compiled, is_native_available
from ferrodist.collectives.all_gather import all_gather, all_gather_call, reduce_scatter, reduce_scatter_call
from ferrodist.collectives.all_to_all import all_to_all, all_to_all_call
from ferrodist.collectives.arguments import check_tensor, group_and_timeout
from ferrodist.collectives.reduce import allreduce, allreduce_call, broadcast, broadcast_call
from ferrodist.collectives.reduce_op import Op, ReduceOp
from ferrodist.torch_private.profiling import FLAG_OWNER, is_profiling

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import CollectiveCall


class _PurePrepared:
    """The base of `PreparedCollective` without the compiled one, and where calls are logged."""

    __slots__ = ("_arguments", "_fast", "_general", "_out")

    def __init__(  # noqa: PLR0917 - as the compiled one
        self,
        name: str,
        tensor: torch.Tensor,
        rest: tuple[Any, ...],
        group: Backend,
        out: torch.Tensor,
        timeout: float | None,
        general: Callable[[], torch.Tensor],
    ) -> None:
        self._fast = getattr(compiled, f"fast_{name}")
        self._arguments = (tensor, *rest, group, out, timeout)
        self._general = general
        self._out = out

    @property
    def result(self) -> torch.Tensor:
        """The tensor that each call returns."""
        return self._out

    def __call__(self) -> torch.Tensor:
        """Run the collective; raises what its function raises."""
        if not is_profiling() and self._fast(*self._arguments) is not None:
            return self._out
        return self._general()


_IS_COMPILED = FLAG_OWNER is not None and is_native_available() and not isinstance(compiled, ReportingModule)
if _IS_COMPILED:
    compiled.load_prepared(FLAG_OWNER)
_Base: Any = compiled.Prepared if _IS_COMPILED else _PurePrepared


class PreparedCollective(_Base):  # type: ignore[misc]  # known at run time only
    """A collective whose arguments have been checked; calling it runs it and returns its result.

    It reads what its tensor contains at the time of the call, and its result is the same tensor each time. It takes the
    place of a call of the collective's function, in the same order on all ranks; other ranks may call the function.
    Each call finds out whether a tensor has been resized since, and then raises what the function raises.
    """

    __slots__ = ()

    def __init__(self, name: str, arguments: tuple[Any, ...], general: Callable[[], torch.Tensor]) -> None:
        super().__init__(name, *arguments, general)

    if TYPE_CHECKING:

        @property
        def result(self) -> torch.Tensor:
            """The tensor that each call returns."""

        def __call__(self) -> torch.Tensor:
            """Run the collective; raises what its function raises."""


def prepare_allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PreparedCollective:
    """Prepare an `allreduce`. Nothing is sent until it is called.

    Args:
        tensor: As for `allreduce`, but without gradients.
        op: The reduction.
        group: The group; None is the default group at this time.
        out: The output tensor, which may be ``tensor``; None makes one, for all calls.
        timeout: Seconds, of each call; None takes the group's.

    Raises:
        RuntimeError: ``tensor`` needs gradients. Or as for `allreduce`, for wrong arguments.
        TypeError, ValueError, NotImplementedError, UnsupportedOpError: As for `allreduce`, for wrong arguments.
    """
    return _prepare("allreduce", allreduce, allreduce_call, (tensor, op), group, out, timeout)


def prepare_broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PreparedCollective:
    """Prepare a `broadcast`; see `prepare_allreduce`."""
    return _prepare("broadcast", broadcast, broadcast_call, (tensor, root), group, out, timeout)


def prepare_all_gather(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PreparedCollective:
    """Prepare an `all_gather`; see `prepare_allreduce`."""
    return _prepare("all_gather", all_gather, all_gather_call, (tensor, dim), group, out, timeout)


def prepare_reduce_scatter(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PreparedCollective:
    """Prepare a `reduce_scatter`; see `prepare_allreduce`."""
    return _prepare("reduce_scatter", _reduce_scatter, reduce_scatter_call, (tensor, op, dim), group, out, timeout)


def prepare_all_to_all(
    tensor: torch.Tensor,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PreparedCollective:
    """Prepare an `all_to_all` of one tensor; see `prepare_allreduce`."""
    check_tensor(tensor)
    return _prepare("all_to_all", all_to_all, all_to_all_call, (tensor,), group, out, timeout)


def _reduce_scatter(tensor: torch.Tensor, op: Op, dim: int, **options: Any) -> torch.Tensor:
    return reduce_scatter(tensor, op, dim=dim, **options)


def _prepare(  # noqa: PLR0917 - the arguments of the functions above
    name: str,
    general: Callable[..., Any],
    make_call: Callable[..., CollectiveCall[Any]],
    arguments: tuple[Any, ...],
    group: Backend | None,
    out: torch.Tensor | None,
    timeout: float | None,
) -> PreparedCollective:
    """Prepare ``general(*arguments)``; ``make_call``, which makes its call, raises for wrong arguments."""
    chosen, _ = group_and_timeout(group, timeout)
    made: torch.Tensor = make_call(*arguments, chosen, None, timeout).finish() if out is None else out
    make_call(*arguments, chosen, made, timeout)
    run = partial(general, *arguments, group=chosen, out=made, timeout=timeout)
    return PreparedCollective(name, (arguments[0], arguments[1:], chosen, made, timeout), run)
