"""Plans of models that were not written for ferrodist: a model's own plan, by the names of Hugging Face's styles.

A transformers model has a plan of its own: ``model.tp_plan`` maps paths of modules and of parameters to names of
styles, such as ``"colwise"``. Everything inside of a parallelized model is a distributed tensor here, and gradients
follow from placements; so styles that only say how gradients are summed there replicate parameters here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ferrodist.arguments import check_type
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.tensor_parallel.experts import (
    ExpertParallel,
    ExpertStyle,
    IdentityExpert,
    TensorParallelExperts,
    takes_routing,
)
from ferrodist.parallel.tensor_parallel.layer_names import plan_by_names
from ferrodist.parallel.tensor_parallel.plan import check_path, path_matches
from ferrodist.parallel.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    Style,
    VocabularyParallel,
)
from ferrodist.tensor.placement import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from ferrodist.tensor.placement import Placement

_REPLICATED = Style()

MODULE_STYLES: Mapping[str, Style] = {
    "colwise": ColumnParallel(),
    "colwise_gather_output": ColumnParallel(outputs=Replicate()),
    "colwise_rep": ColumnParallel(outputs=Replicate()),
    "rowwise": RowParallel(),
    "rowwise_split_input": RowParallel(),  # it shards a full input by itself
    "rowwise_rep": RowParallel(),
    "packed_colwise": ColumnParallel(blocks=2),
    "embedding_rowwise": VocabularyParallel(),
    "embedding_colwise": Style(parameters={"weight": Shard(1)}, wanted=Replicate(), outputs=Replicate()),
    "sequence_parallel": SequenceParallel(),
    "all_reduce": Style(outputs=Replicate()),
    # Gradients of replicated parameters and inputs are summed wherever they are partial:
    "replicate": _REPLICATED,
    "replicated_with_grad_allreduce": _REPLICATED,
    "mla_kv_a_proj": _REPLICATED,
    "local_params": _REPLICATED,  # the plan names its parameters
    "moe_tp_experts": TensorParallelExperts(),
    "moe_identity_expert": IdentityExpert(),
    "ep_dispatch_experts": ExpertParallel(),
}
"""The styles of modules, by transformers' names."""

_PARAMETER_PLACEMENTS: Mapping[str, Callable[[int], Placement]] = {
    "colwise": lambda ndim: Shard(max(ndim - 2, 0)),
    "rowwise": lambda ndim: Shard(ndim - 1) if ndim > 1 else Replicate(),
    "packed_colwise": lambda ndim: Shard(ndim - 2, blocks=2) if ndim > 1 else Shard(0),
    "packed_rowwise": lambda ndim: Shard(ndim - 1, blocks=2) if ndim > 1 else Replicate(),
    "grouped_gemm": lambda _: Shard(0),
    "replicate": lambda _: Replicate(),
    "replicated_with_grad_allreduce": lambda _: Replicate(),
}
"""The placements of parameters that a plan names, by transformers' names of styles, given the number of dims."""


def find_model_plan(module: nn.Module) -> dict[str, Style]:
    """The styles of a model's own plan, by the paths of modules; of one by names if its own shards no layer.

    Experts that have none in these are sharded as the model's own plan of expert parallelism says.

    Rules for modules that the model does not have are left out, as transformers has it: plans are written for classes
    of models.

    Raises:
        ValueError: The model has no plan, or none of its rules matches a module; and no layer has a known name.
        UnsupportedOpError: The plan has a style that is not known here.
    """
    names = getattr(module, "tp_plan", None)
    names = names if isinstance(names, Mapping) else {}
    plan = resolve_names(module, names, skips_unmatched=True)
    if _has_layers(module, plan):
        return plan | _other_experts(module, plan)
    kind = type(module).__name__
    plan = {**plan_by_names(module), **plan}
    plan |= _other_experts(module, plan)
    if not plan and names:
        raise ValueError(
            f"no path of the plan of {kind} matches a module; the plan has {', '.join(map(repr, list(names)[:4]))}"
        )
    if not plan:
        raise ValueError(
            f'plan="auto" takes a model\'s own plan, its attribute tp_plan, or finds blocks of layers by their usual'
            f" names, as q_proj, k_proj, v_proj and o_proj, and {kind} has none: pass a plan, such as"
            ' {"layers.*.up": fd.ColumnParallel()}'
        )
    if not _has_layers(module, plan):
        warnings.warn(
            f"the plan of {kind} shards no layer, only {', '.join(map(repr, plan))}: pass one with the layers' paths",
            stacklevel=4,
        )
    return plan


