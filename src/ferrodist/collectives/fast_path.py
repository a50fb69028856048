"""The fast path of plain calls: from the user's function straight into the compiled engine.

A call is plain if its tensors are contiguous, on the CPU and need no gradient, and it is outside of `coalesce`; where
the elements are copied in any case they may be strided. The engine checks such tensors itself. All other calls, and all
whose arguments are wrong, take the general path. Both paths meet in the engine, so different ranks may take different
ones. Started calls are plain with the group's own timeout.

A collective's function takes the arguments of its public namesake and returns the result, or None before anything has
happened. Blocking ones are in C++, in native/bindings/fast_path.cpp, and called as ``compiled.fast_allreduce``;
`fast_barrier` returns whether it is done, and so do those of ``torch.distributed``, in fast_torch.cpp, which take
tensors to write into and are invisible to autograd; they start calls, too. Those in which ranks share their sizes,
in fast_sized.cpp and fast_objects.cpp, may return a list: the payloads that the ranks have shared, where the general
path is to go on. Those that start other collectives are here, and those that join or divide other dims than the first;
those of point-to-point calls are in `fast_p2p.py`.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from ferrodist.backends import process_group
from ferrodist.backends.native.binding import compiled, is_native_available
from ferrodist.collectives.arguments import check_tensor, compute_shard_sizes, flatten_parts, writing_to
from ferrodist.collectives.call_log import reported, start_log
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.work import PendingCollective, collector
from ferrodist.deadline import check_timeout
from ferrodist.torch_private.autograd import increment_version
from ferrodist.torch_private.compilers import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend


_MOST_DIMS = 64
"""torch's tensors have no more."""

_MOST_JOINED_BYTES = 4 << 20
"""Larger results of started collectives along inner dims are joined by the general path, in less memory."""


