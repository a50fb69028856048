"""Forwards of sharded experts: the module's own code on plain local tensors.

[Note: gradients on all ranks]
A rank whose experts get no rows must still take part in backward, or the others would wait for its gradients. So each
forward's output depends on its rows and on all of its parameters (`_Connect`), and each parameter has a gradient on
every rank, of zeros if nothing was computed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.verification import left_reason
from ferrodist.errors import DistributedError
from ferrodist.parallel.backward_hooks import current_backward_id
from ferrodist.parallel.tensor_parallel.expert_load import ExpertLoad
from ferrodist.parallel.tensor_parallel.token_routing import combine, dispatch, plan_route
from ferrodist.parallel.tensor_parallel.wrapped_forwards import find_arguments
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK
from ferrodist.torch_private.compilers import outside_of_compiler
from ferrodist.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from ferrodist.mesh import DeviceMesh

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What modules of experts take: tokens (..., H), the experts of each (..., k), and the weights of their outputs."""


_EXPERT_COUNTS = "tensor_parallel.expert_counts"
"""The group attachment that has, for each mesh, the number of modules of experts that were made parallel on it."""


class _Connect(torch.autograd.Function):
    """The output itself, which also depends on other tensors: their gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.num_others = len(others)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (grads[0], *[None] * ctx.num_others)  # the functions before get None as zeros


class _Together(torch.autograd.Function):
    """Parameters as they are; each gets its gradient when all have theirs, so in the same order on all ranks."""

    @staticmethod
    def forward(ctx: Any, scale: float, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.scale = scale
        return tuple(one.view_as(one) for one in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(grads if ctx.scale == 1 else [grad * ctx.scale for grad in grads]))


class ExpertForward:
    """The base of experts' forwards: their inputs, and the module's own code with local parameters.

    ``num_experts`` is that of all ranks, ``num_local`` that of the local parameters. ``grad_scale`` is a factor of the
    parameters' gradients.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, num_experts: int, num_local: int) -> None:
        functools.update_wrapper(self, module.forward)
        self._module, self._forward, self._mesh = module, module.forward, mesh
        self._num_experts, self._num_local = num_experts, num_local
        self._names, _ = find_arguments(module.forward)
        self._grad_scale = 1.0
        counts = mesh.parent.attachments.setdefault(_EXPERT_COUNTS, Counter())
        counts[mesh.identity] += 1
        self._module_index = counts[mesh.identity]  # the same on all ranks, also of copies
        self._load = ExpertLoad(num_experts)
        module.expert_load = self._load  # type: ignore[assignment] # torch knows tensors and modules

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the experts."""
        raise NotImplementedError

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The three arguments, by their order or names."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(self._names) or set(given) != set(self._names):
            raise TypeError(
                f"parallel experts take {', '.join(self._names)}, not {len(args)} arguments by position and"
                f" {sorted(kwargs)} by name"
            )
        first, second, third = (given[name] for name in self._names)
        return first, second, third

    def _check(self, tokens: Any, index: Any, weights: Any) -> None:
        """Raise TypeError or ValueError unless the inputs are tokens and their routing."""
        for name, one in zip(ARGUMENTS, (tokens, index, weights), strict=True):
            if not isinstance(one, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(one).__name__}")
        if index.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"top_k_index must be of int64 or int32, not {index.dtype}")
        for name, one in (("hidden_states", tokens), ("top_k_weights", weights)):
            if not one.is_floating_point():
                raise TypeError(f"{name} must be of floats, not {one.dtype}")
        if tokens.dim() < 2 or index.shape != weights.shape or tokens.shape[:-1] != index.shape[:-1]:
            raise ValueError(
                "experts take hidden_states of (tokens, features), top_k_index and top_k_weights of (tokens, k): not"
                f" {tuple(tokens.shape)}, {tuple(index.shape)} and {tuple(weights.shape)}"
            )

    def _check_range(self, index: torch.Tensor) -> None:
        """Raise ValueError unless all elements of a plain tensor are experts."""
        if not index.numel():
            return
        least, most = (int(one) for one in torch.aminmax(index))
        if least < 0 or most >= self._num_experts:
            wrong = least if least < 0 else most
            raise ValueError(f"top_k_index has {wrong}, and experts are numbered from 0 to {self._num_experts - 1}")

    def _replicated(self, tensor: torch.Tensor) -> DTensor:
        """An input as a DTensor; a plain one counts as replicated, and the ranks compare it."""
        mesh = self._mesh
        if isinstance(tensor, DTensor):
            if tensor.mesh != mesh:
                raise ValueError(f"the experts are on {mesh}, and an input is on {tensor.mesh}: use one mesh")
            return tensor
        check = ACTIVE_CHECK.get()
        if check is not None:
            check.record("experts", tensor, mesh)
        return DTensor.from_local(tensor, mesh, Replicate(), shape=tensor.shape)

    @contextlib.contextmanager
    def _local_parameters(self) -> Iterator[list[torch.Tensor]]:
        """A block in which the module has local tensors; yields those that get gradients."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        num_experts: Any = getattr(self._module, "num_experts", None)
        try:
            for module in self._module.modules():
                both: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
                for tensors in both:
                    for name, one in tensors.items():
                        if isinstance(one, DTensor):
                            before.append((tensors, name, one))
                            found.setdefault(id(one), (one, self._localise(name, one)))
            trained = [key for key, (_, local) in found.items() if local.requires_grad]
            locals_ = {key: local for key, (_, local) in found.items()}
            if trained:
                together = _Together.apply(self._grad_scale, *[locals_[key] for key in trained])  # type: ignore[no-untyped-call]
                locals_.update(zip(trained, together, strict=True))
            for tensors, name, one in before:
                tensors[name] = locals_[id(one)]
            if num_experts == self._num_experts:
                self._module.num_experts = self._num_local  # type: ignore[assignment]
            yield [locals_[key] for key in trained]
        finally:
            for tensors, name, one in before:
                tensors[name] = one
            if num_experts == self._num_experts:
                self._module.num_experts = num_experts

    def _localise(self, name: str, tensor: DTensor) -> torch.Tensor:
        """The local tensor of a parameter or buffer; gradients of replicated ones add up over the ranks."""
        del name
        (placement,) = tensor.placements
        return tensor.to_local(grad_placements=Partial() if isinstance(placement, Replicate) else None)

    def _run(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The module's own code on local rows (R, H), which have their experts and weights (R, k).

        If it raises, the group ends: the other ranks are in the next collective of this forward already.
        """
        try:
            return self._compute(rows, index, weights)
        except BaseException as error:
            if not isinstance(error, DistributedError):
                group = self._mesh.group
                group.abort(left_reason(group.rank, "a forward of experts", error))
            raise

    def _compute(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with self._local_parameters() as parameters:
            if rows.shape[0]:
                output = self._forward(rows, index, weights)
                if not isinstance(output, torch.Tensor) or output.shape != rows.shape:
                    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                    raise ValueError(
                        f"parallel experts must return a tensor of the shape of hidden_states, {tuple(rows.shape)}, not"
                        f" {shape}"
                    )
                output = output.to(rows.dtype)
            else:
                output = torch.zeros_like(rows)  # not every code takes no rows
            made: torch.Tensor = _Connect.apply(output, rows, *parameters)  # type: ignore[no-untyped-call]
        return made

    def _record(self, routed: torch.Tensor, kept: torch.Tensor) -> None:
        if current_backward_id() == -1:  # else activation checkpointing computes the forward again
            self._load.record(routed, kept)


class ExpertParallelForward(ExpertForward):
    """A forward of experts that are sharded over the ranks: tokens travel to them.

    ``takes_own_tokens``: plain inputs are this rank's own tokens, and so are outputs. Otherwise they are replicated,
    and each rank sends its share of them.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        num_experts: int,
        num_local: int,
        *,
        capacity_factor: float | None,
        outputs: Placement | None,
        takes_own_tokens: bool,
        grad_scale: float = 1.0,
    ) -> None:
        super().__init__(module, mesh, num_experts, num_local)
        self._capacity_factor, self._outputs, self._takes_own_tokens = capacity_factor, outputs, takes_own_tokens
        self._grad_scale = grad_scale

    @outside_of_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the experts."""
        try:
            tokens, index, weights = self._arguments(args, kwargs)
            self._check(tokens, index, weights)
            if self._takes_own_tokens and not any(isinstance(one, DTensor) for one in (tokens, index, weights)):
                self._check_range(index)
                return_to, shape = None, tokens.shape
            else:
                tokens, index, weights, return_to = self._shares(tokens, index, weights)
                shape = tokens.shape
                tokens, index, weights = tokens.to_local(), index.to_local(), weights.to_local()
                self._check_range(index)
        except (TypeError, ValueError) as failure:
            plan_route(None, self._num_experts, self._mesh.group, failure=failure)  # which raises it
            raise
        output = self._exchange(tokens, index, weights)
        if return_to is None:
            return output
        share, outputs = return_to
        return DTensor.from_local(output, self._mesh, share, shape=shape).redistribute(outputs)

    def _shares(
        self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> tuple[DTensor, DTensor, DTensor, tuple[Placement, Placement]]:
        """The inputs sharded by tokens; the placement of these shares, and that of the output."""
        placed = [self._replicated(one) for one in (tokens, index, weights)]
        (own,) = placed[0].placements
        is_by_tokens = isinstance(own, Shard) and own.dim < tokens.dim() - 1
        share = own if is_by_tokens else Shard(0)
        outputs = self._outputs or (share if is_by_tokens else Replicate())
        first, second, third = (one.redistribute(share) for one in placed)
        return first, second, third, (share, outputs)

    def _exchange(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The outputs for this rank's own tokens, plain (..., H)."""
        flat, index, weights = tokens.flatten(0, -2), index.flatten(0, -2), weights.flatten(0, -2)
        gradients = 0
        if torch.is_grad_enabled():
            is_trained = any(one.requires_grad for one in self._module.parameters())
            gradients = flat.requires_grad + 2 * is_trained
        route = plan_route(
            index,
            self._num_experts,
            self._mesh.group,
            capacity_factor=self._capacity_factor,
            gradients=gradients,
            module_index=self._module_index,
        )
        self._record(route.routed, route.kept)
        rows = dispatch(flat, route)
        # Weights are applied to what comes back, so that they, and their gradients, don't travel.
        ones = torch.ones(rows.shape[0], 1, dtype=rows.dtype)
        computed = self._run(rows, route.expert_ids.unsqueeze(1), ones)
        return combine(computed, weights, route).view(tokens.shape)


