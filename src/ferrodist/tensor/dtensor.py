"""A tensor that is one to the program and lies in parts over a mesh.

Gradients of parts that become parts of gradients, in memory of their own.

Autograd keeps a gradient that nobody else holds as the ``grad`` of a leaf, and later adds to it in place. It counts who
holds a tensor, and not who holds another one around the same memory, as a distributed tensor and its part are.

Gradients of distributed parameters, brought to lie as the parameters do.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.collectives.arguments import check_layout
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.facts import dtype_text, read_facts
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp, check_dtype
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.tensor.copied_views import (
    VIEW_COPIES,
    ViewCopy,
    ViewKind,
    actual_kind,
    after_write,
    describe_stale,
    track,
)
from ferrodist.tensor.dispatch import CachedDispatch, DispatchKind, cache_key, dispatch, dispatch_foreach
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.plain_tensors import check_plain
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.redistribute_plan import RedistributePlan, make_plan
from ferrodist.tensor.spec import DTensorSpec, check_placements, local_sizes
from ferrodist.torch_private.autograd import backward_hooks, current_graph_task
from ferrodist.torch_private.tensors import base_data, call_plain, is_held_once, make_wrapper
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement


def owned_grad(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient that a backward function was given, or a copy if others may have its memory. Contiguous."""
    is_alone = tensor.is_contiguous() and is_held_once(tensor)
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)


# A member of an enum takes longer to look up than a name.
_ANY, _IN_PLACE, _LISTS, _RESULT, _VIEW = (
    DispatchKind.ANY,
    DispatchKind.IN_PLACE,
    DispatchKind.LISTS,
    DispatchKind.RESULT,
    DispatchKind.VIEW,
)
_SHARED = ViewKind.SHARED


