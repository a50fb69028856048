"""Pieces that know that they are pieces: norms and totals of them are those of the whole tensors.

[Note: pieces among torch's functions]
Optimizers step on pieces element by element, and need not know. But `torch.nn.utils.clip_grad_norm_`, and whoever adds
up norms by hand, would take a piece for a whole gradient, and each rank would scale by another number. So pieces are of
a class of their own, `Piece`, their gradients are `DividedTensor` when a program looks at them, and torch asks both
what its functions give: of norms and totals what the whole tensor gives, on all ranks the same, by an allreduce; an
error for what needs rows or columns of the whole; for all else what torch makes of this rank's elements. What has been
cast, reshaped or joined, or is computed element by element of tensors that are divided alike, is still divided. What
plain tensors have a part in is plain, and so is what torch makes anew, as most of what optimizers keep.
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
from ferrodist.parallel.fsdp.dtensor_params import count_copies
from ferrodist.torch_private.tensors import accept_in_foreach, call_plain, plain_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.tensor.spec import DTensorSpec

_gradient: Any = torch.Tensor.grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who has the other elements of a tensor.

    Args:
        groups: All of them together have each element.
        num_copies: How many of their ranks have each.
    """

    groups: tuple[Backend, ...]
    num_copies: int

    def total(self, own: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Fold numbers of all ranks; every rank calls this.

        Args:
            own: This rank's, in float64 or complex128.
            op: How they are folded. In sums what several ranks have counts once.

        Returns:
            The same on all ranks. Its gradient is that of a loss that all ranks have: each piece gets its own.
        """
        total = own.detach()
        if op is ReduceOp.SUM:
            total = total / self.num_copies
        with add_error_context(
            lambda: f"Rank {self.groups[-1].rank} asked for a norm or total of tensors that FSDP divides.",
            "Every rank must ask for it, as for what clip_grad_norm_() needs.",
        ):
            for group in self.groups:
                total = allreduce(total, op, group=group)
        if not own.requires_grad:
            return total
        if op is ReduceOp.SUM:
            return total + (own - own.detach())
        return torch.where(own.detach() == total, own, total)


def division_of(axes: ShardAxes, layout: DTensorSpec | None) -> Division | None:
    """How a parameter is divided, by FSDP and over the mesh over which it lies; None where each rank has all of it."""
    groups, num_copies = [], 1
    if layout is not None and layout.mesh.size > 1:
        groups, num_copies = [layout.mesh.group], count_copies(layout)
    if axes.shard is not None:
        groups.append(axes.shard)
    return Division(groups=tuple(groups), num_copies=num_copies) if groups else None


class DividedTensor(torch.Tensor):
    """This rank's elements of a tensor that FSDP divides; see [Note: pieces among torch's functions]."""

    division: Division | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _computing and func not in _ABOUT_NO_ELEMENTS:
            _check_not_in_forward(func, args, kwargs or {})
        special = _SPECIAL.get(func)
        if special is None:
            result = call_plain(func, types, args, kwargs or {})
            return _follow(result, args, kwargs or {}) if func in _BY_ELEMENT else result
        with plain_functions():
            return special(func, *args, **(kwargs or {}))

    def __matmul__(self, _other: object) -> NoReturn:
        """Refused, by an error that Python does not take for that of another class."""
        _refuse(torch.matmul)

    __rmatmul__ = __matmul__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, for groups belong to this process."""
        return as_plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor."""
        memo[id(self)] = twin = as_plain(self).clone()
        return twin


class Piece(torch.nn.Parameter):
    """This rank's piece of a parameter; see [Note: pieces among torch's functions]."""

    division: Division | None = None
    title: str = ""
    """How messages call the parameter."""
    model: object = None
    """What `enter_forward` is called with while its model computes."""
    __torch_function__ = DividedTensor.__torch_function__

    @property
    def grad(self) -> torch.Tensor | None:
        """The piece's gradient, whoever has put it there."""
        found = _get_gradient(self)
        if type(found) is torch.Tensor and self.division is not None:
            found = _as_divided(found, self.division)
            _set_gradient(self, found)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        _set_gradient(self, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return self._as_parameter().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A plain parameter."""
        memo[id(self)] = twin = self._as_parameter(copies=True)
        return twin

    def _as_parameter(self, *, copies: bool = False) -> torch.nn.Parameter:
        value = as_plain(self)
        return torch.nn.Parameter(value.clone() if copies else value, requires_grad=self.requires_grad)


def _get_gradient(piece: torch.Tensor) -> torch.Tensor | None:
    with plain_functions():
        found: torch.Tensor | None = _gradient.__get__(piece)
        return found


def _set_gradient(piece: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with plain_functions():
        _gradient.__set__(piece, gradient)


def as_piece(parameter: torch.nn.Parameter, division: Division) -> None:
    """Have a parameter know that it is a piece now. Those of other classes than torch's own stay what they are."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = Piece
    accept_in_foreach(("optimizer", Piece), ("foreach", DividedTensor))  # as torch's DTensor does
    if isinstance(parameter, Piece):
        parameter.division = division


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, as a tensor that torch's functions take for what it is."""
    with plain_functions():
        return tensor.detach()


def _as_divided(tensor: torch.Tensor, division: Division) -> DividedTensor:
    with plain_functions():
        divided = tensor.as_subclass(DividedTensor)
    divided.division = division
    return divided


def _division_of(value: object) -> Division | None:
    return value.division if isinstance(value, (DividedTensor, Piece)) else None


# Forward, in which modules have whole parameters while they are called, and else pieces.

_computing: dict[int, list[object]] = {}
"""For each thread the models whose forwards it is in."""


def enter_forward(model: object) -> None:
    """Refuse pieces of a model to the code of its modules, in this thread, until `leave_forward`."""
    _computing.setdefault(get_ident(), []).append(model)


def leave_forward(model: object) -> None:
    """Take pieces for what they are again."""
    models = _computing.get(get_ident(), [])
    if model in models:
        models.remove(model)
    if not models:
        _computing.pop(get_ident(), None)


def _check_not_in_forward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a piece where a module takes it for its parameter; scaling one in place is right, piece by piece."""
    models = _computing.get(get_ident())
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
    for piece in found:
        if isinstance(piece, Piece) and piece.model in models and not is_scaling:
            what = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else f"{name}()"
            raise RuntimeError(
                f"{piece.title} was used ({what}) outside of its module's call, where this rank has a piece of it only:"
                " let wrap= make one unit of that module and of the one that uses the parameter, or return what is"
                " needed from that module's forward"
            )


# What stays divided.


def _keep(func: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose result has the elements of what it is given, in some form."""
    result = func(source, *args, **kwargs)
    sources = source if isinstance(source, (tuple, list)) else (source,)
    divisions = {_division_of(each) for each in sources}
    division = divisions.pop()
    if division is None or divisions or type(result) is not torch.Tensor:
        return result
    return _as_divided(result, division)


def _follow(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch computed element by element: divided where all that it is of is divided alike, numbers apart."""
    sources = (*args, *kwargs.values())
    if not isinstance(result, (tuple, list)):
        return _follow_one(result, sources)
    lists = [value for value in sources if isinstance(value, (tuple, list))]
    others = [value for value in sources if isinstance(value, torch.Tensor)]
    return type(result)(_follow_one(one, (*others, *parts)) for one, *parts in zip(result, *lists, strict=True))


def _follow_one(result: Any, sources: Sequence[Any]) -> Any:
    if type(result) is not torch.Tensor:  # what is written is what it was
        return result
    divisions = {_division_of(source) for source in sources if isinstance(source, torch.Tensor) and source.dim()}
    division = divisions.pop() if len(divisions) == 1 else None
    return result if division is None else _as_divided(result, division)


# What is asked of all elements.


def _norm(func: Callable[..., Any], source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _division_of(source) is None:
        return func(source, *args, **kwargs)
    options = dict(zip(("order", "dim", "keepdim"), args, strict=False)) | kwargs
    dtype = options.pop("dtype", None)
    order = options.pop("order", options.pop("ord", options.pop("p", None)))
    is_of_matrix = func is linalg.norm and order is not None and source.ndim > 1
    order = 2 if order in {None, "fro"} else order
    if is_of_matrix or isinstance(order, str) or any(_is_given(option) for option in options.values()):
        _refuse(func)
    return _find_norms([source], float(order), dtype)[0]


def _foreach_norm(func: Callable[..., Any], tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    order = float(kwargs.get("ord", args[0] if args else 2))
    dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    results: list[torch.Tensor | None] = [None] * len(tensors)
    divided = [place for place, each in enumerate(tensors) if _division_of(each) is not None]
    others = [place for place, each in enumerate(tensors) if _division_of(each) is None]
    for place, norm in zip(divided, _find_norms([tensors[place] for place in divided], order, dtype), strict=True):
        results[place] = norm
    if others:
        for place, norm in zip(others, func([tensors[place] for place in others], *args, **kwargs), strict=True):
            results[place] = norm
    return tuple(results)


def _find_norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of whole tensors, by one allreduce for those that are divided alike."""
    members: dict[Division, list[int]] = {}
    for place, tensor in enumerate(tensors):
        division = _division_of(tensor)
        assert division is not None
        members.setdefault(division, []).append(place)
    results = list(tensors)
    for division, places in members.items():
        folded = division.total(torch.stack([_power(tensors[place], order) for place in places]), _op_of_norm(order))
        if order and not math.isinf(order):  # the gradient of a norm that is 0 is 0
            folded = torch.where(folded == 0, 0.0, torch.where(folded == 0, 1.0, folded) ** (1 / order))
        for place, norm in zip(places, folded, strict=True):
            results[place] = norm.to(dtype or tensors[place].dtype.to_real())
    return results


def _op_of_norm(order: float) -> ReduceOp:
    return {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(order, ReduceOp.SUM)


def _power(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """What of a norm adds up over the ranks, or the largest or smallest of which counts."""
    if not tensor.numel():
        return tensor.new_full((), math.inf if order == -math.inf else 0.0, dtype=torch.float64)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    norm: torch.Tensor = linalg.vector_norm(tensor, order, dtype=wide).to(torch.float64)
    return norm**order if order and not math.isinf(order) else norm


def _total(func: Callable[..., Any], source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a reduction of all elements: sum, mean, the largest, the smallest, whether any, whether all, how many."""
    division = _division_of(source)
    is_of_two = any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values()))  # the larger of each pair
    if division is None or is_of_two:
        return func(source, *args, **kwargs)
    options = dict(kwargs)
    dtype = options.pop("dtype", None)
    if any(_is_given(option) for option in (*args, *options.values())):
        _refuse(func)
    values = source
    wide = torch.complex128 if values.is_complex() else torch.float64
    kind: str = func.__name__
    if kind in _EXTREMES:
        op, empty = _EXTREMES[kind]
        values = (values != 0) if kind in {"any", "all"} else values
        own = values.to(wide)
        own = own.new_tensor(empty) if not own.numel() else own.max() if op is ReduceOp.MAX else own.min()
        whole = division.total(own, op)
    else:
        own = (values != 0 if kind == "count_nonzero" else values).sum(dtype=wide)
        whole, count = division.total(torch.stack([own, own.new_tensor(values.numel())]), ReduceOp.SUM)
        whole = whole / count if kind == "mean" else whole
    return whole.to(dtype or _dtype_of_total(kind, source.dtype))


_EXTREMES = {
    **dict.fromkeys(("max", "amax"), (ReduceOp.MAX, -math.inf)),
    **dict.fromkeys(("min", "amin"), (ReduceOp.MIN, math.inf)),
    "any": (ReduceOp.MAX, 0.0),
    "all": (ReduceOp.MIN, 1.0),
}
"""How the ranks' results are folded, and what a rank without elements says."""


def _dtype_of_total(kind: str, dtype: torch.dtype) -> torch.dtype:
    if kind in {"any", "all"}:
        return torch.bool
    is_count = kind == "count_nonzero" or (kind == "sum" and not (dtype.is_floating_point or dtype.is_complex))
    return torch.int64 if is_count else dtype


def _is_given(option: object) -> bool:
    """Whether an argument is one that a reduction of all elements doesn't have: a dim, keepdim, out."""
    return isinstance(option, torch.Tensor) or not (option is None or option is False or option in ((), []))


def _step(func: Callable[..., Any], pieces: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Step a fused optimizer, and have the pieces' version counters see it, by which FSDP knows of changes."""
    result = func(pieces, *args, **kwargs)
    increment_version([piece for piece in pieces if isinstance(piece, Piece)])
    return result


def _unscale(
    func: Callable[..., Any], gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor
) -> Any:
    """Have all ranks find an infinity that is in the piece of one, as `torch.amp.GradScaler` looks for it."""
    result = func(gradients, found, scale)
    divisions = dict.fromkeys(map(_division_of, gradients))
    for division in divisions:
        if division is not None:
            found.copy_(division.total(found.to(torch.float64), ReduceOp.MAX))
    return result


def _refuse(func: Callable[..., Any], *_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnsupportedOpError(
        f"{getattr(func, '__name__', func)}() needs rows, columns or the order of a whole tensor, of which"
        " this rank has a piece, from FSDP: use an optimizer that works element by element, or look at whole parameters"
        " inside summon_full_params(); this rank's piece by itself is piece.detach().numpy()"
    )


def _refuse_divided(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(_division_of(each) is not None for each in (*args, *kwargs.values())):
        _refuse(func)
    return func(*args, **kwargs)


def _named(owners: Sequence[object], names: str) -> list[Callable[..., Any]]:
    """Functions of torch by name; the names that this torch doesn't have are left out."""
    return [getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)]


_LINALG_NORMS = (linalg.vector_norm, linalg.norm)

_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _named(
            (torch, torch.Tensor),
            "detach view reshape flatten ravel contiguous squeeze unsqueeze t transpose lerp to type float double half"
            " bfloat16 cpu cuda abs absolute square pow __pow__ isfinite isnan isinf cat concat concatenate hstack",
        ),
        _keep,
    ),
    **{form.__get__: _keep for form in (torch.Tensor.data, torch.Tensor.T, torch.Tensor.mT)},  # type: ignore[attr-defined]
    **dict.fromkeys([*_LINALG_NORMS, torch.norm, torch.Tensor.norm], _norm),
    torch._foreach_norm: _foreach_norm,  # noqa: SLF001
    **dict.fromkeys(
        _named((torch, torch.Tensor), "sum mean max min amax amin any all count_nonzero"),
        _total,
    ),
    **dict.fromkeys(
        [
            *_named(
                (torch, torch.Tensor),
                "dot vdot inner matmul mm mv bmm addmm addmv std var std_mean var_mean median"
                " nanmedian quantile nanquantile prod argmax argmin logsumexp softmax log_softmax cumsum nansum"
                " nanmean aminmax dist renorm cumprod cummax cummin logcumsumexp sort argsort msort topk kthvalue histc"
                " einsum tensordot outer trace cosine_similarity _foreach_max _foreach_powsum",
            ),
            *_named((functional,), "normalize softmin mse_loss l1_loss smooth_l1_loss huber_loss cosine_similarity"),
            *_named((linalg,), "matrix_norm svd svdvals qr _powsum"),
        ],
        _refuse_divided,
    ),
    **dict.fromkeys(_named((torch,), "_amp_foreach_non_finite_check_and_unscale_"), _unscale),
    **dict.fromkeys(_named((torch,), "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"), _step),
}
"""What torch's functions do with pieces; all others take this rank's elements for what they are given."""

_ARITHMETIC = (
    "add sub subtract rsub mul multiply div divide true_divide neg negative reciprocal sqrt rsqrt exp log sign sgn"
    " clamp clamp_min clamp_max clip maximum minimum addcmul addcdiv"
)

_BY_ELEMENT = frozenset(
    [
        *_named((torch, torch.Tensor), _ARITHMETIC),
        *_named((torch,), " ".join(f"_foreach_{name}" for name in f"{_ARITHMETIC} abs pow lerp".split())),
        *_named(
            (torch, torch.Tensor),
            "clone positive conj real resolve_conj resolve_neg nan_to_num expm1 log1p log2 log10 tanh sigmoid relu"
            " softplus eq ne gt ge lt le where logical_not logical_and logical_or isclose masked_fill bitwise_not"
            " bitwise_and bitwise_or bool int long",
        ),
        *_named(
            (torch.Tensor,),
            "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ __rpow__"
            " __eq__ __ne__ __gt__ __ge__ __lt__ __le__ __invert__ __and__ __or__",
        ),
        *_named((functional,), "relu"),
    ]
)
"""Functions of torch that compute each element of what is in its place. Indexing is none: it may choose on one rank."""

_ABOUT_NO_ELEMENTS = frozenset(
    [
        *[
            form.__get__
            for form in _named(
                (torch.Tensor,),
                "dtype device layout requires_grad grad grad_fn is_leaf _version is_cpu is_cuda is_meta is_sparse",
            )
        ],
        *_named(
            (torch.Tensor, torch),
            "requires_grad_ data_ptr untyped_storage is_floating_point is_complex is_inference get_device __hash__",
        ),
    ]
)
"""What a module may ask of a parameter that it doesn't have whole."""
