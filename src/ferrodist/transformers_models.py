"""Models of the transformers library, recognised without importing it, and how they initialise their tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ferrodist.errors import UnsupportedOpError
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def is_transformers_model(module: torch.nn.Module) -> bool:
    """Return whether a module is a transformers model."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def find_transformers_initialiser(
    root: torch.nn.Module, part: torch.nn.Module | None = None
) -> Callable[[torch.nn.Module], object] | None:
    """Return the function that initialises a module's own tensors as ``from_pretrained`` does, or None.

    It calls ``_init_weights`` of the transformers model that is around the module, of several the innermost one. A
    module with none around it has its ``reset_parameters()`` called. None if there is no transformers model in
    ``root``. Modules of ``part`` count as those of the same paths in ``root``.
    """
    models: dict[str, Any] = {}
    around: dict[torch.nn.Module, Any] = {}
    for path, module in root.named_modules():  # parents come before their children
        models[path] = module if is_transformers_model(module) else models.get(path.rpartition(".")[0])
        around[module] = models[path]
    for path, module in () if part is None else part.named_modules():
        around[module] = models.get(path)
    if not any(model is not None for model in models.values()):
        return None

    def initialise(module: torch.nn.Module) -> None:
        model = around.get(module)
        if model is not None:
            model._init_weights(module)  # noqa: SLF001 - what models of the library override for this purpose
            return
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise UnsupportedOpError(
                f"{with_article(type(module).__name__)} is on the meta device, in no transformers model, and has no"
                " reset_parameters(): pass init=, a function that initialises a module's parameters and buffers"
            )
        reset()

    return initialise
