"""Arguments of torch's methods: both signatures, reductions and lists; records of calls in the profiler.

torch calls a method with an options object, or with the options as arguments. The methods of `FerrodistProcessGroup`
are written for the first; `accept_options` adds the second.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ferrodist.collectives.reduce_op import Op, PremultipliedSum, ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_Result = TypeVar("_Result")

_ATTRIBUTES = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
"""Names of arguments, and of the attributes of options objects."""

_MISSING = object()

_NOT_RECORDED = contextlib.nullcontext()

_OPERATIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}
"""ferrodist's reductions by torch's."""

_SUM = dist.ReduceOp.SUM
_BY_NUMBER = {kind.value: op for kind, op in _OPERATIONS.items()}  # torch's own hash is slow

router: Callable[..., Any] | None = None
"""Called as ``router(group, method, arguments)`` before each method; its result, unless None, replaces the method's.

`c10d_ops.py` sets it.
"""


def plain_reduction(given: Any) -> ReduceOp | None:
    """Convert a reduction of torch's; None for a premultiplied sum or an unknown one."""
    if given == _SUM:  # nearly always: compared first, in half the time
        return ReduceOp.SUM
    return _BY_NUMBER.get(given.op.value)


def reduction(given: Any) -> Op:
    """Convert a reduction of torch's, with the factor of a premultiplied sum."""
    found = plain_reduction(given)
    if found is not None:
        return found
    if given.op == dist.ReduceOp.PREMUL_SUM:
        factor = given.__getstate__()[1]
        return PremultipliedSum(float(factor))
    raise UnsupportedOpError(f"there is no reduction {given}: there are {', '.join(each.name for each in _OPERATIONS)}")


def only_member(tensors: Sequence[Any], what: str) -> Any:
    """Return the only member of a list, as torch's methods take a rank's one tensor."""
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor a rank, not {len(tensors)}")
    return tensors[0]


def recorded(name: str) -> AbstractContextManager[object]:
    """Show a call in torch's profiler, as ``ferrodist:name``."""
    return record_function(f"ferrodist:{name}") if is_profiling() else _NOT_RECORDED


def accept_options(
    options: type, num_tensors: int, *fields: str, in_lists: bool = False
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorate a method of ``num_tensors`` arguments and ``opts``, to be called also with the options as arguments.

    These are ``fields``, "root" and "op" in torch's order, and then "timeout". With ``in_lists`` the arguments before
    them are lists of one tensor, and may come as tensors.
    """

    def decorate(method: Callable[..., _Result]) -> Callable[..., _Result]:
        parser = _ArgumentParser(method, options, num_tensors, (*fields, "timeout"), in_lists=in_lists)

        def run(group: Any, arguments: Sequence[Any]) -> _Result:
            found: _Result | None = None if router is None else router(group, method, arguments)
            if found is not None:
                return found
            with recorded(method.__name__):
                return method(group, *arguments)

        def call(group: Any, *given: Any, **named: Any) -> _Result:
            group.num_calls += 1
            if given and type(given[-1]) is options and not named:  # as torch itself calls it: the hot path
                is_watched = router is not None or is_profiling()
                return run(group, given) if is_watched else method(group, *given)
            return run(group, parser.parse(given, named))

        def call_with_one(
            group: Any, tensors: Any = _MISSING, opts: Any = _MISSING, /, *rest: Any, **named: Any
        ) -> _Result:
            # The same as `call` in half the time: 0.2 us less.
            if type(opts) is options and router is None and not (rest or named or is_profiling()):
                group.num_calls += 1
                return method(group, tensors, opts)
            return call(group, *[each for each in (tensors, opts) if each is not _MISSING], *rest, **named)

        return functools.wraps(method)(call_with_one if num_tensors == 1 else call)

    return decorate


class _ArgumentParser:
    """Converts a method's arguments to tensors and options; see `accept_options`."""

    def __init__(
        self, method: Callable[..., Any], options: type, num_tensors: int, fields: tuple[str, ...], *, in_lists: bool
    ) -> None:
        self._name = method.__name__
        self._tensor_names = list(inspect.signature(method).parameters)[1 : 1 + num_tensors]
        self._options = options
        self._fields = fields
        self._in_lists = in_lists

    def parse(self, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Return the tensors and the options, or raise TypeError; removes what it uses from ``named``."""
        rest, tensors = list(given), []
        for name in self._tensor_names:
            if rest:
                tensors.append(rest.pop(0))
            elif name in named:
                tensors.append(named.pop(name))
            else:
                raise TypeError(f"{self._name} takes {', '.join(self._tensor_names)}: {name} is missing")
        if self._in_lists and any(isinstance(each, torch.Tensor) for each in tensors):
            tensors = [[each] for each in tensors]
        opts = named.pop("opts", None)
        if opts is None and rest and hasattr(rest[0], "timeout"):
            opts = rest.pop(0)
        if opts is not None:
            if rest or named:
                raise TypeError(f"{self._name} takes opts, or {', '.join(self._fields)}, not both")
            return [*tensors, opts]
        fields = dict(zip(self._fields, rest, strict=False))
        fields |= {name: named.pop(name) for name in self._fields if name in named}
        if named or len(rest) > len(self._fields):
            unexpected = ", ".join([*map(repr, rest), *named])
            raise TypeError(f"{self._name} takes {', '.join(self._fields)} after its tensors, not {unexpected}")
        return [*tensors, _make_options(self._options, fields)]


def _make_options(kind: type, fields: dict[str, Any]) -> Any:
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, _ATTRIBUTES[name], value)
    return made
