"""Which tensors travel together: a pure function of their sizes, so that every rank comes to the same plan.

What a bucket carries behind its gradients: whose they are, and which of them are there.

[Note: presence]
A bucket carries two elements more for each parameter: 1 and 0 from a rank that has a gradient for it, 0 and 1 from one
that has none, 0 and 0 from one that has run out of batches (`DDP.join`). Their mean tells a gradient that all ranks
have from one that some have and from one that no rank has. Two, since the share of the ranks in one element would round
to 1 where there are many ranks and the dtype has few bits; above 0 is above 0 in any dtype.

[Note: marks]
Buckets of two models may have one size and dtype, and then a collective can't tell them apart. A bucket therefore
carries two elements more for each rank, its *mark*: the number of the model within the group and that of the bucket
within the model. Each rank fills in its own mark and leaves the others 0, so that the mean over the ranks has all of
them, divided by the number of ranks. Every rank compares them before it looks at a gradient, and all come to the same
verdict; no message is added. Numbers go from 1 to 127 and then start again, for bfloat16 has 8 bits to tell their
quotients apart: models 127 apart are not told apart.

The flat memory in which the gradients of some parameters travel.

[Note: memory of buckets]
A bucket's memory is made once and used in every step. Where gradients are its views, a step copies each gradient once,
from where autograd made it: an engine that reduces symmetric memory needs no copy aside, and the optimizer reads the
average where the engine wrote it. A gradient that accumulates is added in place, and not copied at all.

Gradients come from autograd as tensors of their own after ``zero_grad()``. They are copied as they come, while they are
in the processor's cache, and freed at once, so that the next layer's takes the same memory.

What parameters get as their gradients are views made for that. Others may give such a tensor other memory, another
dtype or shape (``module.double()``, ``grad.data = ...``): then it is a gradient like any, which is copied, and a new
view takes its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.arguments import elements_overlap
from ferrodist.collectives.reduce import async_allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.symmetric_memory import empty_symmetric
from ferrodist.errors import BackendUnavailable, CollectiveMismatchError, UnsupportedOpError, ranks_text
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import PendingCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel as one message.

    Args:
        dtype: Of all of them.
        device: Of all of them.
        members: Their positions in the planned sequence, ascending.
        size_bytes: Of all of them together.
    """

    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]
    size_bytes: int


def plan_buckets(
    tensors: Sequence[torch.Tensor], max_bytes: float, *, first_bytes: float | None = None
) -> list[Bucket]:
    """Divide tensors into buckets of one dtype and device each, keeping their order within a bucket.

    A bucket is filled until the next tensor of its kind would make it larger than ``max_bytes``; a tensor that
    is larger by itself has a bucket of its own. Tensors without elements belong to buckets too.

    Args:
        tensors: Only their dtype, device and size are read.
        max_bytes: Above 0; infinity gives one bucket for each kind.
        first_bytes: The same for the first bucket of each kind; None is ``max_bytes``. A small one starts early.

    Returns:
        Buckets ordered by their last member: when tensors become ready in the order of the sequence, buckets
        become complete in the order of the plan, whatever the mixture of dtypes.
    """
    plan: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], float] = {}

    def close(kind: tuple[torch.dtype, torch.device]) -> None:
        members, size_bytes = filling.pop(kind)
        limits[kind] = max_bytes
        plan.append(Bucket(dtype=kind[0], device=kind[1], members=tuple(members), size_bytes=size_bytes))

    for place, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        limit = limits.get(kind, max_bytes if first_bytes is None else min(first_bytes, max_bytes))
        if kind in filling and filling[kind][1] + tensor.nbytes > limit:
            close(kind)
        members, size_bytes = filling.setdefault(kind, ([], 0))
        members.append(place)
        filling[kind] = (members, size_bytes + tensor.nbytes)
    for kind in list(filling):
        close(kind)
    return sorted(plan, key=lambda bucket: bucket.members[-1])


FINGERPRINT_SIZE = 2
"""Elements of one rank's mark."""

_KEY = "parallel.data.models"
_HIGHEST = 127


