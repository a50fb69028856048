"""`parallelize_experts`: experts of a model whose ranks have different tokens, as in data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from ferrodist.arguments import check_bool, check_type
from ferrodist.deadline import Deadline
from ferrodist.parallel.module_init import verify_across_ranks
from ferrodist.parallel.tensor_parallel.experts import ExpertParallel, computes_all_experts
from ferrodist.parallel.tensor_parallel.parallelize import check_mesh, restore_tensors, shard_module
from ferrodist.parallel.tensor_parallel.plan import check_tensors, parameter_placements, resolve_plan
from ferrodist.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.mesh import DeviceMesh

_Module = TypeVar("_Module", bound=nn.Module)


def parallelize_experts(
    module: _Module, mesh: DeviceMesh, plan: Mapping[str, ExpertParallel], *, averages_gradients: bool = True
) -> _Module:
    """Shard a model's experts over ranks that have different tokens; every rank of the mesh calls this.

    Only the modules that the plan names are changed: their parameters become DTensors, with the values of the mesh's
    rank 0, and their forwards take this rank's own plain tokens, any number of them, and return plain outputs for
    these. The rest of the model stays as it is: average its gradients over the ranks, as data parallelism does. All
    ranks must compute as many forwards and backwards of each such module, if need be with no tokens.

    Make optimizers after this; checkpoints have the experts as DTensors, which load into any other sharding.

    Args:
        module: The model, which is changed in place.
        mesh: The ranks, along one axis: a slice of a larger mesh by its name.
        plan: `ExpertParallel` by the paths of modules of stacked experts, as `parallelize` takes them:
            ``{"model.layers.*.mlp.experts": ExpertParallel()}``.
        averages_gradients: Whether the experts' gradients are those of the mean of the ranks' losses, as `DDP` and
            `FSDP` give them. False gives those of their sum.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument has the wrong type, the plan has other styles, or a module does not have stacked experts.
        ValueError: The mesh has several axes; a path matches no module; a parameter is distributed already or has a
            gradient. Nothing was changed.
        UnsupportedOpError: Another rank raised one of these two.
        CollectiveMismatchError: On every rank: modules or plans differ between ranks. Nothing was changed.
    """
    check_mesh(mesh)
    failure = None
    lines: list[str] = []
    styles: dict[str, ExpertParallel] = {}
    try:
        check_type(module, nn.Module, "parallelize_experts takes a torch.nn.Module")
        check_bool("averages_gradients", averages_gradients)
        styles = _resolve(module, plan)
        lines = [f"the style {style} for {path!r}" for path, style in styles.items()]
    except Exception as error:  # noqa: BLE001 - the other ranks learn it below, else they would wait for this one
        failure = error
    name = type(module).__name__
    lines.append(f"averages_gradients={averages_gradients}")
    deadline = Deadline(mesh.group.timeout)
    verify_across_ranks(lines, mesh.group, deadline, maker="parallelize_experts", module=name, failure=failure)
    before = [
        (owner, {**own_parameters(owner), **own_buffers(owner)})
        for path in styles
        for owner in module.get_submodule(path).modules()
    ]
    try:
        for path, style in styles.items():
            shard_module(module.get_submodule(path), mesh, {"": style})
    except BaseException:
        for owner, tensors in before:
            restore_tensors(owner, tensors)
        raise
    for path, style in styles.items():
        experts = module.get_submodule(path)
        scale = 1 / mesh.size if averages_gradients else 1.0
        experts.forward = style.make_forward(experts, mesh, takes_own_tokens=True, grad_scale=scale)
    return module


def _resolve(module: nn.Module, plan: Mapping[str, ExpertParallel]) -> dict[str, ExpertParallel]:
    """The styles by the paths of modules, all of which can be sharded."""
    styles: dict[str, ExpertParallel] = {}
    for path, style in resolve_plan(module, plan).items():
        experts = module.get_submodule(path)
        if computes_all_experts(experts):
            raise TypeError(
                f"{path!r} ({type(experts).__name__}) computes all experts for all tokens, and has no routing by which"
                " ranks could exchange tokens of their own: use parallelize"
            )
        if not isinstance(style, ExpertParallel):
            raise TypeError(f"parallelize_experts takes ExpertParallel() for {path!r}, not {style!r}: use parallelize")
        parameter_placements(experts, {path: style}, path)
        check_tensors(experts, None)
        styles[path] = style
    return styles
