"""Loading a folder of safetensors files, as Hugging Face's tools write them, straight into a model's shards.

    headers --rank 0 reads, all get them--> names of the model --> allocate from meta --> plan --> each rank reads its
    boxes of each tensor

The files' tensors become entries of a manifest, under the names that the model has for them
(`ferrodist.checkpoint.convert.transformers_weights`), and are loaded like a checkpoint's.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec
import torch

from ferrodist.arguments import check_bool, check_type
from ferrodist.checkpoint.collective_steps import all_or_none, call_on_all, resolve_group_or_alone, run_on_rank0
from ferrodist.checkpoint.convert.external_tensors import conversion_errors, manifest_of
from ferrodist.checkpoint.convert.hugging_face import find_tensors
from ferrodist.checkpoint.convert.transformers_weights import convert_entries, ignores
from ferrodist.checkpoint.format.manifest import Manifest
from ferrodist.checkpoint.format.tree import path_text
from ferrodist.checkpoint.load_distributed import check_complete, fill_targets
from ferrodist.checkpoint.load_plan import LoadPlanner
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.state import inner_module, module_state, unwrap_modules
from ferrodist.checkpoint.storage import Storage, open_storage
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.local_shards import local_shard
from ferrodist.torch_private.modules import own_buffers, own_parameters
from ferrodist.transformers_models import find_transformers_initialiser, is_transformers_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.format.manifest import TensorEntry

    Initialiser = Callable[[torch.nn.Module], object]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_ACTION = "load a folder of Hugging Face's"


@torch.no_grad()
def load_hugging_face(
    path: str | os.PathLike[str],
    model: _Module,
    *,
    group: Backend | None = None,
    strict: bool = True,
    one_reads: bool = False,
    init: Initialiser | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> _Module:
    """Load ``model.safetensors``, or several files with an index, into a model; every rank of the group calls this.

    The model may be a plain module, one that `parallelize` has sharded, an `FSDP`, or both, or this rank's stage of
    `split_model`, or a `Pipeline` of these: each rank reads the elements of its own shards and stages, in pieces of at
    most 32 MiB, and never holds a whole tensor that is sharded. Numbers are
    cast to the model's dtypes. A parameter that the model has under several names may be in the files under one.

    A transformers model gets the names and the layouts that it has for its files (transformers 5: renamed weights, the
    weights of experts stacked, projections joined or split; the prefix of the base model added or left out), by
    transformers' own tables.

    On the meta device a plain module's parameters and buffers are allocated here, on the CPU. What isn't in the files,
    such as the rotary frequencies of a transformers model (buffers that ``state_dict()`` leaves out), is initialised
    by the module that has it: by ``init``, else as ``from_pretrained`` does it, by the ``_init_weights`` of the
    transformers model around it, else by its ``reset_parameters()``. `parallelize` and `FSDP` have initialised a meta
    model in the same way already; with ``init="empty"`` all but its parameters, which are NaN until they are loaded.

    Args:
        path: The folder, or its URL.
        model: The model, which is filled in place; a meta device's parameters are replaced.
        group: The ranks that load; as for `save_distributed`.
        strict: Raise for parameters and buffers of the model that the files don't have, and for tensors of the files
            that it doesn't have. False leaves the former as they are, or initialises them if they were on the meta
            device, and leaves out the latter. What transformers says may be missing is no error.
        one_reads: Have rank 0 read for all ranks, each byte once, and send it on.
        init: ``init(module)`` initialises a module's own parameters and buffers that were on the meta device and are
            not in the files.
        storage_options: Options of fsspec's file system, if the path is a URL.
        timeout: Seconds within which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Returns:
        ``model``.

    Raises:
        DistCheckpointError: On all ranks: the folder is missing or damaged, lacks tensors or has others, a shape is
            another one, or transformers makes a tensor in a way that can't be done in parts. Some tensors may have been
            filled already.
        TypeError, ValueError: An argument is wrong, or the model has adapters of PEFT.
    """
    group, deadline = resolve_group_or_alone(group), Deadline(resolve_timeout(timeout))
    storage = call_on_all(lambda: open_storage(path, storage_options), _ACTION, str(path), group, deadline)
    files = _share_headers(storage, group, deadline)
    with all_or_none(_ACTION, storage.url, group, deadline):
        check_type(model, torch.nn.Module, "load_hugging_face takes a torch.nn.Module")
        check_bool("strict", strict)
        check_bool("one_reads", one_reads)
        if init is not None and not callable(init):
            raise TypeError(f"init must be a function of a module or None, not {type(init).__name__}")
        _refuse_adapters(model)
        parts = _find_parts(model)
        inner = parts[0].whole_model.code if parts else inner_module(model)
        shapes = parts[0].whole_model.shapes if parts else _shapes_of(inner)
        manifest = _convert(files, inner, shapes, storage.url)
        for part in parts:
            _add_tied(manifest.tensors, part.whole_model.tied)
            part.materialise(_initialiser_of(part, manifest.tensors, init))
        if not parts:
            _allocate(inner, manifest.tensors, init)
        planner = LoadPlanner(manifest, group.rank, group.world_size)
        build = planner.match({"dict": {name: {"tensor": name} for name in manifest.tensors}}, model)
        allowed = {path_text((name,)) for name in module_state(model) if ignores(inner, name, "missing")}
        planner.missing = [name for name in planner.missing if name not in allowed]
        # What other stages have is theirs to load.
        planner.unexpected = {key: path for key, path in planner.unexpected.items() if not parts or key not in shapes}
    check_complete(planner, storage.url, group, deadline, strict=strict, one_reads=one_reads)
    reader = CheckpointReader(storage, manifest, verify=False)
    fill_targets(planner, reader, storage, group, deadline, one_reads=one_reads)
    build()
    return model


def _share_headers(storage: Storage, group: Backend, deadline: Deadline) -> Manifest:
    """Return the tensors in the files, of which rank 0 reads the headers."""

    def read() -> bytes:
        with conversion_errors(storage.url):
            return msgspec.json.encode(manifest_of(storage, find_tensors(storage)))

    return msgspec.json.decode(run_on_rank0(read, _ACTION, storage.url, group, deadline), type=Manifest)


def _refuse_adapters(model: torch.nn.Module) -> None:
    """Raise ValueError for layers that PEFT has wrapped, whose names are not those of the files."""
    for path, _ in model.named_modules():
        around = path.rpartition(".")[0]
        is_of_peft = any(kind.__module__.startswith("peft.") for kind in type(model.get_submodule(around)).__mro__)
        if is_of_peft and path.rpartition(".")[2] == "base_layer":
            raise ValueError(
                f"module {around!r} ({type(model.get_submodule(around)).__name__}) is an adapter around {path!r}: load"
                " the model first, on the CPU, and add its adapters then"
            )


class _Part(Protocol):
    """A stage of a model that `split_model` has divided."""

    @property
    def whole_model(self) -> Any:
        """The whole model's ``code``, ``shapes`` and ``tied`` names."""

    def materialise(self, init: Initialiser | None = None) -> None:
        """Make the stage's tensors on the meta device real."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The stage's modules by their names in the whole model."""


