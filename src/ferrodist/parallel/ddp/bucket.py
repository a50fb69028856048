"""Gradient buckets: which gradients travel together, the flat memory they share, and the checks they carry.

[Note: gradient mask]
Behind its gradients a bucket carries two elements for each parameter: 1 and 0 from a rank that has a gradient for it, 0
and 1 from one that has none, 0 and 0 from one that has run out of batches (`DDP.join`). Their mean tells a gradient
that all ranks have from one that some have and from one that no rank has. One element would not do: where there are
many ranks and the dtype has few bits, the share of the ranks would round to 1; but above 0 is above 0 in any dtype.

[Note: memory of buckets]
A bucket's memory is allocated once and used in every step; that of rebuilt buckets is symmetric memory on the CPU (see
[Note: rebuilding buckets] in `reducer.py`). By default each ``.grad`` is a view of it, from before the allreduce on. So
a step copies each gradient once, from where autograd made it: an engine that reduces symmetric memory needs no staging
copy, and the optimizer reads the average where the engine wrote it. A gradient that accumulates is added in place and
not copied at all.

After ``zero_grad()`` autograd makes new gradient tensors. They are copied as they arrive, while they are in the CPU's
cache, and freed at once, so that the next layer's gradient reuses the memory.

Programs may give such a view other memory, another dtype or another shape (``module.double()``, ``grad.data = ...``).
Then it is copied like any other gradient, and a new view replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ferrodist.collectives.arguments import elements_overlap
from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.symmetric_memory import empty_symmetric
from ferrodist.errors import BackendUnavailable
from ferrodist.parallel.ddp.fingerprints import FINGERPRINT_SIZE, bucket_fingerprint, verify_fingerprints
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import PendingCollective

CommHook: TypeAlias = "Callable[[GradientBucket], PendingCollective[torch.Tensor]]"

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """The tensors of one bucket, as positions in the assigned sequence, in ascending order."""

    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]


def compute_bucket_assignment(
    tensors: Sequence[torch.Tensor], max_bytes: float, *, first_bytes: float | None = None
) -> list[BucketSpec]:
    """Assign tensors to buckets of one dtype and device each, keeping their order within a bucket.

    A pure function of dtypes, devices and sizes, so that all ranks get the same buckets. A bucket is filled until the
    next tensor would make it larger than ``max_bytes``, or ``first_bytes`` for the first of each dtype and device,
    which then starts early; a larger tensor gets a bucket of its own. Buckets are ordered by their last member: when
    tensors become ready in the order of the sequence, buckets complete in the order of the list.
    """
    buckets: list[tuple[tuple[torch.dtype, torch.device], list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], float]] = {}  # the last bucket, and its free bytes
    for position, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        members, free = filling.get(kind, ([], max_bytes if first_bytes is None else min(first_bytes, max_bytes)))
        if members and tensor.nbytes > free:
            members, free = [], max_bytes
        if not members:
            buckets.append((kind, members))
        members.append(position)
        filling[kind] = (members, free - tensor.nbytes)
    specs = [BucketSpec(dtype=dtype, device=device, members=tuple(members)) for (dtype, device), members in buckets]
    return sorted(specs, key=lambda spec: spec.members[-1])


class GradientBucket:
    """Gradients that travel together, as a communication hook gets them.

    Args:
        parameters: The parameters by name, of one dtype.
        memory: Flat memory for the gradients' elements, and behind them the trailer (mask and fingerprints).
        index: The bucket's index, in the order in which buckets start.
        model_id: The model's id in the group.
        group: The group.
        as_views: Whether gradients become views of the memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        memory: torch.Tensor,
        *,
        index: int,
        model_id: int,
        group: Backend,
        as_views: bool,
    ) -> None:
        self.index, self.group = index, group
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.tensor = memory[: sum(sizes)]
        """All gradients, one after the other: shape (num_elements,)."""
        self.gradients = tuple(
            elements.as_strided(each.shape, torch.empty_like(each, device="meta", requires_grad=False).stride())
            for elements, each in zip(torch.split(self.tensor, sizes), self.parameters, strict=True)
        )
        """The same memory, as one tensor for each parameter, with its shape and, unless it has gaps, its strides."""
        self.absent: list[str] = []
        """Names of the parameters that this rank had no gradient for when the bucket started."""
        self.timeout: float | None = None
        """Seconds for each collective of the hook; None is the group's timeout."""
        self._memory, self._as_views = memory, as_views
        self._installed: list[torch.Tensor | None] = [None] * len(self.parameters)  # views that were put into ``.grad``
        self._view_addresses = tuple(gradient.data_ptr() for gradient in self.gradients)
        self._trailer = memory[sum(sizes) :]
        fingerprints = [0.0] * (group.world_size * FINGERPRINT_SIZE)
        own = slice(group.rank * FINGERPRINT_SIZE, (group.rank + 1) * FINGERPRINT_SIZE)
        fingerprints[own] = bucket_fingerprint(model_id, index)
        count = len(sizes)
        trailer = [1.0] * count + [0.0] * count + fingerprints
        self._full_trailer = torch.tensor(trailer, dtype=memory.dtype, device=memory.device)
        self._pending: list[PendingCollective[torch.Tensor]] = []
        self._grad_mask: list[complex] = []

    def matches_parameters(self) -> bool:
        """True if each parameter still has the dtype, device and shape of its view."""
        return all(
            parameter.dtype is view.dtype and parameter.device == view.device and parameter.shape == view.shape
            for parameter, view in zip(self.parameters, self.gradients, strict=True)
        )

    def copy_in(self, index_in_bucket: int) -> None:
        """Copy a gradient that has just arrived, and make ``.grad`` a view of it; see [Note: memory of buckets].

        If gradients are not to be views of the memory, nothing is done here, and `start` copies all of them.
        """
        gradient = self.parameters[index_in_bucket].grad
        if self._as_views and gradient is not None and gradient.layout is torch.strided:
            self._copy_gradient(index_in_bucket, gradient)

    def _copy_gradient(self, index_in_bucket: int, gradient: torch.Tensor) -> None:
        if not self._is_installed(index_in_bucket, gradient):
            self.gradients[index_in_bucket].copy_(gradient)
            if self._as_views:
                self._install_view(index_in_bucket)

    def _is_installed(self, index_in_bucket: int, gradient: torch.Tensor | None) -> bool:
        """True if a gradient is the view that `_install_view` made, still with its memory."""
        return (
            gradient is not None
            and gradient is self._installed[index_in_bucket]
            and gradient.data_ptr() == self._view_addresses[index_in_bucket]
        )

    def _install_view(self, index_in_bucket: int) -> None:
        """Set the parameter's ``.grad`` to its view of the bucket."""
        view = self._installed[index_in_bucket]
        if view is None or not self._is_installed(index_in_bucket, view):
            view = self._installed[index_in_bucket] = self.gradients[index_in_bucket].detach()
        self.parameters[index_in_bucket].grad = view

    @torch.no_grad()
    def start(self, hook: CommHook | None, *, is_joined: bool, timeout: float | None = None) -> None:
        """Copy what is not copied yet (zeros if this rank ``is_joined``), and start an allreduce, or the hook's.

        ``timeout`` is in seconds, for each collective, also the hook's; None uses the group's.
        """
        self.timeout = timeout
        self._trailer.copy_(self._full_trailer)
        self.absent.clear()
        if is_joined:
            self.absent += self.names
            self._memory[: len(self._memory) - len(self._full_trailer) + 2 * len(self.parameters)].zero_()
        else:
            for index_in_bucket, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    self.absent.append(self.names[index_in_bucket])
                    self.gradients[index_in_bucket].zero_()
                    self._trailer[index_in_bucket] = 0
                    self._trailer[len(self.parameters) + index_in_bucket] = 1
                else:
                    self._copy_gradient(index_in_bucket, parameter.grad)
        if hook is None:
            self._pending = [
                async_allreduce(self._memory, ReduceOp.MEAN, group=self.group, out=self._memory, timeout=timeout)
            ]
            return
        pending = hook(self)
        if not callable(getattr(pending, "wait", None)):
            raise TypeError(
                "a communication hook must return a PendingCollective, as async_allreduce() returns, not"
                f" {type(pending).__name__}"
            )
        trailer = async_allreduce(self._trailer, ReduceOp.MEAN, group=self.group, out=self._trailer, timeout=timeout)
        self._pending = [pending, trailer]

    def wait(self) -> None:
        """Wait for the averages, and check that all ranks averaged the same bucket (`fingerprints.py`)."""
        assert self._pending
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            pending[0].wait()
        else:
            result: object = pending[0].wait(self.timeout)  # a custom hook may have started its collective without it
            pending[1].wait()
            if not isinstance(result, torch.Tensor) or result.numel() != self.tensor.numel():
                what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
                raise TypeError(
                    f"a communication hook's collective gave {what} for a bucket of"
                    f" {counted(self.tensor.numel(), 'element')}: wait() must return one average for each element of"
                    " bucket.tensor"
                )
            if result.data_ptr() != self.tensor.data_ptr() or result.dtype is not self.tensor.dtype:
                with torch.no_grad():
                    self.tensor.copy_(result.reshape(-1))
        trailer: list[complex] = self._trailer.tolist()
        if self.group.failure is not None:  # on a GPU, where wait() may return before the work has ended
            raise self.group.failure.fresh()
        self._grad_mask = trailer[: 2 * len(self.parameters)]
        verify_fingerprints(trailer[2 * len(self.parameters) :], self.group)

    def find_uneven(self) -> list[str]:
        """Names of the parameters that only some ranks have a gradient for; equal on all ranks."""
        have, lack = self._grad_mask[: len(self.names)], self._grad_mask[len(self.names) :]
        return [name for name, some, others in zip(self.names, have, lack, strict=True) if abs(some) and abs(others)]

    @torch.no_grad()
    def finish(self, scale: float, *, is_joined: bool) -> None:
        """Scale the averages by ``scale``, and copy them to the gradients beside the bucket; views hold them already.

        Gradients stay None where no rank has one. On a rank that ``is_joined`` they stay as they are, though views then
        hold the others' averages.
        """
        if scale != 1.0:
            self.tensor.mul_(scale)
        if is_joined:
            return
        for index_in_bucket, (parameter, average) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            gradient = parameter.grad
            if self._is_installed(index_in_bucket, gradient) or (
                gradient is None and not abs(self._grad_mask[index_in_bucket])
            ):
                continue
            if self._as_views:
                self._install_view(index_in_bucket)
            elif (
                gradient is not None  # copy_ fails on expanded tensors, and on those made under inference_mode
                and not gradient.is_inference()
                and (gradient.is_contiguous() or not elements_overlap(gradient))
            ):
                gradient.copy_(average)
            else:
                parameter.grad = torch.empty_like(parameter).copy_(average)