class TensorParallelExpertsForward(ExpertForward):
    """A forward of experts each of which is sharded: every rank computes a part of each output."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, num_experts: int, *, outputs: Placement, added_once: frozenset[str]
    ) -> None:
        super().__init__(module, mesh, num_experts, num_experts)
        self._outputs, self._added_once = outputs, added_once

    @outside_of_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the experts."""
        given = self._arguments(args, kwargs)
        self._check(*given)
        tokens, index, weights = (self._replicated(one).redistribute(Replicate()) for one in given)
        shape = tokens.shape
        local_index = index.to_local().flatten(0, -2)
        self._check_range(local_index)
        counts = torch.bincount(local_index.reshape(-1), minlength=self._num_experts)
        self._record(counts, counts)
        rows = tokens.to_local(grad_placements=Partial()).flatten(0, -2)
        output = self._run(rows, local_index, weights.to_local(grad_placements=Partial()).flatten(0, -2))
        return DTensor.from_local(output.view(shape), self._mesh, Partial(), shape=shape).redistribute(self._outputs)

    def _localise(self, name: str, tensor: DTensor) -> torch.Tensor:
        local = super()._localise(name, tensor)
        if name not in self._added_once or self._mesh.group.rank == 0:
            return local
        # Added by each rank to its part of the sum, it would count several times.
        made: torch.Tensor = _Connect.apply(torch.zeros_like(local), local)  # type: ignore[no-untyped-call]
        return made