def _other_experts(module: nn.Module, plan: Iterable[str]) -> dict[str, Style]:
    """The styles that a model's own plan of expert parallelism, `ep_plan`, has for experts that a plan leaves out."""
    names = getattr(module, "ep_plan", None)
    if not isinstance(names, Mapping):
        return {}
    paths = [path for path, _ in module.named_modules()]
    taken = {path for pattern in plan for path in _matching(pattern, paths)}
    return {
        pattern: style
        for pattern, style in resolve_names(module, names, skips_unmatched=True).items()
        if isinstance(style, ExpertStyle) and not taken.intersection(_matching(pattern, paths))
    }


def _has_layers(module: nn.Module, plan: Iterable[str]) -> bool:
    """Return whether a plan names a module inside of a list."""
    paths = [path for path, _ in module.named_modules() if any(part.isdecimal() for part in path.split("."))]
    return any(_matching(pattern, paths) for pattern in plan)


def read_plan(module: nn.Module, plan: Mapping[str, Style | str] | str) -> dict[str, Style]:
    """The styles that a user's plan gives: "auto", or a mapping whose styles may be names."""
    if not isinstance(plan, str):
        return resolve_names(module, plan)
    if plan != "auto":
        raise ValueError(f'plan must be "auto" or a mapping from paths to styles, not {plan!r}')
    return find_model_plan(module)


def resolve_names(
    module: nn.Module, plan: Mapping[str, Style | str], *, skips_unmatched: bool = False
) -> dict[str, Style]:
    """A plan with transformers' names of styles as a plan of styles, by paths of modules.

    Names may be those of parameters, too. ``skips_unmatched`` leaves out paths that match nothing, which otherwise
    stay, for an error.
    """
    check_type(plan, Mapping, 'a plan is "auto" or a mapping from paths to styles')
    modules = dict(module.named_modules())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[str, Style] = {}
    placed: dict[str, dict[str, Placement]] = {}  # of the owners of parameters that the plan names
    for path, style in plan.items():
        check_path(path)
        if not isinstance(style, str):
            if not skips_unmatched or _matching(path, modules):
                found[path] = style
            continue
        own = [name for name in _matching(path, parameters) if name not in modules]
        for name in own:
            owner, _, key = name.rpartition(".")
            placed.setdefault(owner, {})[key] = _place_parameter(name, style, parameters[name].dim())
        matched = _matching(path, modules)
        if own and not matched:
            continue
        if matched or not skips_unmatched:
            found[path] = _find_style(path, style)
    return _add_placements(modules, found, placed)


def _matching(path: str, names: Iterable[str]) -> list[str]:
    """The names that a path with wildcards matches, part by part."""
    return [name for name in names if path_matches(name, path)]


def _find_style(path: str, name: str) -> Style:
    if name not in MODULE_STYLES:
        raise UnsupportedOpError(
            f"the plan's style {name!r} for {path!r} is not known; known are {', '.join(sorted(MODULE_STYLES))}: pass"
            " a plan with a Style for it"
        )
    return MODULE_STYLES[name]


def _place_parameter(name: str, style: str, ndim: int) -> Placement:
    if style not in _PARAMETER_PLACEMENTS:
        raise UnsupportedOpError(
            f"the plan's style {style!r} for the parameter {name!r} is not known; known are"
            f" {', '.join(sorted(_PARAMETER_PLACEMENTS))}: pass a plan with a Style for its module"
        )
    return _PARAMETER_PLACEMENTS[style](ndim)


def _add_placements(
    modules: Mapping[str, nn.Module], found: dict[str, Style], placed: Mapping[str, Mapping[str, Placement]]
) -> dict[str, Style]:
    """Add the placements of parameters to the styles of their owners.

    A path with wildcards that matches an owner is replaced by the paths of all modules that it matches.
    """
    plan: dict[str, Style] = {}
    for pattern, style in found.items():
        matched = _matching(pattern, modules)
        names = matched if set(matched) & set(placed) else [pattern]
        plan |= dict.fromkeys(names, style)
    for owner, placements in placed.items():
        style = plan.get(owner, _REPLICATED)
        own = {key: style.placement_of(key, one) for key, one in modules[owner].named_parameters(recurse=False)}
        if isinstance(style, TensorParallelExperts) and not takes_routing(modules[owner]):
            # It computes all experts for all tokens, as Llama 4's, by products of the stacked weights.
            plan[owner] = Style(parameters=placements, outputs=Replicate())
        elif isinstance(style, ExpertStyle):
            plan[owner] = replace(style, parameters={**style.parameters, **placements})
        else:
            io = style.preparation()
            plan[owner] = Style(parameters={**own, **placements}, wanted=io.wanted, outputs=io.outputs)
    return plan
