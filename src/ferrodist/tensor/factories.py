"""New tensors over a mesh: what torch's functions of these names make, in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.generators import check_generators, part_of_whole
from ferrodist.tensor.layout import Layout, check_placements
from ferrodist.tensor.redistribution import redistribute_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement

    Placements = Placement | Sequence[Placement]

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]


def empty(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor whose elements are not set. Nothing is sent.

    Args:
        shape: Of the whole tensor.
        mesh: The mesh; every rank of it calls this.
        placements: How it lies, for each axis of the mesh; one placement for a mesh of one axis.
        dtype: None is torch's default.
        requires_grad: Whether it gets a gradient.
    """
    target = _layout(shape, mesh, placements, dtype)
    return _leaf(torch.empty(target.local_shape, dtype=target.dtype, device="cpu"), target, requires_grad=requires_grad)


def full(
    shape: Sequence[int],
    value: complex,
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of which every element is ``value``, whose type decides where ``dtype`` is None; else as `empty`."""
    target = _layout(shape, mesh, placements, torch.full((), value, device="cpu").dtype if dtype is None else dtype)
    # Parts of a sum are made of whole tensors.
    first = target.folded
    local = torch.full(first.local_shape, value, dtype=target.dtype, device="cpu")
    return _leaf(redistribute_local(local, first, target), target, requires_grad=requires_grad)


def zeros(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of zeros, as `full`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    return full(shape, 0, mesh=mesh, placements=placements, dtype=kind, requires_grad=requires_grad)


def ones(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of ones, as `full`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    return full(shape, 1, mesh=mesh, placements=placements, dtype=kind, requires_grad=requires_grad)


def rand(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of numbers from 0 to 1, the same that ``torch.rand(shape)`` draws in one process; else as `empty`.

    Args:
        shape: As of `empty`, and the following.
        mesh: The mesh.
        placements: How it lies.
        dtype: None is torch's default.
        requires_grad: Whether it gets a gradient.
        generator: What draws, in the same state on all ranks. None is torch's default generator, which ranks that are
            threads share: they pass one of their own each.

    Raises:
        CollectiveMismatchError: On all ranks: their generators are in different states.
    """
    target = _layout(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "rand")
    return _part(
        torch.rand(target.shape, dtype=target.dtype, generator=generator, device="cpu"),
        target,
        requires_grad=requires_grad,
    )


def randn(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of normally distributed numbers, those that ``torch.randn(shape)`` draws in one process; as `rand`."""
    target = _layout(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "randn")
    return _part(
        torch.randn(target.shape, dtype=target.dtype, generator=generator, device="cpu"),
        target,
        requires_grad=requires_grad,
    )


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """The numbers that ``torch.arange`` of the same gives, which starts from 0 when there is no ``end``; as `empty`."""
    if end is None:
        start, end = 0, start
    whole = torch.arange(start, end, step, dtype=dtype, device="cpu")
    target = _layout(whole.shape, mesh, placements, whole.dtype)
    return _part(whole, target, requires_grad=requires_grad)


def _layout(shape: Sequence[int], mesh: DeviceMesh, placements: Placements, dtype: torch.dtype | None) -> Layout:
    kind = torch.get_default_dtype() if dtype is None else dtype
    return Layout.of(mesh, check_placements(mesh, placements, shape), shape, kind)


def _part(whole: torch.Tensor, target: Layout, *, requires_grad: bool) -> DTensor:
    return _leaf(part_of_whole(whole, target), target, requires_grad=requires_grad)


def _leaf(local: torch.Tensor, layout: Layout, *, requires_grad: bool) -> DTensor:
    made = DTensor._wrap(local, layout)
    made.requires_grad_(requires_grad)
    return made