def make_buckets(
    specs: Sequence[BucketSpec],
    parameters: Mapping[str, torch.nn.Parameter],
    group: Backend,
    *,
    model_id: int,
    as_views: bool,
    is_symmetric: bool,
) -> tuple[GradientBucket, ...]:
    """Make all buckets of an assignment in one allocation."""
    names, tensors = tuple(parameters), tuple(parameters.values())
    counts = [
        sum(tensors[position].numel() for position in spec.members)
        + 2 * len(spec.members)
        + group.world_size * FINGERPRINT_SIZE
        for spec in specs
    ]
    sizes = [
        -(-count * spec.dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for count, spec in zip(counts, specs, strict=True)
    ]
    devices = {spec.device for spec in specs}
    device = devices.pop() if devices else torch.device("cpu")
    assert not devices, "modules on several devices are refused"
    memory = allocate_flat(sum(sizes), torch.uint8, device, group if is_symmetric else None)
    return tuple(
        GradientBucket(
            {names[position]: tensors[position] for position in spec.members},
            part.view(spec.dtype)[:count],
            index=index,
            model_id=model_id,
            group=group,
            as_views=as_views,
        )
        for index, (spec, count, part) in enumerate(zip(specs, counts, torch.split(memory, sizes), strict=True))
    )


def allocate_flat(numel: int, dtype: torch.dtype, device: torch.device, group: Backend | None) -> torch.Tensor:
    """Allocate a flat tensor, on the CPU in the group's symmetric memory if there is a group; every rank calls this."""
    if group is not None and device.type == "cpu":
        try:
            return empty_symmetric((numel,), dtype, group=group)
        except BackendUnavailable:  # on all ranks; staging is slower, and gives the same bits
            pass
    return torch.empty(numel, dtype=dtype, device=device)
