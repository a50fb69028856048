"""Tensor classes of local shards, through which all uses of them go: norms and totals are those of the full tensors.

[Note: shards in torch's functions]
Optimizers step on shards element by element, and need not know. But `torch.nn.utils.clip_grad_norm_`, and programs that
add up norms themselves, would take a shard for a full gradient, and each rank would scale by another factor. So shards
have a class of their own, `FlatShardParameter`, a program sees their gradients as `FlatShardTensor`, and both override
torch's functions: norms and totals are those of the full tensor, the same on all ranks, by an allreduce; functions that
need rows or columns of the full tensor raise an error; all others compute with this rank's elements. A shard that is
cast, reshaped or concatenated stays a shard, and so does a result computed element by element from tensors that are
sharded alike. Results that involve plain tensors are plain, and so are tensors that torch creates anew, as most of an
optimizer's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import linalg
from torch.autograd.graph import increment_version
from torch.nn import functional

from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError, add_error_context
from ferrodist.parallel.fsdp.dtensor_params import count_replicas
from ferrodist.torch_private.tensors import accept_in_foreach, call_plain, plain_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.tensor.spec import DTensorSpec

_grad: Any = torch.Tensor.grad


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """Groups whose ranks together have each element of a tensor, ``num_copies`` times."""

    groups: tuple[Backend, ...]
    num_copies: int

    def reduce(self, own: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduce a number over all ranks; every rank calls this.

        The value is the global one, and the gradient that of this rank's term: every rank adds the same loss.
        """
        total = own.detach()
        if op is ReduceOp.SUM:
            total = total / self.num_copies
        with add_error_context(
            lambda: f"Rank {self.groups[-1].rank} asked for a norm or total of tensors that FSDP shards.",
            "Every rank must ask for it, as in clip_grad_norm_().",
        ):
            for group in self.groups:
                total = allreduce(total, op, group=group)
        if not own.requires_grad:
            return total
        if op is ReduceOp.SUM:
            return total + (own - own.detach())  # adds 0, with the gradient of own
        return torch.where(own.detach() == total, own, total)


def shard_groups_of(axes: ShardAxes, spec: DTensorSpec | None) -> ShardGroups | None:
    """The groups of a parameter, sharded by FSDP and over the mesh of its DTensor; None if each rank has all of it."""
    groups, num_copies = [], 1
    if spec is not None and spec.mesh.size > 1:
        groups, num_copies = [spec.mesh.group], count_replicas(spec)
    if axes.shard is not None:
        groups.append(axes.shard)
    return ShardGroups(groups=tuple(groups), num_copies=num_copies) if groups else None


class FlatShardTensor(torch.Tensor):
    """This rank's elements of a sharded tensor; see [Note: shards in torch's functions]."""

    shard_groups: ShardGroups | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _models_in_forward and func not in _METADATA:
            _check_not_in_forward(func, args, kwargs or {})
        special = _SPECIAL.get(func)
        if special is None:
            result = call_plain(func, types, args, kwargs or {})
            return _propagate(result, args, kwargs or {}) if func in _BY_ELEMENT else result
        with plain_functions():
            return special(func, *args, **(kwargs or {}))

    def __matmul__(self, _other: object) -> NoReturn:
        """Raise UnsupportedOpError, since Python would try the other operand after a TypeError."""
        _refuse(torch.matmul)

    __rmatmul__ = __matmul__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, since groups belong to this process."""
        return to_plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy as a plain tensor."""
        memo[id(self)] = copied = to_plain(self).clone()
        return copied


