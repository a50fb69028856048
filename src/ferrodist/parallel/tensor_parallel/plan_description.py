"""`describe_plan`: the placements, bytes and collectives that a plan gives a model, before anything is sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ferrodist.arguments import check_type
from ferrodist.parallel.tensor_parallel.experts import ExpertParallel, TensorParallelExperts
from ferrodist.parallel.tensor_parallel.model_plan import read_plan
from ferrodist.parallel.tensor_parallel.parallelize import check_mesh
from ferrodist.parallel.tensor_parallel.plan import parameter_placements, resolve_plan
from ferrodist.parallel.tensor_parallel.styles import ColumnParallel, RowParallel, VocabularyParallel
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.mesh import DeviceMesh
    from ferrodist.parallel.tensor_parallel.styles import Style


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    shape: tuple[int, ...]
    placement: str
    size_bytes: int  # of this rank's shard
    forward: str  # the module's collectives in a forward


def describe_plan(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style | str] | str = "auto") -> str:
    """A table of the parameters of a model under a plan of `parallelize`; no other rank is needed, nothing is changed.

    Each line has a parameter's name, its shape, its placement, the bytes of this rank's shard, and, at the first
    parameter of a module, the collective that its style takes in a forward. Others may follow from the operators
    between modules: `record_redistributions` shows those of a run. The last lines have the sums, and numbers of heads
    that the ranks can't share evenly.

    Args:
        module: The model; its parameters may be on the meta device.
        mesh: The ranks, along one axis.
        plan: The plan, as `parallelize` takes it.

    Raises:
        TypeError: An argument has the wrong type, or a style is for another class of modules.
        ValueError: As `parallelize`: the mesh has several axes, or the plan does not fit the model.
        UnsupportedOpError: The plan has a style that is not known.
    """
    check_mesh(mesh)
    check_type(module, nn.Module, "describe_plan takes a torch.nn.Module")
    styles = resolve_plan(module, read_plan(module, plan))
    placements = parameter_placements(module, styles)
    rows: list[_Row] = []
    sizes: dict[nn.Parameter, int] = {}  # a shared parameter has several rows
    for path, owner in module.named_modules():
        forward = _forward_collective(styles[path]) if path in styles else ""
        for key, parameter in owner.named_parameters(recurse=False):
            placement = placements[parameter]
            spec = DTensorSpec.make(mesh, [placement], parameter.shape, parameter.dtype, parameter.stride())
            name = f"{path}.{key}".strip(".")
            sizes[parameter] = math.prod(spec.local_shape) * parameter.element_size()
            rows.append(
                _Row(
                    name=name,
                    shape=tuple(parameter.shape),
                    placement=str(placement),
                    size_bytes=sizes[parameter],
                    forward=forward,
                )
            )
            forward = ""
    full = sum(one.numel() * one.element_size() for one in placements)
    replicated = sum(
        one.numel() * one.element_size() for one, placement in placements.items() if isinstance(placement, Replicate)
    )
    total = (
        f"{counted(len(sizes), 'parameter')}: {_mib(sum(sizes.values()))} on this rank of {mesh.size}, of"
        f" {_mib(full)}; {_mib(replicated)} of these replicated"
    )
    sharded = [row.name for row in rows if row.placement != str(Replicate())]
    return "\n".join([*_format(rows), total, *_describe_heads(module, sharded, mesh.size)])


def _describe_heads(module: nn.Module, sharded: list[str], num_ranks: int) -> list[str]:
    """Lines on numbers of heads in a transformers configuration that the ranks can't share evenly."""
    if not any("attn" in name or "attention" in name.lower() for name in sharded):
        return []
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return [
        f"{name}={count} of {type(config).__name__}: {counted(num_ranks, 'rank')} can't share the heads evenly, so each"
        " attention moves some between ranks, with the same results"
        for name, count in counts.items()
        if isinstance(count, int) and count % num_ranks
    ]


def _forward_collective(style: Style) -> str:
    """The collective of a forward of a module with a style."""
    is_replicated = isinstance(style.outputs, Replicate)
    if isinstance(style, ExpertParallel):
        return "all_gather of counts, all_to_all twice"
    if isinstance(style, RowParallel | VocabularyParallel | TensorParallelExperts):
        return "reduce_scatter" if isinstance(style.outputs, Shard) else "allreduce"
    if isinstance(style, ColumnParallel):
        return "all_gather" if is_replicated else ""
    is_sharded = any(isinstance(one, Shard) for one in style.parameters.values())
    if not (is_sharded and is_replicated):
        return ""
    return "allreduce" if isinstance(style.wanted, Shard) else "all_gather"


def _format(rows: list[_Row]) -> list[str]:
    cells = [("parameter", "shape", "placement", "MiB", "forward")]
    cells += [(row.name, str(row.shape), row.placement, f"{row.size_bytes / 2**20:.3f}", row.forward) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return [
        f"{name:{widths[0]}}  {shape:{widths[1]}}  {placement:{widths[2]}}  {size:>{widths[3]}}  {forward}".rstrip()
        for name, shape, placement, size, forward in cells
    ]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"