def number_model(group: Backend, name: str) -> int:
    """Give a model the next number of its group, from 0; ranks number their models in the same order."""
    names: list[str] = group.attachments.setdefault(_KEY, [])
    names.append(name)
    return len(names) - 1


def model_title(group: Backend, number: int) -> str:
    """How error messages call a model that `number_model` has numbered, as "DDP model 0 (Linear)"."""
    return f"DDP model {number} ({group.attachments[_KEY][number]})"


def bucket_fingerprint(model: int, bucket: int) -> tuple[float, float]:
    """The mark of a bucket of a model, by their numbers."""
    return float(model % _HIGHEST + 1), float(bucket % _HIGHEST + 1)


def verify_fingerprints(marks: list[complex], group: Backend) -> None:
    """Compare the marks of all ranks after the mean.

    Args:
        marks: One after the other, ``world_size * FINGERPRINT_SIZE`` numbers.
        group: The group.

    Raises:
        CollectiveMismatchError: On every rank, when two differ, naming both. The group has failed.
    """
    if marks == marks[:FINGERPRINT_SIZE] * group.world_size:
        return
    senders: dict[str, list[int]] = {}
    for rank in range(group.world_size):
        mark = [part.real * group.world_size for part in marks[rank * FINGERPRINT_SIZE : (rank + 1) * FINGERPRINT_SIZE]]
        senders.setdefault(_describe(group, mark), []).append(rank)
    odd = min(senders.values(), key=len)
    if "" in senders:  # what another rank sent lies over all marks, so they don't tell who it was
        said = "some rank called an allreduce of its own where the others averaged gradients"
    else:
        said = "; ".join(f"{ranks_text(ranks)} averaged {what}" for what, ranks in senders.items())
    error = CollectiveMismatchError(
        f"the backwards of the ranks of group {group.name!r} are out of step: {said}. Every rank must run the backwards"
        " of its DDP models in the same order, and as many of each.",
        ranks=tuple(odd) if len(senders) == 2 and 2 * len(odd) < group.world_size else (),
    )
    group.abort(error)
    raise error


def _describe(group: Backend, mark: list[float]) -> str:
    """Say which bucket a mark stands for; nothing if it is none."""
    if not all(math.isfinite(part) for part in mark):
        return ""
    model, bucket = (round(part) - 1 for part in mark)
    if not (0 <= model < _HIGHEST and 0 <= bucket < _HIGHEST):
        return ""
    models = range(model, len(group.attachments[_KEY]), _HIGHEST)
    return " or ".join(f"bucket {bucket} of {model_title(group, number)}" for number in models)


if TYPE_CHECKING:
    CommHook: TypeAlias = "Callable[[GradientBucket], PendingCollective[torch.Tensor]]"


_ALIGNMENT_BYTES = 64