class FlatShardParameter(torch.nn.Parameter):
    """This rank's shard of a parameter; see [Note: shards in torch's functions]."""

    shard_groups: ShardGroups | None = None
    title: str = ""  # the parameter's name in messages
    model: object = None  # the argument of `forbid_shards` for its model
    __torch_function__ = FlatShardTensor.__torch_function__

    @property
    def grad(self) -> torch.Tensor | None:
        """The shard's gradient, as a `FlatShardTensor`, whoever has set it."""
        with plain_functions():
            found: torch.Tensor | None = _grad.__get__(self)
        if type(found) is torch.Tensor and self.shard_groups is not None:
            found = _as_shard(found, self.shard_groups)
            _set_grad(self, found)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        _set_grad(self, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return self._as_parameter().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy as a plain parameter."""
        memo[id(self)] = copied = self._as_parameter(copies=True)
        return copied

    def _as_parameter(self, *, copies: bool = False) -> torch.nn.Parameter:
        value = to_plain(self)
        return torch.nn.Parameter(value.clone() if copies else value, requires_grad=self.requires_grad)


def _set_grad(shard: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with plain_functions():
        _grad.__set__(shard, gradient)


def convert_to_shard(parameter: torch.nn.Parameter, groups: ShardGroups) -> None:
    """Turn a parameter into a shard, in place. Parameters of subclasses keep their class."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = FlatShardParameter
    accept_in_foreach(("optimizer", FlatShardParameter), ("foreach", FlatShardTensor))  # as torch's DTensor does
    if isinstance(parameter, FlatShardParameter):
        parameter.shard_groups = groups


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a plain tensor."""
    with plain_functions():
        return tensor.detach()


def _as_shard(tensor: torch.Tensor, groups: ShardGroups) -> FlatShardTensor:
    with plain_functions():
        shard = tensor.as_subclass(FlatShardTensor)
    shard.shard_groups = groups
    return shard


def _groups_of(value: object) -> ShardGroups | None:
    return value.shard_groups if isinstance(value, (FlatShardTensor, FlatShardParameter)) else None


# Modules have full parameters during their own calls, and shards during those of others.

_models_in_forward: dict[int, list[object]] = {}  # for each thread the models whose forwards it is in


def forbid_shards(model: object) -> None:
    """Refuse shards of a model in its modules' code, in this thread, until `allow_shards`."""
    _models_in_forward.setdefault(get_ident(), []).append(model)


def allow_shards(model: object) -> None:
    """End the refusal of `forbid_shards`."""
    models = _models_in_forward.get(get_ident(), [])
    if model in models:
        models.remove(model)
    if not models:
        _models_in_forward.pop(get_ident(), None)


def _check_not_in_forward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a shard that a module uses as its parameter; scaling a shard in place is allowed."""
    models = _models_in_forward.get(get_ident())
    if models is None:
        return
    found = [
        each
        for value in (*args, *kwargs.values())
        for each in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(each, torch.Tensor)
    ]
    name = getattr(func, "__name__", "")
    is_scaling = len(found) == 1 and name.endswith("_") and not name.endswith("__")
    for shard in found:
        if isinstance(shard, FlatShardParameter) and shard.model in models and not is_scaling:
            what = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else f"{name}()"
            raise RuntimeError(
                f"{shard.title} was used ({what}) outside of its module's call, while this rank has only a shard of it:"
                " let wrap= make one unit of that module and of the one that uses the parameter, or return the needed"
                " values from that module's forward"
            )


# Results that stay shards.


def _preserve(func: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose result has the elements of its argument, in some form."""
    result = func(source, *args, **kwargs)
    sources = source if isinstance(source, (tuple, list)) else (source,)
    found_groups = {_groups_of(each) for each in sources}
    groups = found_groups.pop()
    if groups is None or found_groups or type(result) is not torch.Tensor:
        return result
    return _as_shard(result, groups)


def _propagate(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a result of an elementwise function a shard if all its sources are sharded alike, apart from numbers."""
    sources = (*args, *kwargs.values())
    if not isinstance(result, (tuple, list)):
        return _propagate_one(result, sources)
    lists = [value for value in sources if isinstance(value, (tuple, list))]
    others = [value for value in sources if isinstance(value, torch.Tensor)]
    return type(result)(_propagate_one(one, (*others, *parts)) for one, *parts in zip(result, *lists, strict=True))


def _propagate_one(result: Any, sources: Sequence[Any]) -> Any:
    if type(result) is not torch.Tensor:  # an in-place result keeps its class
        return result
    found_groups = {_groups_of(source) for source in sources if isinstance(source, torch.Tensor) and source.dim()}
    groups = found_groups.pop() if len(found_groups) == 1 else None
    return result if groups is None else _as_shard(result, groups)


# Reductions of all elements.


def _norm(func: Callable[..., Any], source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _groups_of(source) is None:
        return func(source, *args, **kwargs)
    options = dict(zip(("order", "dim", "keepdim"), args, strict=False)) | kwargs
    dtype = options.pop("dtype", None)
    order = options.pop("order", options.pop("ord", options.pop("p", None)))
    is_of_matrix = func is linalg.norm and order is not None and source.ndim > 1
    order = 2 if order in {None, "fro"} else order
    if is_of_matrix or isinstance(order, str) or any(_is_given(option) for option in options.values()):
        _refuse(func)
    return _norms([source], float(order), dtype)[0]


def _foreach_norm(func: Callable[..., Any], tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    order = float(kwargs.get("ord", args[0] if args else 2))
    dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    norms = iter(_norms([each for each in tensors if _groups_of(each) is not None], order, dtype))
    others = [each for each in tensors if _groups_of(each) is None]
    plain_norms = iter(func(others, *args, **kwargs) if others else ())
    return tuple(next(plain_norms if _groups_of(each) is None else norms) for each in tensors)


def _norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of full tensors, by one allreduce for those that are sharded alike."""
    members: dict[ShardGroups, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups = _groups_of(tensor)
        assert groups is not None
        members.setdefault(groups, []).append(index)
    results = list(tensors)
    op = {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(order, ReduceOp.SUM)
    for groups, indices in members.items():
        folded = groups.reduce(torch.stack([_power(tensors[index], order) for index in indices]), op)
        if order and not math.isinf(order):  # the gradient of a norm that is 0 is 0
            folded = torch.where(folded == 0, 0.0, torch.where(folded == 0, 1.0, folded) ** (1 / order))
        for index, norm in zip(indices, folded, strict=True):
            results[index] = norm.to(dtype or tensors[index].dtype.to_real())
    return results


def _power(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """A rank's contribution to a norm, which is added up over the ranks, or the largest or smallest of which counts."""
    if not tensor.numel():
        return tensor.new_full((), math.inf if order == -math.inf else 0.0, dtype=torch.float64)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    norm: torch.Tensor = linalg.vector_norm(tensor, order, dtype=wide).to(torch.float64)
    return norm**order if order and not math.isinf(order) else norm


def _reduce(func: Callable[..., Any], source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a reduction of all elements: sum, mean, max, min, any, all, count_nonzero."""
    groups = _groups_of(source)
    # The max or min of two tensors is elementwise.
    is_of_two = any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values()))
    if groups is None or is_of_two:
        return func(source, *args, **kwargs)
    options = dict(kwargs)
    dtype = options.pop("dtype", None)
    if any(_is_given(option) for option in (*args, *options.values())):
        _refuse(func)
    wide = torch.complex128 if source.is_complex() else torch.float64
    name: str = func.__name__
    values = source != 0 if name in {"any", "all", "count_nonzero"} else source
    if name in _EXTREMES:
        op, empty = _EXTREMES[name]
        own = values.to(wide)
        own = own.new_tensor(empty) if not own.numel() else own.max() if op is ReduceOp.MAX else own.min()
        whole = groups.reduce(own, op)
    else:
        own = values.sum(dtype=wide)
        whole, count = groups.reduce(torch.stack([own, own.new_tensor(values.numel())]), ReduceOp.SUM)
        whole = whole / count if name == "mean" else whole
    if dtype is None:
        is_whole_number = name == "sum" and not (source.dtype.is_floating_point or source.dtype.is_complex)
        dtype = torch.int64 if is_whole_number or name == "count_nonzero" else source.dtype
        dtype = torch.bool if name in {"any", "all"} else dtype
    return whole.to(dtype)


_EXTREMES = {
    **dict.fromkeys(("max", "amax"), (ReduceOp.MAX, -math.inf)),
    **dict.fromkeys(("min", "amin"), (ReduceOp.MIN, math.inf)),
    "any": (ReduceOp.MAX, 0.0),
    "all": (ReduceOp.MIN, 1.0),
}
"""The reduction over the ranks, and the contribution of a rank without elements."""


def _is_given(option: object) -> bool:
    """True if an argument is one that a reduction of all elements doesn't have: a dim, keepdim, out."""
    return isinstance(option, torch.Tensor) or not (option is None or option is False or option in ((), []))


def _fused_step(func: Callable[..., Any], shards: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Step a fused optimizer, and move the shards' version counters, by which FSDP notices changes."""
    result = func(shards, *args, **kwargs)
    increment_version([shard for shard in shards if isinstance(shard, FlatShardParameter)])
    return result


def _unscale(
    func: Callable[..., Any], gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor
) -> Any:
    """Let all ranks find an infinity in the shard of one, as `torch.amp.GradScaler` looks for it."""
    result = func(gradients, found, scale)
    found_groups = dict.fromkeys(map(_groups_of, gradients))
    for groups in found_groups:
        if groups is not None:
            found.copy_(groups.reduce(found.to(torch.float64), ReduceOp.MAX))
    return result


def _refuse(func: Callable[..., Any], *_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnsupportedOpError(
        f"{getattr(func, '__name__', func)}() needs rows, columns or the order of a whole tensor, of which this rank"
        " has only a shard, made by FSDP: use an optimizer that works element by element, or look at whole parameters"
        " inside summon_full_params(); this rank's shard by itself is shard.detach().numpy()"
    )


def _refuse_divided(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(_groups_of(each) is not None for each in (*args, *kwargs.values())):
        _refuse(func)
    return func(*args, **kwargs)


def _functions(owners: Sequence[object], names: str) -> list[Callable[..., Any]]:
    """Functions of torch by name, without names that this torch doesn't have."""
    return [getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)]


_LINALG_NORMS = (linalg.vector_norm, linalg.norm)

_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _functions(
            (torch, torch.Tensor),
            "detach view reshape flatten ravel contiguous squeeze unsqueeze t transpose lerp to type float double half"
            " bfloat16 cpu cuda abs absolute square pow __pow__ isfinite isnan isinf cat concat concatenate hstack",
        ),
        _preserve,
    ),
    **{form.__get__: _preserve for form in (torch.Tensor.data, torch.Tensor.T, torch.Tensor.mT)},  # type: ignore[attr-defined]
    **dict.fromkeys([*_LINALG_NORMS, torch.norm, torch.Tensor.norm], _norm),
    torch._foreach_norm: _foreach_norm,  # noqa: SLF001
    **dict.fromkeys(_functions((torch, torch.Tensor), "sum mean max min amax amin any all count_nonzero"), _reduce),
    **dict.fromkeys(
        [
            *_functions(
                (torch, torch.Tensor),
                "dot vdot inner matmul mm mv bmm addmm addmv std var std_mean var_mean median"
                " nanmedian quantile nanquantile prod argmax argmin logsumexp softmax log_softmax cumsum nansum"
                " nanmean aminmax dist renorm cumprod cummax cummin logcumsumexp sort argsort msort topk kthvalue histc"
                " einsum tensordot outer trace cosine_similarity _foreach_max _foreach_powsum",
            ),
            *_functions(
                (functional,), "normalize softmin mse_loss l1_loss smooth_l1_loss huber_loss cosine_similarity"
            ),
            *_functions((linalg,), "matrix_norm svd svdvals qr _powsum"),
        ],
        _refuse_divided,
    ),
    **dict.fromkeys(_functions((torch,), "_amp_foreach_non_finite_check_and_unscale_"), _unscale),
    **dict.fromkeys(_functions((torch,), "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"), _fused_step),
}
"""Overrides of torch's functions; all others compute with this rank's elements."""

_ARITHMETIC = (
    "add sub subtract rsub mul multiply div divide true_divide neg negative reciprocal sqrt rsqrt exp log sign sgn"
    " clamp clamp_min clamp_max clip maximum minimum addcmul addcdiv"
)

_BY_ELEMENT = frozenset(
    [
        *_functions((torch, torch.Tensor), _ARITHMETIC),
        *_functions((torch,), " ".join(f"_foreach_{name}" for name in f"{_ARITHMETIC} abs pow lerp".split())),
        *_functions(
            (torch, torch.Tensor),
            "clone positive conj real resolve_conj resolve_neg nan_to_num expm1 log1p log2 log10 tanh sigmoid relu"
            " softplus eq ne gt ge lt le where logical_not logical_and logical_or isclose masked_fill bitwise_not"
            " bitwise_and bitwise_or bool int long",
        ),
        *_functions(
            (torch.Tensor,),
            "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ __rpow__"
            " __eq__ __ne__ __gt__ __ge__ __lt__ __le__ __invert__ __and__ __or__",
        ),
        *_functions((functional,), "relu"),
    ]
)
"""Functions of torch that compute element by element; without indexing, which may select elements of one rank."""

_METADATA = frozenset(
    [
        *[
            form.__get__
            for form in _functions(
                (torch.Tensor,),
                "dtype device layout requires_grad grad grad_fn is_leaf _version is_cpu is_cuda is_meta is_sparse",
            )
        ],
        *_functions(
            (torch.Tensor, torch),
            "requires_grad_ data_ptr untyped_storage is_floating_point is_complex is_inference get_device __hash__",
        ),
    ]
)
"""Attributes and functions that a module may read of a parameter that it doesn't have in full."""
