"""DTensor: a tensor distributed over a device mesh."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.arguments import check_layout, check_shape
from ferrodist.collectives.reduce_op import ReduceOp, check_dtype
from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import VIEW_COPIES, ViewCopy, ViewKind, after_write, count_write, register_view
from ferrodist.tensor.dispatch import (
    KEYED_BY_VALUE,
    CachedDispatch,
    DispatchKind,
    cache_key,
    dispatch,
    dispatch_foreach,
    key_by_value,
    wrap_results,
)
from ferrodist.tensor.placement import Partial, Placement, Replicate
from ferrodist.tensor.plain_tensors import check_plain
from ferrodist.tensor.python_methods import METHODS
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.redistribute_plan import RedistributePlan, make_plan
from ferrodist.tensor.shape_agreement import agree_on_shape
from ferrodist.tensor.spec import DTensorSpec, check_placements
from ferrodist.torch_private.autograd import backward_hooks, current_graph_task
from ferrodist.torch_private.compilers import is_called_by_compiler, not_compiled, outside_of_compiler
from ferrodist.torch_private.tensors import base_data, call_plain, is_held_once, make_wrapper
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.mesh import DeviceMesh


# A member of an enum takes longer to look up than a global name.
_RESULT, _IN_PLACE, _LISTS, _ANY = DispatchKind.RESULT, DispatchKind.IN_PLACE, DispatchKind.LISTS, DispatchKind.ANY
_SHARED = ViewKind.SHARED
_is_inference_mode = torch.is_inference_mode_enabled
_spec_of = operator.attrgetter("_spec")  # in a `map`, it takes less time than a comprehension


@not_compiled
class DTensor(torch.Tensor):
    """A tensor distributed over a mesh, of which each rank has its local shard.

    To the program operators take and return full tensors: every rank of the mesh calls them, in the same order, and
    each computes on its shards. Inputs whose placements an operator can't take are redistributed. Everything is
    differentiable, and gradients are DTensors too.

    DTensors are made by `distribute`, by `DTensor.from_local`, and by operators on others.
    """

    __slots__ = ("_local", "_spec")

    _spec: DTensorSpec
    _local: torch.Tensor
    _view_copy: ViewCopy | None = None
    """Set for a view whose shard has memory of its own; see `copied_views`."""

    __torch_function__ = call_plain

    @staticmethod
    def _wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        made: DTensor = make_wrapper(DTensor, *spec.wrapper_arguments)
        made._local, made._spec = local, spec
        return made

    @staticmethod
    def _wrap_view(
        local: torch.Tensor, spec: DTensorSpec, base: DTensor, offset: int, kind: ViewKind = ViewKind.SHARED
    ) -> DTensor:
        """A view of another DTensor, ``offset`` elements after its start in the full tensor's memory."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # Autograd knows it as a view, as it does a plain tensor's.
            with torch.inference_mode(mode=False):
                return DTensor._wrap_view(local, spec, base, offset, kind)
        offset += base.storage_offset()  # type: ignore[assignment] # torch has it symbolic too
        if offset:
            shape, stride, _, *rest = spec.wrapper_arguments
            made: DTensor = make_wrapper(DTensor, shape, stride, offset, *rest)
        else:
            made = make_wrapper(DTensor, *spec.wrapper_arguments)
        made._local, made._spec = local, spec
        if (kind is not _SHARED or base._view_copy is not None) and current_graph_task() == -1:
            register_view(made, base._view_copy if kind is _SHARED else ViewCopy(base, local, kind))  # type: ignore[arg-type]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # noqa: C901, PLR0912 - calls would take longer than what they do
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operator on local shards."""
        # What `cache_key` returns, without the calls.
        key: list[Any] = [id(func)]
        spec = None
        for value in args:
            kind = type(value)
            if kind is DTensor:
                spec = value._spec
                key.append(spec)
            elif kind is int or value is None:
                key.append(value)
            elif kind is float:
                key.append(float)
            elif kind is list and value and type(value[0]) is DTensor:
                spec = value[0]._spec
                try:
                    key.append(tuple(map(_spec_of, value)))
                except AttributeError:  # there are plain tensors among them
                    key.append(cache_key(value, DTensor))
            else:
                key.append(cache_key(value, DTensor))
        if kwargs:
            for name, value in kwargs.items():
                key += (name, cache_key(value, DTensor))
        if spec is not None:
            cached = spec.dispatch_cache.get(tuple(key))
            if cached is KEYED_BY_VALUE:
                cached = spec.dispatch_cache.get(key_by_value(key, args, kwargs or {}))
            if (
                type(cached) is CachedDispatch
                and (dispatch_kind := cached.kind) is not _ANY
                and not (dispatch_kind is _IN_PLACE and args[0]._view_copy is not None)
            ):
                if dispatch_kind is _LISTS:
                    return dispatch_foreach(cached, func, args, kwargs or {}, DTensor)
                local = [value._local if type(value) is DTensor else value for value in args]
                for index, value in cached.positions:
                    local[index] = value
                result = cached.local(*local, **kwargs) if kwargs else cached.local(*local)
                # A view without an offset, outside of inference mode, is wrapped as any result: see `_wrap_view`.
                if dispatch_kind is _RESULT or (
                    cached.is_at_start
                    and args[0]._view_copy is None
                    and not args[0].storage_offset()
                    and not _is_inference_mode()
                ):
                    output: Any = cached.output
                    made: DTensor = make_wrapper(DTensor, *output.wrapper_arguments)
                    made._local, made._spec = result, output
                    return made
                if dispatch_kind is _IN_PLACE:
                    if VIEW_COPIES:
                        after_write(args[0])
                    else:
                        count_write(args[0])
                    return args[0]
                return wrap_results(cached, result, args[0], DTensor)
        value = None  # `plain_tensors` counts references to arguments
        return dispatch(func, args, kwargs or {}, DTensor, key)

    @staticmethod
    def from_local(
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Placement | Sequence[Placement],
        *,
        shape: Sequence[int] | None = None,
    ) -> DTensor:
        """Make a DTensor of the ranks' local shards; every rank of the mesh calls this. Differentiable.

        Args:
            local: This rank's shard. The result shares its memory, unless it is a conjugate view.
            mesh: The mesh.
            placements: The placement along each axis of the mesh; one placement for a mesh of one axis.
            shape: The shape of the full tensor. With None the ranks exchange the shapes of their shards and check that
                these fit together: an uneven dim gives the first ranks one element more, and all else is equal. With a
                shape each rank checks its own shard, and nothing is sent.

        Raises:
            TypeError: ``local`` is not a plain tensor, or is quantized; ``shape`` is None and collectives don't carry
                the dtype; or ``mesh``, ``placements`` or ``shape`` is of another type.
            UnsupportedOpError: ``local`` is nested, sparse or on a GPU.
            ValueError, IndexError: ``placements`` don't fit the mesh or the tensor.
            CollectiveMismatchError: On all ranks: the shards don't make a tensor.
            InvalidRankError: This rank is not in the mesh.
        """
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
            raise TypeError(f"from_local takes a plain torch.Tensor, not {type(local).__name__}")
        check_layout(local, "local")
        if shape is None or local.is_quantized:
            check_dtype(local.dtype)
        if local.is_cuda:
            raise UnsupportedOpError(
                f"the local shard is on {local.device}: distributed tensors are on the CPU, pass local.cpu()"
            )
        if shape is None:
            full = agree_on_shape(local, mesh, check_placements(mesh, placements, local.shape))
        else:
            full = check_shape(shape)
        checked = check_placements(mesh, placements, full)
        spec = DTensorSpec.make(mesh, checked, full, local.dtype)
        if tuple(local.shape) != spec.local_shape:
            raise ValueError(
                f"this rank's shard of a tensor of shape {full}, placed as {list(checked)}, has shape"
                f" {spec.local_shape}, not {tuple(local.shape)}"
            )
        # Operators on shards don't heed the conjugate and negative bits.
        made: DTensor = _FromLocal.apply(local.resolve_conj().resolve_neg(), spec)  # type: ignore[no-untyped-call]
        return made

    # The compiler takes DTensors apart by these methods, and traces operators on the shards.

    def __tensor_flatten__(self) -> tuple[list[str], DTensorSpec]:
        return ["_local"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], spec: DTensorSpec, outer_size: object, outer_stride: object
    ) -> DTensor:
        del outer_size, outer_stride  # they are the spec's
        return DTensor._wrap(inner["_local"], spec)

    def __coerce_tangent_metadata__(self) -> DTensor:
        return _redistribute(self, self._spec.without_partial)

    def __coerce_same_metadata_as_tangent__(self, spec: DTensorSpec, expected_type: type | None = None) -> torch.Tensor:
        """A gradient with the placements that a compiled backward was made for."""
        del expected_type
        return _redistribute(self, self._spec.with_placements(spec.placements))

    def _stable_hash_for_caching(self) -> str:
        """Keep graphs of DTensors out of the compiler's cache on disk, which logs no traceback of a RuntimeError."""
        raise RuntimeError("graphs of DTensors are not cached: they call groups of this process")

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is distributed."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each axis of the mesh."""
        return self._spec.placements

    def to_local(self, *, grad_placements: Placement | Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard, which shares memory with the tensor. Differentiable.

        If the tensor is used in backward, autograd does not see writes to the shard: write to a clone.

        Args:
            grad_placements: The placements of the gradient of which each rank's gradient is a shard. None is the
                tensor's placements, but replicated where it is partial.
        """
        if grad_placements is None:
            given = self._spec.without_partial.placements
        else:
            given = check_placements(self.mesh, grad_placements, self.shape)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local
        local: torch.Tensor = _ToLocal.apply(self, given)  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, grad_placements: Placement | Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor as a plain one; every rank of the mesh calls this. Differentiable."""
        replicated = self.redistribute([Replicate()] * self.mesh.ndim)
        return replicated.to_local(grad_placements=grad_placements)

    def redistribute(self, placements: Placement | Sequence[Placement]) -> DTensor:
        """The same tensor with other placements, by the fewest bytes; all ranks of the mesh call this. Differentiable.

        The gradient has this tensor's placements, but is replicated where the tensor is partial.

        Args:
            placements: The new placement along each axis of the mesh.

        Returns:
            A tensor that shares memory with this one if the placements are the same.
        """
        target = self._spec.resolve(placements)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return _redistribute(self, target)
        if target == self._spec and not torch.compiler.is_compiling():
            # Views of functions of one's own refuse in-place writes, torch's own don't.
            view: DTensor = torch.ops.aten.alias.default(self)
            placements, mesh = target.without_partial.placements, target.mesh
            view.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: redistribute_grad(grad, placements, mesh)
            )
            return view
        made: DTensor = _Redistribute.apply(self, target)  # type: ignore[no-untyped-call]
        return made

    def plan(self, placements: Placement | Sequence[Placement]) -> RedistributePlan:
        """The plan of a `redistribute`; print it to see the collectives and their bytes."""
        return make_plan(self._spec, self._spec.resolve(placements))

    @property
    def data(self) -> DTensor:
        """The tensor without its autograd history, sharing its memory; it can be set to another DTensor."""
        made = DTensor._wrap(self._local, self._spec)
        if self._view_copy is not None:
            register_view(made, self._view_copy)
        return made

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise TypeError(
                f"the data of a DTensor is a DTensor, not {with_article(type(value).__name__)}: distribute it first, as"
                " by fd.distribute(tensor, mesh, placements)"
            )
        base_data.__set__(self, value)
        self._revive()
        self._local, self._spec, self._view_copy = value._local, value._spec, None
        if value._view_copy is not None:
            register_view(self, value._view_copy)

    def _invalidate(self) -> None:
        """Let every later use of the shard raise: that of a view is out of date, as the viewed tensor was written."""
        del self._local
        self.__class__ = _OutOfDateDTensor

    def _revive(self) -> None:
        """Undo `_invalidate`, for a tensor that is about to get another shard."""
        if type(self) is _OutOfDateDTensor:
            self.__class__ = DTensor  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A tensor of the same spec with memory of its own."""
        if id(self) in memo:
            found: DTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("only leaves of the graph are copied deeply: use detach() or clone()")
        made = DTensor._wrap(self._local.detach().clone(), self._spec)
        memo[id(self)] = made
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "_view_copy"}, memo))
        if any(map(is_grad_placement_hook, backward_hooks(self).values())):
            # torch copies no hooks, but the copy has the placements.
            keep_grad_placements(made)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        is_stale = self._view_copy is not None and self._view_copy.is_stale
        return f"DTensor({self._spec}, {'out of date' if is_stale else f'local={self._local}'})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a shard without its mesh is not the tensor."""
        why = "a DTensor is not pickled: save its to_local() or full_tensor()"
        # The compiler of torch 2.10 asks this for its cache, and logs the traceback of any other error.
        raise RuntimeError(why) if is_called_by_compiler() else TypeError(why)


