"""Batch normalisation over the batches of all ranks.

After S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015 (https://arxiv.org/abs/1502.03167). The ranks'
statistics are combined after T. Chan, G. Golub and R. LeVeque, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances", 1979: no rank adds squares of large numbers.

In training, for C channels, a forward is one all_gather of 2 C + 1 numbers a rank, a backward one allreduce of 2 C.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from ferrodist.arguments import check_type
from ferrodist.backends.non_member import check_group
from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.all_gather import all_gather
from ferrodist.collectives.reduce import allreduce
from ferrodist.errors import add_error_context
from ferrodist.torch_private.modules import BatchNormBase, check_input_dim, has_hooks, is_lazy_norm, own_modules
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_Module = TypeVar("_Module", bound=torch.nn.Module)

_ADVICE = (
    "In training every rank must call forward, and backward to the layer's input, as often as the others, if need be"
    " with an empty batch."
)


_DETAILS = """

    In training it computes the results of `torch.nn.BatchNorm1d` and its siblings on the ranks' joined batches:
    outputs, running statistics, and gradients of the inputs. The gradients of ``weight`` and ``bias`` are this rank's
    share; their sum over the ranks is the gradient of the joined batch (`DDP` averages all gradients, which fits a loss
    that is a mean over each rank's batch). Batches may differ in size, and some but not all of them may be empty.

    In evaluation nothing is sent, and a rank may call it alone: it uses the running statistics, or without any those of
    the rank's own batch.

    A copy keeps the group of its original; an unpickled layer has none, and uses the default group.

    Args:
        num_features: Number of channels C, from 1; inputs are (N, C) or (N, C, L), (N, C, H, W), (N, C, D, H, W).
        eps: Number added to the variance.
        momentum: Weight of a batch in the running statistics; None takes the mean of all batches so far.
        affine: Learn a weight and a bias for each channel.
        track_running_stats: Keep running statistics, for evaluation.
        group: The group; None is the default group when forward is called.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.

    Raises:
        ValueError: By forward, on every rank: in training all batches together have at most one value for each channel.
            On this rank: the input has another number of dims or channels.
        RuntimeError: By a second backward, through the layer's backward.
        DistributedError: Communication between the ranks failed.
    """


class _SyncBatchNorm(BatchNormBase):
    """Normalise each channel by its mean and variance over the batches of all ranks."""

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
        group: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_features < 1:
            raise ValueError(f"{type(self).__name__} takes num_features of at least 1, not {num_features}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._group = None if group is None else check_group(group)

    def __getstate__(self) -> dict[str, Any]:
        """The picklable state, without the group, which belongs to this process."""
        return {**self.__dict__, "_group": None}

    def __copy__(self) -> _SyncBatchNorm:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__dict__)  # type: ignore[no-untyped-call]
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _SyncBatchNorm:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        copied._group = self._group  # noqa: SLF001
        return copied

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise; in training every rank of the group calls it."""
        check_input_dim(self, input)
        if input.shape[1] != self.num_features:
            channels = counted(self.num_features, "channel")
            raise ValueError(f"{type(self).__name__} of {channels} got an input of {input.shape[1]}")
        group = resolve_group(self._group) if self.training else None
        if group is None:
            return super().forward(input)
        if group.world_size == 1:
            self._check_count(input.shape[0] * math.prod(input.shape[2:]))
            return super().forward(input)
        mean, variance, count = self._gather_statistics(input, group)
        self._check_count(count)
        if self.track_running_stats:
            self._update_running(mean, variance * (count / (count - 1)))
        return _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps, group)  # type: ignore[no-any-return, no-untyped-call]

    def _check_count(self, count: int) -> None:
        if count <= 1:
            raise ValueError(
                f"{type(self).__name__} in training needs more than one value a channel in the batches of all ranks"
                f" together, not {count}"
            )

    def _gather_statistics(self, batch: torch.Tensor, group: Backend) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Mean and variance of each channel over all ranks, in float64, and the number of values."""
        statistics = torch.zeros(2 * self.num_features + 1, dtype=torch.float64, device=batch.device)
        num_values = batch.shape[0] * math.prod(batch.shape[2:])
        if batch.numel():
            values = batch.detach().to(_accumulation_dtype(batch.dtype))
            variance, mean = torch.var_mean(values, dim=_reduction_dims(batch), correction=0)
            statistics[: self.num_features] = mean
            statistics[self.num_features : -1] = variance
        statistics[-1] = num_values
        with add_error_context(lambda: f"A {type(self).__name__} was sharing a batch's statistics.", _ADVICE):
            gathered = all_gather(statistics[None], group=group)
        counts = gathered[:, -1:]
        total = counts.sum()
        means, variances = gathered[:, : self.num_features], gathered[:, self.num_features : -1]
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        return mean, variance, int(total)

    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics; like torch, skip those that a user has set to None."""
        momentum = self.momentum or 0.0
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    momentum = 1 / int(self.num_batches_tracked)
            for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
                if running is not None:
                    running.copy_(running.to(batch.dtype).lerp(batch, momentum))


