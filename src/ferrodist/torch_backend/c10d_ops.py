"""torch's c10d operators for groups of ferrodist, for programs that ask for them: `use_c10d_kernels`.

torch's own groups run a collective as an operator (``torch.ops.c10d.allreduce_``), whose kernel calls the group's C++
backend. Groups of ferrodist have none, so dispatch modes (`CommDebugMode`, `FakeTensorMode`) don't see their
collectives, and code that calls operators directly (``all_gather_into_tensor_out``) finds no backend.

So inside such modes the methods of `FerrodistProcessGroup` call the operators, whose kernels call the methods again.
A kernel can't read the reduction, which torch passes as an opaque object. So the method that calls an operator leaves
what is to be run in a thread-local.
"""

from __future__ import annotations

import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend import argument_forms
from ferrodist.torch_backend.process_group import LEGACY_NAMES, FerrodistProcessGroup
from ferrodist.torch_private.modes import num_dispatch_modes
from ferrodist.torch_private.operators import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.torch_backend.work import FerrodistWork

_OPERATORS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "allgather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "gather_single": "gather_into_tensor_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "alltoall": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}
"""The operators that the methods of torch's own groups call."""

# Not every torch has all of them.
_METHODS = {method: name for method, name in _OPERATORS.items() if hasattr(torch.ops.c10d, name)}

_CALLABLE_AS_OPERATORS = {"all_gather_single", "all_gather_single_coalesced", "allgather", "alltoall"}
"""Methods whose operators have all the arguments that the method needs: two with tensors."""

_KEYS = ("CPU", "CUDA")
_local = threading.local()  # `run`, for the kernel of the operator that is called, and `is_in_operator`
_library: list[torch.library.Library] = []  # its kernels live as long as it


def use_c10d_kernels() -> None:
    """Let dispatch modes see the collectives of groups of ferrodist, from now on in this process.

    For debugging and tracing: `CommDebugMode`, `FakeTensorMode`, and code that calls ``torch.ops.c10d`` directly.
    Inside such modes collectives of ferrodist block. Groups of other backends work as before, and each of their calls
    takes some microseconds more. Further calls of this function do nothing.

    Raises:
        UnsupportedOpError: This torch can't return its own kernels, which groups of other backends need.
    """
    if _library:
        return
    if not hasattr(torch.library, "get_kernel"):
        raise UnsupportedOpError(f"torch {torch.__version__} can't give its own kernels back: use a newer torch")
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        for method, operator in _METHODS.items():
            for key in _KEYS:
                kernel = _kernel(method, operator, key)
                library.impl(operator, kernel, key, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    _library.append(library)
    argument_forms.router = _route


def _kernel(method: str, operator: str, key: str) -> Callable[..., Any]:
    schema = schema_of(getattr(torch.ops.c10d, operator).default)
    index = [argument.name for argument in schema.arguments].index("process_group")
    has_results = len(schema.returns) > 1
    original = torch.library.get_kernel(f"c10d::{operator}", key)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        group = dist.ProcessGroup.unbox(arguments[index])
        if not isinstance(group, FerrodistProcessGroup):
            return original.call_boxed(keyset, *arguments)
        run, _local.run = getattr(_local, "run", None), None
        if run is not None:
            run()
        elif method in _CALLABLE_AS_OPERATORS:
            getattr(group, method)(*arguments[:2]).wait()
        else:
            raise UnsupportedOpError(
                f"torch.ops.c10d.{operator} was called by itself, for a group of ferrodist: call the function of"
                " torch.distributed"
            )
        work = group._done.boxed()  # noqa: SLF001 - lives as long as the group
        return (arguments[0], work) if has_results else work

    return kernel


def _route(group: FerrodistProcessGroup, method: Callable[..., FerrodistWork], given: tuple[Any, ...]) -> Any:
    """Run a method through its operator inside a dispatch mode; return None outside of one."""
    base = _BASES.get(method.__name__)
    if base is None or not num_dispatch_modes() or getattr(_local, "is_in_operator", False):
        return None
    opts = given[-1]
    was_async, opts.asyncOp = opts.asyncOp, False
    _local.run, _local.is_in_operator = (lambda: method(group, *given)), True
    try:
        return base(group, *given)
    finally:
        _local.run, _local.is_in_operator = None, False
        opts.asyncOp = was_async


def _base_of(method: str) -> Callable[..., Any]:
    """The method of torch's class, which calls the operator instead of the overriding method.

    torch looks for an overriding method by name, unless the calling function has that name, with the same group.
    """
    name = method if hasattr(dist.ProcessGroup, method) else LEGACY_NAMES[method]

    def call(self: dist.ProcessGroup, *arguments: Any) -> Any:
        return getattr(dist.ProcessGroup, name)(self, *arguments)

    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, globals(), name, None, call.__closure__)


_BASES = {method: _base_of(method) for method in _METHODS}