class DTensor(torch.Tensor):
    """A tensor over a mesh, of which each rank has its part.

    Operators take and give whole tensors, as far as the program sees: every rank of the mesh calls them, in the same
    order, and each computes its part. Where the parts lie otherwise than an operator needs, they are moved. Autograd
    goes through all of it, and gradients are DTensors too.

    Made by `distribute`, by `DTensor.from_local`, and by operators on others.
    """

    __slots__ = ("_local", "_spec")

    _spec: DTensorSpec
    _local: torch.Tensor
    _view_copy: ViewCopy | None = None
    """Of a view whose part has memory of its own: see `copied_views`."""

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
        """A view of another, that starts ``offset`` elements further in the memory of the whole tensor."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # As a plain tensor's, it is one that autograd knows too.
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
            track(made, base._view_copy if kind is _SHARED else ViewCopy.of(base, local, kind))  # type: ignore[arg-type]
        return made

    @staticmethod
    def _wrap_results(cached: CachedDispatch, result: Any, base: DTensor) -> Any:
        """What a recipe of `DispatchKind.VIEW` or `DispatchKind.SEVERAL` gives, from what its local computation
        does.
        """
        if cached.kind is _VIEW:
            is_view = not cached.may_copy or (cached.local is torch.reshape and base._local.is_contiguous())
            kind = _SHARED if is_view else actual_kind(cached.view_kind, result, base._local)
            output: Any = cached.output
            return DTensor._wrap_view(result, output, base, cached.offset, kind)
        outputs = iter(cached.outputs)
        return tuple([None if one is None else DTensor._wrap(one, next(outputs)) for one in result])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # noqa: C901, PLR0912 - calls would take longer than what they do
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator on this rank's parts."""
        # As `part_of_key` has it, without the calls.
        key: list[Any] = [id(func)]
        spec = None
        for value in args:
            kind = type(value)
            if kind is DTensor:
                spec = value._spec
                key.append(spec)
            elif kind is int or value is None:
                key.append(value)
            elif kind is list and value and type(value[0]) is DTensor:
                spec = value[0]._spec
                key.append(tuple([one._spec if type(one) is DTensor else cache_key(one, DTensor) for one in value]))
            else:
                key.append(cache_key(value, DTensor))
        if kwargs:
            for name, value in kwargs.items():
                key += (name, cache_key(value, DTensor))
        if spec is not None:
            cached = spec.dispatch_cache.get(tuple(key))
            if (
                type(cached) is CachedDispatch
                and (dispatch_kind := cached.kind) is not _ANY
                and not (dispatch_kind is _IN_PLACE and args[0]._view_copy is not None)
            ):
                if dispatch_kind is _LISTS:
                    return dispatch_foreach(cached, func, args, kwargs or {}, DTensor)
                local = [value._local if type(value) is DTensor else value for value in args]
                for place, value in cached.positions:
                    local[place] = value
                result = cached.local(*local, **kwargs) if kwargs else cached.local(*local)
                if dispatch_kind is _RESULT:
                    output: Any = cached.output
                    made: DTensor = make_wrapper(DTensor, *output.wrapper_arguments)
                    made._local, made._spec = result, output
                    return made
                if dispatch_kind is _IN_PLACE:
                    if VIEW_COPIES:
                        after_write(args[0])
                    return args[0]
                return DTensor._wrap_results(cached, result, args[0])
        value = None  # `plain` counts who has an argument
        return dispatch(func, args, kwargs or {}, DTensor, key)

    @staticmethod
    def from_local(
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Placement | Sequence[Placement],
        *,
        shape: Sequence[int] | None = None,
    ) -> DTensor:
        """The tensor of which each rank has a part; every rank of the mesh calls this. Differentiable.

        Args:
            local: This rank's part, which the result shares memory with, unless it is a conjugate view.
            mesh: The mesh.
            placements: How the parts lie, for each axis of the mesh; one placement for a mesh of one axis.
            shape: Of the whole tensor. None learns it from the ranks' parts, in one agreement, which also checks that
                they fit together: that of ranks that divide a dim the first ones have one more where it doesn't divide
                evenly, and all else agrees. With a shape each rank checks its own part, and nothing is sent.

        Raises:
            TypeError: ``local`` is no plain tensor, or quantized; without ``shape`` also: of a dtype that collectives
                don't carry.
            UnsupportedOpError: ``local`` is nested, sparse or on a GPU.
            ValueError, IndexError: ``placements`` don't fit the mesh or the tensor.
            CollectiveMismatchError: On all ranks: the parts don't make a tensor.
            InvalidRankError: This rank is not in the mesh.
        """
        _check_plain(local, "from_local")
        check_layout(local, "local")
        if shape is None or local.is_quantized:
            check_dtype(local.dtype)
        if local.is_cuda:
            raise UnsupportedOpError(
                f"this rank's part is on {local.device}: distributed tensors are on the CPU, pass part.cpu()"
            )
        if shape is None:
            checked = check_placements(mesh, placements, local.shape)
            whole = _agree_on_shape(local, mesh, checked)
        else:
            whole = tuple(shape)
            checked = check_placements(mesh, placements, whole)
        checked = check_placements(mesh, checked, whole)
        spec = DTensorSpec.make(mesh, checked, whole, local.dtype)
        if tuple(local.shape) != spec.local_shape:
            raise ValueError(
                f"this rank's part of a tensor of shape {whole}, placed as {list(checked)}, has shape"
                f" {spec.local_shape}, not {tuple(local.shape)}"
            )
        # Operators on parts would not heed marks of what is still to be done with the elements.
        made: DTensor = _FromLocal.apply(local.resolve_conj().resolve_neg(), spec)  # type: ignore[no-untyped-call]
        return made

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that it lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies along each axis of the mesh."""
        return self._spec.placements

    def to_local(self, *, grad_placements: Placement | Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, with which it shares memory. Differentiable.

        Autograd does not see what is written to the part when the whole is used in backward: write to a clone.

        Args:
            grad_placements: How the ranks' gradients of their parts make the gradient of the whole. None is as the
                parts do; of a partial tensor, that every rank has the whole gradient.
        """
        given = _gradient_placements(self._spec, grad_placements)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local
        local: torch.Tensor = _ToLocal.apply(self, given)  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, grad_placements: Placement | Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh, all of which call this. Differentiable."""
        whole = self.redistribute([Replicate()] * self.mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(self, placements: Placement | Sequence[Placement]) -> DTensor:
        """The same tensor placed otherwise, by the fewest bytes; every rank of the mesh calls this. Differentiable.

        The gradient comes back as this tensor lies, a partial one's whole on every rank.

        Args:
            placements: The new placements, for each axis of the mesh.

        Returns:
            A tensor that shares memory with this one where nothing changes.
        """
        target = self._spec.with_placements(check_placements(self.mesh, placements, self.shape))
        if not (self.requires_grad and torch.is_grad_enabled()):
            return _redistribute(self, target)
        made: DTensor = _Redistribute.apply(self, target)  # type: ignore[no-untyped-call]
        return made

    def plan(self, placements: Placement | Sequence[Placement]) -> RedistributePlan:
        """What `redistribute` would do; print it to see the collectives and their bytes."""
        return make_plan(self._spec, self._spec.with_placements(check_placements(self.mesh, placements, self.shape)))

    @property
    def data(self) -> DTensor:
        """The tensor without its history, which shares memory with it; it can be set to another DTensor."""
        made = DTensor._wrap(self._local, self._spec)
        if self._view_copy is not None:
            track(made, self._view_copy)
        return made

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise TypeError(
                f"the data of a DTensor is a DTensor, not {with_article(type(value).__name__)}: distribute it"
                " first, as by"
                " fd.distribute(tensor, mesh, placements)"
            )
        base_data.__set__(self, value)
        self._local, self._spec, self._view_copy = value._local, value._spec, None
        if value._view_copy is not None:
            track(self, value._view_copy)

    def _give_up(self) -> None:
        """Have every later use raise: the tensor that this is a view of was written, and the view's part wasn't."""
        del self._local

    def __getattr__(self, name: str) -> Any:
        # Only where there is none.
        if name == "_local":
            raise RuntimeError(describe_stale(self._spec))  # no TypeError, of which operators as + make their own
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def tolist(self) -> Any:
        """Refuse: each rank has a part."""
        raise _no_plain_data("tolist")

    def share_memory_(self) -> DTensor:
        """Refuse: the memory is that of the parts."""
        raise _no_plain_data("share_memory_")

    def apply_(self, function: Any) -> DTensor:
        """Refuse: each rank has a part."""
        del function
        raise _no_plain_data("apply_")

    def untyped_storage(self) -> Any:
        """Refuse: the memory is that of the parts."""
        raise _no_plain_data("untyped_storage")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise _no_plain_data("__dlpack__")

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse: each rank has a part."""
        del force
        raise _no_plain_data("numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _no_plain_data("numpy")

    def __format__(self, spec: str) -> str:
        """Format the number of a tensor without dims, on every rank of the mesh; without a spec nothing is sent."""
        return format(self.item(), spec) if spec and not self.dim() else format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A tensor of the same layout with elements of its own."""
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
        for hook in backward_hooks(self).values():
            if getattr(hook, "is_of_layout", False):
                made.requires_grad_(True)
                made.register_hook(hook)  # type: ignore[no-untyped-call]
                made.requires_grad_(self.requires_grad)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        is_stale = self._view_copy is not None and self._view_copy.is_stale
        return f"DTensor({self._spec}, {'out of date' if is_stale else f'local={self._local}'})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a part without its mesh is not the tensor."""
        raise TypeError("a DTensor is not pickled: save its to_local() or full_tensor()")


_WRITES = {
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ipow": "pow_",
    "iand": "bitwise_and_",
    "ior": "bitwise_or_",
    "ixor": "bitwise_xor_",
    "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_",
}
"""Methods for operators that write. torch's own take a TypeError, as `UnsupportedOpError` is, for "try another way":
then Python makes ``x = x + y`` of ``x += y``, and the tensor is as it was."""

for _operator, _method in _WRITES.items():
    setattr(DTensor, f"__{_operator}__", getattr(torch.Tensor, _method))


def _no_plain_data(name: str) -> TypeError:
    return TypeError(f"{name}() of a DTensor, of which each rank has a part: call it on full_tensor() or to_local()")


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        raise TypeError(f"{name} takes a plain torch.Tensor, not {type(tensor).__name__}")


_MAX_DIMS = 8
_PART = struct.Struct(f"<BB{_MAX_DIMS}q8s")  # dtype's place in DTYPES, dims, shape, digest of the placements


def _agree_on_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The shape of the tensor that the ranks' parts make; the same error on all ranks where they make none."""
    if local.dim() > _MAX_DIMS:
        raise ValueError(f"from_local takes tensors of at most {_MAX_DIMS} dims without shape=, not {local.dim()}")
    group = mesh.group
    engine = host_engine_of(group)
    shape = [*local.shape, *[0] * (_MAX_DIMS - local.dim())]
    # The text is for messages, as far as there is room for it.
    text = repr(list(placements)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    head = _PART.pack(DTYPES.index(local.dtype), local.dim(), *shape, digest)
    payload = head + text[: MAX_PAYLOAD - len(head)]
    payloads = engine.share("from_local", payload, timeout=group.timeout, sequence=engine.reserve())
    said = read_facts(_PART, payloads, group, "from_local")
    shapes = [tuple(sizes[:num_dims]) for _, num_dims, *sizes, _ in said]
    for rank, (dtype, num_dims, *_, kind) in enumerate(said):
        if (dtype, num_dims, kind) != (*said[0][:2], said[0][-1]):
            raise CollectiveMismatchError(
                "the ranks' parts don't make a tensor: "
                + " and ".join(
                    f"rank {mesh.ranks[at]} has torch.{dtype_text(said[at][0])} of shape {shapes[at]},"
                    f" placed as {payloads[at][_PART.size :].decode(errors='replace')}"
                    for at in (0, rank)
                ),
                ranks=(mesh.ranks[rank],),
            )
    whole = []
    for dim in range(local.dim()):
        sharding_axes = [isinstance(one, Shard) and one.dim == dim for one in placements]
        whole.append(
            sum(
                shape[dim]
                for rank, shape in zip(mesh.ranks, shapes, strict=True)
                if all(divides or not at for divides, at in zip(sharding_axes, mesh.coords(rank), strict=True))
            )
        )
    for rank, mine in zip(mesh.ranks, shapes, strict=True):
        expected = tuple(local_sizes(whole, placements, mesh.shape, mesh.coords(rank)))
        if mine != expected:
            raise CollectiveMismatchError(
                f"the ranks' parts don't make a tensor: they have {tuple(whole)} together, of which, placed as"
                f" {list(placements)}, rank {rank} has a part of shape {expected}, not {mine}",
                ranks=(rank,),
            )
    return tuple(whole)


def _gradient_placements(spec: DTensorSpec, given: Placement | Sequence[Placement] | None) -> tuple[Placement, ...]:
    if given is None:
        return _of_gradient(spec)
    return check_placements(spec.mesh, given, spec.shape)


def _of_gradient(spec: DTensorSpec) -> tuple[Placement, ...]:
    """How the gradient of a tensor lies: as the tensor, but whole where that is partial."""
    return tuple(Replicate() if isinstance(one, Partial) else one for one in spec.placements)


def _redistribute(tensor: DTensor, target: DTensorSpec) -> DTensor:
    local = redistribute_local(tensor._local, tensor._spec, target)
    if local is tensor._local:
        # A view for autograd too, which then knows of what is written to either.
        made: DTensor = torch.ops.aten.alias.default(tensor)
        return made
    return DTensor._wrap(local, target)


def _placed(grad: torch.Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> DTensor:
    """A gradient where it shall lie: itself if it does, so that autograd knows who else has it.

    It is plain where the tensor was written to a plain one, as to a buffer of a model's code, and then whole.
    """
    if not isinstance(grad, DTensor):
        check_plain("the gradient", grad, mesh)
        grad = DTensor.from_local(owned_grad(grad), mesh, [Replicate()] * mesh.ndim, shape=grad.shape)
    return grad if grad.placements == placements else grad.redistribute(placements)


class _Redistribute(torch.autograd.Function):
    """`DTensor.redistribute`, which leaves the values as they are: so does its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, target: DTensorSpec) -> DTensor:
        ctx.placements, ctx.mesh = _of_gradient(tensor._spec), tensor._spec.mesh
        return _redistribute(tensor, target)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return _placed(grads[0], ctx.placements, ctx.mesh), None


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local`."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.spec, ctx.grad_placements = tensor._spec, grad_placements
        return tensor._local.view_as(tensor._local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[DTensor, None]:
        spec: DTensorSpec = ctx.spec
        return DTensor.from_local(owned_grad(grads[0]), spec.mesh, ctx.grad_placements, shape=spec.shape), None


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return DTensor._wrap(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        spec: DTensorSpec = ctx.spec
        local = _placed(grads[0], _of_gradient(spec), spec.mesh).to_local()
        for placement, num_ranks in zip(spec.placements, spec.mesh.shape, strict=True):
            if isinstance(placement, Partial):
                if placement.op not in (ReduceOp.SUM, ReduceOp.MEAN):
                    raise RuntimeError(
                        f"the parts of {placement} have no gradient: reduce them with fd.allreduce, which has one"
                    )
                local = local / num_ranks if placement.op is ReduceOp.MEAN else local
        return local, None


def keep_grad_placements(parameter: torch.Tensor) -> None:
    """Have each backward's gradient of a parameter lie as the parameter does; once is enough.

    A gradient is right however it lies; but one that is partial would be folded anew by each operator that reads it.
    """
    assert isinstance(parameter, DTensor), "others have nothing to place"
    has_it = any(map(is_grad_placement_hook, backward_hooks(parameter).values()))
    if not has_it and (parameter.is_floating_point() or parameter.is_complex()):
        # Those that are frozen now may be trained later, and only such as are take a hook.
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_hook(_Place(parameter))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(wanted)


def is_grad_placement_hook(hook: object) -> bool:
    """Whether a hook of a parameter is one that `keep_grad_placements` made."""
    return isinstance(hook, _Place)


class _Place:
    is_copied_with_tensor = True
    """Copies of the parameter have it too, though torch copies no hooks: they lie as the parameter does."""

    def __init__(self, parameter: DTensor) -> None:
        self._placements = parameter.placements

    def __call__(self, grad: Any) -> Any:
        return grad if grad.placements == self._placements else grad.redistribute(self._placements)