def _find_parts(model: torch.nn.Module) -> list[_Part]:
    """Return the stages of a divided model that a module is, or has as a pipeline; none for other modules."""
    found: list[_Part] = []
    for each in unwrap_modules(model):
        stages = getattr(each, "inner_modules", None)
        modules: list[Any] = [stage for _, stage in stages()] if inspect.ismethod(stages) else [each]
        found += [module for module in modules if hasattr(module, "whole_model")]
    return found


def _add_tied(tensors: dict[str, TensorEntry], tied: Mapping[str, Sequence[str]]) -> None:
    """Add entries for names of tied tensors that the files have under another name, as that of another stage."""
    for name, others in tied.items():
        known = next((other for other in others if other in tensors), None)
        if name not in tensors and known is not None:
            tensors[name] = tensors[known]


def _initialiser_of(part: _Part, saved: Collection[str], init: Initialiser | None) -> Initialiser:
    """Return a function that initialises the modules of a stage whose tensors are not all saved."""
    paths = {module: path for path, module in part.named_modules()}
    init = init or find_transformers_initialiser(part.whole_model.code, cast("torch.nn.Module", part))

    def initialise(module: torch.nn.Module) -> None:
        path = paths.get(module)
        own = {**own_parameters(module), **own_buffers(module)}
        if path is None or any(f"{path}.{key}".lstrip(".") not in saved for key in own):
            (init or _find_initialiser(path or "", module))(module)

    return initialise


def _shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of a module's tensors by name."""
    state = {name: value for name, value in module_state(module).items() if isinstance(value, torch.Tensor)}
    return {name: tuple(local_shard(value).shape) for name, value in state.items()}


def _convert(files: Manifest, module: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> Manifest:
    """Return the files' tensors under the names that a module has for them."""
    if not is_transformers_model(module):
        return msgspec.structs.replace(files, tensors=dict(files.tensors))
    return msgspec.structs.replace(files, tensors=convert_entries(files, module, shapes, where))


def _allocate(module: torch.nn.Module, saved: Collection[str], init: Initialiser | None) -> None:
    """Allocate a module's tensors on the meta device, and initialise those that are not saved."""
    loaded = {value for name, value in module_state(module).items() if name in saved}
    made: dict[torch.Tensor, torch.Tensor] = {}  # by tensor on the meta device, so that tied ones stay tied
    fresh: dict[torch.nn.Module, str] = {}  # modules with tensors that are not loaded
    for path, owner in module.named_modules():
        for key, tensor in {**own_parameters(owner), **own_buffers(owner)}.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:
                real = torch.empty_like(tensor, device="cpu")
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                made[tensor] = torch.nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            setattr(owner, key, made[tensor])
            if tensor not in loaded:
                fresh[owner] = path
    new = set(made.values())
    init = init or find_transformers_initialiser(module)
    for owner, path in fresh.items():
        own = {**own_parameters(owner), **own_buffers(owner)}
        kept = {key: each.clone() for key, each in own.items() if each is not None and each not in new}
        (init or _find_initialiser(path, owner))(owner)
        for key, values in kept.items():
            getattr(owner, key).copy_(values)


def _find_initialiser(path: str, owner: torch.nn.Module) -> Initialiser:
    """The function that initialises the own tensors of a module outside of transformers models."""
    reset: Initialiser | None = getattr(type(owner), "reset_parameters", None)
    if reset is None:
        raise DistCheckpointError(
            f"module {path!r} ({type(owner).__name__}) is on the meta device, has tensors that the files don't have,"
            " and no reset_parameters(): pass init=, a function that initialises such a module's parameters and buffers"
        )
    return reset