@reported
def start_allreduce(tensor: torch.Tensor, op: Any, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_allreduce`."""
    path = _path_of(group)
    target = _like(tensor) if out is None else out
    if path is None or target is None:
        return None
    started = path.communicator.start_allreduce(tensor, target, getattr(op, "number", -1), path.timeout)
    return started and _NativeWork("allreduce", path.engine, started, tensor, target, {"op": op})


@reported
def start_broadcast(tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_broadcast`, in place."""
    path = _path_of(group)
    if path is None or out is not tensor or type(root) is not int:
        return None
    started = path.communicator.start_broadcast(tensor, tensor, root, path.timeout)
    return started and _NativeWork("broadcast", path.engine, started, tensor, tensor, {"root": root})


@reported
def start_all_gather(tensor: torch.Tensor, dim: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_gather`; into ``out`` along a dim whose parts lie one after the other."""
    path = _path_of(group)
    if path is None or type(dim) is not int:
        return None
    if out is None and dim != 0:
        return _start_all_gather_along(tensor, dim, path)
    target = _gathered(tensor, path.engine.num_ranks) if out is None else out
    if target is None or not 0 <= dim < _MOST_DIMS:
        return None
    started = path.communicator.start_all_gather(tensor, target, dim, path.timeout)
    return started and _NativeWork("all_gather", path.engine, started, tensor, target, {"dim": dim})


def _start_all_gather_along(tensor: torch.Tensor, dim: int, path: Any) -> Any:
    dim = _dim_of(tensor, dim)
    if dim < 0:
        return None
    shape, num_ranks = tensor.shape, path.engine.num_ranks
    result = tensor.new_empty(*shape[:dim], num_ranks * shape[dim], *shape[dim + 1 :])
    if math.prod(shape[:dim]) == 1:  # the parts lie one after the other
        source = tensor.contiguous()
        started = path.communicator.start_all_gather(source, result, dim, path.timeout)
        return started and _NativeWork("all_gather", path.engine, started, source, result, {"dim": dim})
    if result.nbytes > _MOST_JOINED_BYTES:
        return None
    ones = (1,) * dim
    source = tensor.contiguous().view(*ones, -1)
    flat = result.new_empty(*ones, result.numel())
    started = path.communicator.start_all_gather(source, flat, dim, path.timeout)
    return started and _JoinedWork(result, shape, dim, path.engine, started, source, flat)


@reported
def start_reduce_scatter(
    tensor: torch.Tensor, op: Any, dim: int, group: Backend | None, out: torch.Tensor | None
) -> Any:
    """`async_reduce_scatter` into even parts of a dim; into ``out`` where they lie one after the other."""
    path, number = _path_of(group), getattr(op, "number", -1)
    if path is None or type(dim) is not int:
        return None
    if out is None and dim != 0:
        return _start_reduce_scatter_along(tensor, op, dim, path)
    target = _scattered(tensor, path.engine.num_ranks) if out is None else out
    if target is None or not 0 <= dim < _MOST_DIMS:
        return None
    started = path.communicator.start_reduce_scatter(tensor, target, number, dim, path.timeout)
    return started and _NativeWork("reduce_scatter", path.engine, started, tensor, target, {"op": op, "dim": dim})


def _start_reduce_scatter_along(tensor: torch.Tensor, op: Any, dim: int, path: Any) -> Any:
    number, num_ranks = getattr(op, "number", -1), path.engine.num_ranks
    dim = _dim_of(tensor, dim)
    if number < 0 or dim < 0 or tensor.shape[dim] % num_ranks:
        return None
    shape, size = tensor.shape, tensor.shape[dim] // num_ranks
    ones = (1,) * dim
    source = _divide(tensor, dim, [size] * num_ranks).view(*ones, -1)
    result = source.new_empty(*shape[:dim], size, *shape[dim + 1 :])
    target = result.view(*ones, -1)
    started = path.communicator.start_reduce_scatter(source, target, number, dim, path.timeout)
    return started and _NativeWork("reduce_scatter", path.engine, started, source, result, {"op": op, "dim": dim})


@reported
def start_all_to_all(tensor: torch.Tensor, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_to_all` of one tensor in even parts of dim 0."""
    path = _path_of(group)
    target = _like(tensor) if out is None else out
    if path is None or target is None:
        return None
    started = path.communicator.start_all_to_all(tensor, target, path.timeout)
    return started and _NativeWork("all_to_all", path.engine, started, tensor, target)


@reported
def all_gather_along(
    tensor: torch.Tensor, dim: int, group: Backend | None, timeout: float | None, sizes: Sequence[int] | None = None
) -> torch.Tensor | None:
    """`all_gather` along any dim, with the ranks' sizes along it (None: all alike), into a new tensor."""
    dim = _dim_of(tensor, dim)
    if _path_of(group) is None or dim < 0:
        return None
    shape = tensor.shape
    row = tensor.numel() // shape[dim]
    counts = None if sizes is None else [size * row for size in sizes]
    flat: torch.Tensor | None = compiled.fast_all_gather_flat(tensor.contiguous(), counts, dim, group, timeout)
    return None if flat is None else _join_parts(flat, shape, dim, sizes)


def _join_parts(flat: torch.Tensor, shape: torch.Size, dim: int, sizes: Sequence[int] | None) -> torch.Tensor:
    """Join parts that lie one after the other; ``shape`` is that of this rank's part."""
    row = math.prod(shape) // shape[dim]
    before, after = shape[:dim], shape[dim + 1 :]
    if math.prod(before) == 1:
        return flat.resize_(*before, flat.numel() // row, *after)  # unlike a view a tensor of its own
    out = flat.new_empty(*before, flat.numel() // row, *after)
    if sizes is None or len(set(sizes)) == 1:
        _copy_even_parts(out, flat, shape, dim)
    else:
        parts = torch.split(flat, [size * row for size in sizes])
        for part, target in zip(parts, torch.split(out, list(sizes), dim), strict=True):
            target.copy_(part.view(target.shape))
    return out


def _copy_even_parts(out: torch.Tensor, flat: torch.Tensor, shape: torch.Size, dim: int) -> None:
    num_parts = flat.numel() // math.prod(shape)
    parts = flat.view(num_parts, *shape).movedim(0, dim)
    out.view(*shape[:dim], num_parts, *shape[dim:]).copy_(parts)


@reported
def reduce_scatter_along(  # noqa: PLR0917 - the public signature
    tensor: torch.Tensor,
    op: Any,
    dim: int,
    group: Backend | None,
    timeout: float | None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """`reduce_scatter` into parts of any dim, of the given sizes (None: `compute_shard_sizes`), to a new tensor."""
    path = _path_of(group)
    dim = _dim_of(tensor, dim)
    if path is None or dim < 0 or getattr(op, "number", -1) < 0:  # before anything is copied
        return None
    shape = tensor.shape
    sizes = compute_shard_sizes(shape[dim], path.engine.num_ranks) if sizes is None else sizes
    row = tensor.numel() // shape[dim]
    source = _divide(tensor, dim, sizes)
    flat = compiled.fast_reduce_scatter_flat(source, op, [size * row for size in sizes], dim, group, timeout)
    return None if flat is None else flat.resize_(*shape[:dim], flat.numel() // row, *shape[dim + 1 :])


def _divide(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The parts of a tensor, one after the other."""
    if math.prod(tensor.shape[:dim]) == 1:
        return tensor.contiguous()
    check_tensor(tensor)  # the engine checks the copy alone
    return flatten_parts(tensor, dim, sizes)


def start_torch_call(function: Callable[..., Any], *arguments: Any, group: Backend) -> PendingCollective[Any] | None:
    """Start a call of ``torch.distributed`` by one of the functions of native/bindings/fast_torch.cpp."""
    path = _path_of(group)
    started = path is not None and function(*arguments, group, True)
    if not started:
        return None
    work, operation, tensor, facts = started
    return _NativeWork(operation, path.engine, work, tensor, None, facts)


def _dim_of(tensor: torch.Tensor, dim: Any) -> int:
    """The dim, counted from the start, of a tensor that has elements and is plain but for its strides; else -1."""
    if type(dim) is not int or not _is_plain(tensor) or tensor.is_complex() or not tensor.numel():
        return -1
    num_dims = tensor.dim()
    return dim % num_dims if -num_dims <= dim < num_dims else -1


def _path_of(group: Backend | None) -> Any:
    """The group's fast path, once its engine is open; None inside `coalesce`."""
    if collector.get() is not None:
        return None
    chosen = process_group.find_group(None) if group is None else group
    path = getattr(chosen, "fast_path", None)
    return None if path is None or path.communicator is None else path


def _like(tensor: torch.Tensor, _num_ranks: int = 0) -> torch.Tensor | None:
    """Make the output of a collective whose result has the input's shape; None for tensors that are not plain."""
    return torch.empty_like(tensor) if _is_plain(tensor) else None


def _gathered(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim():
        return None
    return tensor.new_empty(num_ranks * tensor.shape[0], *tensor.shape[1:])  # torch takes a tuple more slowly


def _scattered(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim() or tensor.shape[0] % num_ranks:
        return None
    return tensor.new_empty(tensor.shape[0] // num_ranks, *tensor.shape[1:])


def _new(dtype_index: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype_index], device="cpu")


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.is_cpu and not tensor.requires_grad


@not_compiled
class _NativeWork(PendingCollective[Any]):
    """A collective that the compiled engine runs; keeps alive the tensors, whose addresses the engine has.

    ``out`` is the result, or None for a call of ``torch.distributed``, whose caller has the tensors.
    """

    def __init__(  # noqa: PLR0917 - positional arguments are faster
        self,
        op_name: str,
        engine: Any,
        started: Any,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(op_name, engine.group_name)
        self._engine = engine
        self._started = started
        self._tensor: torch.Tensor | None = tensor
        self._out = out
        self._facts = facts  # for errors: the call's other fields of a `CollectiveOp`
        self._has_result = False

    @override
    def done(self) -> bool:
        return bool(self._started.is_done())

    @override
    def wait(self, timeout: float | None = None) -> torch.Tensor | None:
        self._check_process()
        out = self._out
        try:
            has_ended = self._started.wait(math.inf if timeout is None else check_timeout(timeout))
        except BaseException as failure:
            if not self._engine.has_left(failure):  # an interruption, while another thread runs it: it goes on
                raise
            raise self._engine.call_error(failure, self._op_name, self._tensor, out, **self._facts or {}) from None
        if not has_ended:
            raise self._still_running(timeout or 0.0)
        if not self._has_result:
            self._has_result = True
            self._tensor = None  # only errors needed it
            # The engine wrote raw memory: something may have saved it for a backward.
            if out is not None and not out.is_inference():
                increment_version((out,))
        return out


@not_compiled
class _JoinedWork(_NativeWork):
    """A started all_gather whose parts the first wait joins along a dim; ``shape`` is that of this rank's part."""

    def __init__(  # noqa: PLR0917 - as `_NativeWork`
        self,
        result: torch.Tensor,
        shape: torch.Size,
        dim: int,
        engine: Any,
        started: Any,
        tensor: torch.Tensor,
        flat: torch.Tensor,
    ) -> None:
        super().__init__("all_gather", engine, started, tensor, flat, {"dim": dim})
        self._result = result
        self._shape, self._dim = shape, dim
        self._lock = threading.RLock()  # a signal handler may wait, too

    @override
    def wait(self, timeout: float | None = None) -> torch.Tensor:
        flat = super().wait(timeout)
        with self._lock, writing_to(self._result):
            if self._out is not None and flat is not None:
                _copy_even_parts(self._result, flat, self._shape, self._dim)
                self._out = None
        return self._result


if is_native_available():
    start_log()
    compiled.load_fast_paths(collector, *process_group.default_holders(), torch.empty_like, _new)