class _OutOfDateDTensor(DTensor):
    """A view whose shard is out of date. A `__getattr__` of all DTensors would slow down each of their attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name == "_local":
            raise RuntimeError(  # a TypeError would be replaced by that of +
                f"a view whose shards had to be redistributed, {self._spec}, is out of date, as the viewed tensor was"
                " written: take the view again after writing, or redistribute() the tensor first, so that the dims that"
                " the view splits or joins are replicated"
            )
        raise AttributeError(f"{DTensor.__name__!r} object has no attribute {name!r}")


for _name, _method in METHODS.items():
    setattr(DTensor, _name, _method)


def _redistribute(tensor: DTensor, target: DTensorSpec) -> DTensor:
    local = redistribute_local(tensor._local, tensor._spec, target)
    if local is tensor._local:
        # A view for autograd too, which then sees writes to either.
        made: DTensor = torch.ops.aten.alias.default(tensor)
        return made
    return DTensor._wrap(local, target)


def owned_grad(tensor: torch.Tensor) -> torch.Tensor:
    """A backward function's input as a contiguous tensor whose memory nobody else has: itself, or a copy.

    Autograd keeps a gradient that nobody else holds as the ``grad`` of a leaf, and later adds to it in place. It counts
    the holders of a tensor, and not those of another one with the same memory, as a DTensor and its shard have.
    """
    is_alone = tensor.is_contiguous() and is_held_once(tensor)
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)


def redistribute_grad(grad: torch.Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> DTensor:
    """A gradient with some placements: itself if it has them, so that autograd knows who else holds it.

    The gradient is plain, and counts as replicated, if the tensor was written to a plain one, as a buffer.
    """
    if not isinstance(grad, DTensor):
        check_plain("the gradient", grad, mesh, is_temporary=False, is_overwritten=False)
        grad = DTensor.from_local(owned_grad(grad), mesh, [Replicate()] * mesh.ndim, shape=grad.shape)
    return grad if grad.placements == placements else grad.redistribute(placements)


class _Redistribute(torch.autograd.Function):
    """`DTensor.redistribute`, which changes no values; nor does its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, target: DTensorSpec) -> DTensor:
        ctx.placements, ctx.mesh = tensor._spec.without_partial.placements, tensor._spec.mesh
        return _redistribute(tensor, target)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return redistribute_grad(grads[0], ctx.placements, ctx.mesh), None


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local`."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.spec, ctx.grad_placements = tensor._spec, grad_placements
        return tensor._local.view_as(tensor._local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[DTensor, None]:
        spec: DTensorSpec = ctx.spec
        grad = owned_grad(grads[0])
        is_checked = spec.placements == ctx.grad_placements and spec.dtype is grad.dtype
        if is_checked and not torch.is_grad_enabled():
            return DTensor._wrap(grad.resolve_conj().resolve_neg(), spec), None
        return DTensor.from_local(grad, spec.mesh, ctx.grad_placements, shape=spec.shape), None


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return DTensor._wrap(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        spec: DTensorSpec = ctx.spec
        whole: Any = redistribute_grad(grads[0], spec.without_partial.placements, spec.mesh)
        # For gradients of gradients: each rank has used the gradient for its part of a sum.
        parts = [Partial() if isinstance(one, Partial) else one for one in spec.placements]
        local = whole.to_local(grad_placements=parts)
        for placement, num_ranks in zip(spec.placements, spec.mesh.shape, strict=True):
            if isinstance(placement, Partial):
                if placement.op not in (ReduceOp.SUM, ReduceOp.MEAN):
                    raise RuntimeError(
                        f"the shards of {placement} have no gradient: reduce them with fd.allreduce, which has one"
                    )
                local = local / num_ranks if placement.op is ReduceOp.MEAN else local
        return local, None


@outside_of_compiler
def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`DTensor.from_local` of a shard that is known to fit a spec. Differentiable."""
    made: DTensor = _FromLocal.apply(local, spec)  # type: ignore[no-untyped-call]
    return made


def is_placed(tensor: DTensor, placement: Placement) -> bool:
    """Return whether a tensor has a placement, given as users give it, along the axis of its mesh."""
    return tensor._spec.resolve(placement) is tensor._spec


class _GradPlacementHook:
    """The hook of `keep_grad_placements` and `reduce_grad_once`."""

    def __init__(self, tensor: DTensor) -> None:
        self._placements, self._mesh = tensor._spec.without_partial.placements, tensor.mesh

    def __call__(self, grad: Any) -> Any:
        if grad is None:  # a compiled backward's, of a parameter that the loss does not depend on
            return None
        return redistribute_grad(grad, self._placements, self._mesh)


def keep_grad_placements(parameter: torch.Tensor) -> None:
    """Redistribute each backward's gradient of a parameter to the parameter's placements; once is enough.

    Gradients are right under any placements; but a partial one would be reduced anew by each operator that reads it.
    """
    assert isinstance(parameter, DTensor), "others have no placements"
    if parameter.is_floating_point() or parameter.is_complex():
        # Frozen parameters may be trained later, and only those that require grad take a hook.
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        reduce_grad_once(parameter)
        parameter.requires_grad_(requires_grad)


@outside_of_compiler
def reduce_grad_once(tensor: DTensor) -> None:
    """Redistribute the sum of a tensor's gradients to the tensor's placements.

    A `redistribute` for each of several layers that take the tensor would reduce the gradient of each by itself.
    """
    if not any(map(is_grad_placement_hook, backward_hooks(tensor).values())):
        tensor.register_hook(_GradPlacementHook(tensor))  # type: ignore[no-untyped-call]


def is_grad_placement_hook(hook: object) -> bool:
    """Return whether a parameter's hook is one of `keep_grad_placements`."""
    return isinstance(hook, _GradPlacementHook)