class GradientBucket:
    """Gradients that travel together, as a communication hook gets them.

    Args:
        parameters: Whose gradients these are, by name; of one dtype.
        memory: Flat; the gradients' elements, and then those of the trailer.
        index: The bucket's number, in the order in which buckets start.
        model: The model's number in the group.
        group: The group.
        as_views: Whether gradients become views of the memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        memory: torch.Tensor,
        *,
        index: int,
        model: int,
        group: Backend,
        as_views: bool,
    ) -> None:
        self.index = index
        self.group = group
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.tensor = memory[: sum(sizes)]
        """All gradients, one after the other: shape (num_elements,)."""
        self.gradients = tuple(
            _shaped_like(part, parameter)
            for part, parameter in zip(torch.split(self.tensor, sizes), self.parameters, strict=True)
        )
        """The same memory, as one tensor for each parameter, with its shape and strides."""
        self.absent: list[str] = []
        """Names of the parameters that this rank had no gradient for when the bucket started."""
        self._memory = memory
        self._as_views = as_views
        self._lent: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._addresses = tuple(gradient.data_ptr() for gradient in self.gradients)
        self._trailer = memory[sum(sizes) :]
        marks = [0.0] * (group.world_size * FINGERPRINT_SIZE)
        marks[group.rank * FINGERPRINT_SIZE : (group.rank + 1) * FINGERPRINT_SIZE] = bucket_fingerprint(model, index)
        count = len(sizes)
        self._full = torch.tensor([1.0] * count + [0.0] * count + marks, dtype=memory.dtype, device=memory.device)
        self._pending: list[PendingCollective[torch.Tensor]] = []
        self._timeout: float | None = None
        self._shares: list[complex] = []

    def fits(self) -> bool:
        """Whether each parameter still has the form of its place here."""
        return all(
            parameter.dtype is view.dtype and parameter.device == view.device and parameter.shape == view.shape
            for parameter, view in zip(self.parameters, self.gradients, strict=True)
        )

    def check_layouts(self) -> None:
        """Raise for a gradient that is not dense."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise UnsupportedOpError(
                    f"the gradient of {name!r} on rank {self.group.rank} of group {self.group.name!r} has layout"
                    f" {parameter.grad.layout}: DDP averages dense gradients, as of an embedding with sparse=False",
                    ranks=(self.group.rank,),
                )

    def take_early(self, place: int) -> None:
        """Copy a gradient in that has just come; see [Note: memory of buckets]."""
        gradient = self.parameters[place].grad
        if self._as_views and gradient is not None and gradient.layout is torch.strided:
            self._take(place, gradient)

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        if self._lies_here(place, gradient):
            return
        self.gradients[place].copy_(gradient)
        if self._as_views:
            self._lend(place)

    def _lies_here(self, place: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is what `_lend` gave, with the memory that it had."""
        return gradient is not None and gradient is self._lent[place] and gradient.data_ptr() == self._addresses[place]

    def _lend(self, place: int) -> None:
        """Make the memory the parameter's gradient."""
        lent = self._lent[place]
        if lent is None or not self._lies_here(place, lent):
            lent = self._lent[place] = self.gradients[place].detach()
        self.parameters[place].grad = lent

    @torch.no_grad()
    def start(self, hook: CommHook | None, *, is_idle: bool, timeout: float | None = None) -> None:
        """Complete the memory and start the reduction of all of it.

        Args:
            hook: Reduces the gradients in place of an allreduce.
            is_idle: This rank has no batch, and gives zeros.
            timeout: Seconds for each collective, also the hook's; None takes the group's.
        """
        self._timeout = timeout
        self._trailer.copy_(self._full)
        self.absent.clear()
        if is_idle:
            self.absent += self.names
            self._memory[: len(self._memory) - len(self._full) + 2 * len(self.parameters)].zero_()
        else:
            self._take_all()
        if hook is None:
            self._pending = [
                async_allreduce(self._memory, ReduceOp.MEAN, group=self.group, out=self._memory, timeout=timeout)
            ]
            return
        pending = hook(self)
        if not callable(getattr(pending, "wait", None)):
            raise TypeError(
                f"a communication hook returns what a collective's async form returned, not {type(pending).__name__}"
            )
        trailer = async_allreduce(self._trailer, ReduceOp.MEAN, group=self.group, out=self._trailer, timeout=timeout)
        self._pending = [pending, trailer]

    def _take_all(self) -> None:
        count = len(self.parameters)
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.absent.append(self.names[place])
                self.gradients[place].zero_()
                self._trailer[place] = 0
                self._trailer[count + place] = 1
            else:
                self._take(place, parameter.grad)

    def wait(self) -> None:
        """Wait for the averages, and check that the ranks averaged the same; see [Note: marks]."""
        assert self._pending
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            pending[0].wait()
        else:
            result = pending[0].wait(self._timeout)  # of the hook's, which was not told
            pending[1].wait()
            self._keep(result)
        numbers: list[complex] = self._trailer.tolist()
        if self.group.failure is not None:  # on a GPU, where wait() may return before the work has ended
            raise self.group.failure.fresh()
        self._shares = numbers[: 2 * len(self.parameters)]
        verify_fingerprints(numbers[2 * len(self.parameters) :], self.group)

    def _keep(self, result: torch.Tensor) -> None:
        """Take what a communication hook's collective gave."""
        if not isinstance(result, torch.Tensor) or result.numel() != self.tensor.numel():
            what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise TypeError(
                f"a communication hook's collective gave {what} for a bucket of"
                f" {counted(self.tensor.numel(), 'element')}: wait()"
                " must return one average for each element of bucket.tensor"
            )
        if result.data_ptr() != self.tensor.data_ptr() or result.dtype is not self.tensor.dtype:
            with torch.no_grad():
                self.tensor.copy_(result.reshape(-1))

    def find_uneven(self) -> list[str]:
        """Names of the parameters that some ranks have a gradient for and others have not; equal on all ranks."""
        count = len(self.parameters)
        return [
            name
            for place, name in enumerate(self.names)
            if abs(self._shares[place]) and abs(self._shares[count + place])
        ]

    @torch.no_grad()
    def finish(self, scale: float, *, is_idle: bool) -> None:
        """Give each parameter its average; None stays where no rank has a gradient.

        Args:
            scale: What averages are multiplied by.
            is_idle: This rank has no batch: its parameters keep their gradients, though views are the others' averages.
        """
        if scale != 1.0:
            self.tensor.mul_(scale)
        if is_idle:
            return
        for place, (parameter, view) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            gradient = parameter.grad
            if self._lies_here(place, gradient) or (gradient is None and not abs(self._shares[place])):
                continue
            if self._as_views:
                self._lend(place)
            elif gradient is not None and _is_writable(gradient):
                gradient.copy_(view)
            else:
                parameter.grad = torch.empty_like(parameter).copy_(view)


def _is_writable(gradient: torch.Tensor) -> bool:
    """Whether elements can be set one by one: not in what a user expanded, or made under inference_mode."""
    return not gradient.is_inference() and (gradient.is_contiguous() or not elements_overlap(gradient))


def _shaped_like(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A part of the flat memory with a parameter's shape and, unless that has gaps, its strides."""
    strides = torch.empty_like(parameter, device="meta", requires_grad=False).stride()
    return part.as_strided(parameter.shape, strides)


def make_buckets(
    plan: Sequence[Bucket],
    parameters: Mapping[str, torch.nn.Parameter],
    group: Backend,
    *,
    model: int,
    as_views: bool,
    is_symmetric: bool,
) -> tuple[GradientBucket, ...]:
    """Make the buckets of a plan, all in one memory.

    Args:
        plan: What `plan_buckets` made of ``parameters``.
        parameters: In the order of the plan, by name.
        group: The group.
        model: The model's number in the group.
        as_views: See `GradientBucket`.
        is_symmetric: Whether the memory is symmetric, if the system gives it. Then every rank must call.
    """
    names, owners = tuple(parameters), tuple(parameters.values())
    counts = [
        sum(owners[place].numel() for place in bucket.members)
        + 2 * len(bucket.members)
        + group.world_size * FINGERPRINT_SIZE
        for bucket in plan
    ]
    sizes = [
        -(-count * bucket.dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for count, bucket in zip(counts, plan, strict=True)
    ]
    devices = {bucket.device for bucket in plan}
    device = devices.pop() if devices else torch.device("cpu")
    assert not devices, "modules on several devices are refused"
    memory = _allocate(sum(sizes), device, resolve_group(group) if is_symmetric else None)
    return tuple(
        GradientBucket(
            {names[place]: owners[place] for place in bucket.members},
            part.view(bucket.dtype)[:count],
            index=index,
            model=model,
            group=group,
            as_views=as_views,
        )
        for index, (bucket, count, part) in enumerate(zip(plan, counts, torch.split(memory, sizes), strict=True))
    )


def _allocate(size_bytes: int, device: torch.device, group: Backend | None) -> torch.Tensor:
    """Flat bytes, on the CPU symmetric in a group."""
    if group is not None and device.type == "cpu":
        try:
            return empty_symmetric((size_bytes,), torch.uint8, group=group)
        except BackendUnavailable:  # on all ranks; staging is slower, and the same bits
            pass
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)