class SyncBatchNorm1d(_SyncBatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over the batches of all ranks, of shape (N, C) or (N, C, L)."""

    __doc__ = f"{__doc__}{_DETAILS}"


class SyncBatchNorm2d(_SyncBatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over the batches of all ranks, of shape (N, C, H, W)."""

    __doc__ = f"{__doc__}{_DETAILS}"


class SyncBatchNorm3d(_SyncBatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over the batches of all ranks, of shape (N, C, D, H, W)."""

    __doc__ = f"{__doc__}{_DETAILS}"


class SyncBatchNorm(_SyncBatchNorm):
    """Batch norm of inputs of any number of dims; replaces `torch.nn.SyncBatchNorm`."""

    __doc__ = f"{__doc__}{_DETAILS}"

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SYNC_CLASSES: dict[type[torch.nn.Module], type[_SyncBatchNorm]] = {
    torch.nn.BatchNorm1d: SyncBatchNorm1d,
    torch.nn.BatchNorm2d: SyncBatchNorm2d,
    torch.nn.BatchNorm3d: SyncBatchNorm3d,
    torch.nn.SyncBatchNorm: SyncBatchNorm,
}


def convert_sync_batchnorm(
    module: _Module,
    group: Backend | None = None,
    *,
    replace: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> _Module:
    """Replace every batch norm layer inside a module by its synchronised counterpart, which takes over its tensors.

    A class derived from torch's batch norms has code of its own, which the counterpart would not have. ``replace``
    returns its replacement, as for a norm with its activation::

        def replace(layer):
            plain = torch.nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
            plain.load_state_dict(layer.state_dict())
            return torch.nn.Sequential(plain, torch.nn.ReLU())

        fd.convert_sync_batchnorm(model, replace=replace)

    Args:
        module: The module, changed in place unless it is such a layer itself. Parameters, buffers and training mode
            stay the same objects and values: make optimizers before or after.
        group: The group of the new layers; None is the default group when they are called.
        replace: ``replace(layer)`` returns the replacement of a batch norm of another class than torch's own: a layer
            derived from `SyncBatchNorm2d` or its siblings, or any module, whose batch norms are replaced in turn. It
            returns the layer itself where each rank is to normalise by its own batch.

    Returns:
        The module or its replacement. A layer that appears twice is replaced by one that appears twice.

    Raises:
        ValueError: A layer is lazy and has no shape yet, has no channels, has hooks, which would be lost, or is a
            `torch.nn.SyncBatchNorm` over a process group of torch's, where ``group`` is None. Nothing is changed.
        TypeError: ``module`` is not a module, or has a subclass of a batch norm, whose own code would be lost, and
            ``replace`` is None or returned something else than a module. Nothing is changed.
    """
    check_type(module, torch.nn.Module, "convert_sync_batchnorm takes a torch.nn.Module")
    if replace is not None and not callable(replace):
        raise TypeError(f"replace must be a function of a layer or None, not {type(replace).__name__}")
    layers = {each: _convert_layer(each, name, group, replace) for name, each in module.named_modules()}
    for parent in list(layers):
        for name, child in list(own_modules(parent).items()):
            if child is not None and layers.get(child) is not None:
                setattr(parent, name, layers[child])
    new = layers[module]
    return module if new is None else new  # type: ignore[return-value]


def _convert_layer(
    layer: torch.nn.Module,
    name: str,
    group: Backend | None,
    replace: Callable[[torch.nn.Module], torch.nn.Module] | None,
) -> torch.nn.Module | None:
    """The replacement of a layer, or None where it stays."""
    if not isinstance(layer, BatchNormBase) or isinstance(layer, _SyncBatchNorm):
        return None
    title = repr(name) if name else "the module"
    if is_lazy_norm(layer):
        raise ValueError(f"{title} is lazy: call the module once before converting it")
    if has_hooks(layer):
        raise ValueError(f"{title} has hooks, which would be lost: convert first, then register them")
    sync_class = _SYNC_CLASSES.get(type(layer))
    if sync_class is None:
        return _replace_custom(layer, title, group, replace)
    if getattr(layer, "process_group", None) is not None and group is None:
        raise ValueError(
            f"{title} is a torch.nn.SyncBatchNorm over a process group of torch's: pass group=, the ranks over which"
            " the new layers synchronise"
        )
    new = sync_class(
        layer.num_features,
        layer.eps,
        layer.momentum,
        affine=False,
        track_running_stats=False,
        group=group,
        device="meta",
    )
    new.affine, new.track_running_stats, new.training = layer.affine, layer.track_running_stats, layer.training
    new.weight, new.bias = layer.weight, layer.bias
    new.running_mean, new.running_var = layer.running_mean, layer.running_var
    new.num_batches_tracked = layer.num_batches_tracked
    return new


def _replace_custom(
    layer: torch.nn.Module,
    title: str,
    group: Backend | None,
    replace: Callable[[torch.nn.Module], torch.nn.Module] | None,
) -> torch.nn.Module | None:
    """A user's replacement of a layer with code of its own, or None where the layer stays."""
    if replace is None:
        raise TypeError(
            f"{title} is {with_article(type(layer).__name__)}, a subclass of a batch norm, whose own code would be"
            " lost: pass replace=, a function that returns the replacement of a layer"
        )
    new = replace(layer)
    if not isinstance(new, torch.nn.Module):
        raise TypeError(
            f"replace must return the replacement of a layer, or the layer itself, not"
            f" {type(new).__name__} as for {title}"
        )
    if new is layer:
        return None
    if any(isinstance(each, type(layer)) and not isinstance(each, _SyncBatchNorm) for each in new.modules()):
        raise TypeError(
            f"replace returned a module for {title} that has {with_article(type(layer).__name__)} again, whose own code"
            " would be lost: make it of torch's own batch norms, which are replaced in turn"
        )
    return convert_sync_batchnorm(new, group).train(layer.training)


class _Normalise(torch.autograd.Function):
    """Normalise this rank's input by given statistics of all ranks' batches."""

    @staticmethod
    def forward(  # noqa: PLR0917 - what autograd passes
        ctx: FunctionCtx,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        group: Backend,
    ) -> torch.Tensor:
        wide = _accumulation_dtype(batch.dtype)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(batch, weight, mean, scale)  # type: ignore[arg-type]
        ctx.count, ctx.group = count, group  # type: ignore[attr-defined]
        mean, variance = mean.to(wide), variance.to(wide)
        if not batch.numel():
            return torch.empty_like(batch)
        if weight is not None and weight.dtype is batch.dtype:
            weight = weight.to(wide)
        if bias is not None and bias.dtype is batch.dtype:
            bias = bias.to(wide)
        return functional.batch_norm(batch, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight, mean, scale = ctx.saved_tensors
        wide = _accumulation_dtype(batch.dtype)
        shape = [1, -1, *[1] * (batch.dim() - 2)]
        dims = _reduction_dims(batch)
        gradients = gradient.to(wide)
        normalised = (batch.to(wide) - mean.to(wide).view(shape)) * scale.to(wide).view(shape)
        sums = torch.stack([gradients.sum(dims), (gradients * normalised).sum(dims)]).double()
        for_bias, for_weight = sums.to(weight.dtype if weight is not None else wide).clone()
        for_batch = None
        if ctx.needs_input_grad[0]:
            with add_error_context(lambda: "The backward of a synchronised batch norm was adding its sums.", _ADVICE):
                sums = allreduce(sums, group=ctx.group)
            means = (sums / ctx.count).to(wide)
            for_batch = gradients - means[0].view(shape) - normalised * means[1].view(shape)
            factor = scale if weight is None else scale * weight
            for_batch = (for_batch * factor.to(wide).view(shape)).to(batch.dtype)
        return (
            for_batch,
            for_weight if ctx.needs_input_grad[1] else None,
            for_bias if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduction_dims(batch: torch.Tensor) -> list[int]:
    return [0, *range(2, batch.dim())]
