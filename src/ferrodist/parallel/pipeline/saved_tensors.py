"""What a node of autograd's graph keeps of the forward: whether hooks made it, and how to let it go."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

from ferrodist.parallel.pipeline.backward_graph import is_python_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch.autograd.graph import Node

__all__ = ["has_packed_tensors", "release_saved"]


class _SavedTensor(Protocol):
    """torch's ``SavedTensor``, which its types don't describe."""

    @property
    def data(self) -> object: ...

    @property
    def unpack_hook(self) -> object: ...

    def register_hooks(self, pack: Callable[[torch.Tensor], object], unpack: Callable[[object], torch.Tensor]) -> None:
        """Give the tensor to ``pack``, and keep what that returns in its place."""


def has_packed_tensors(node: Node) -> bool:
    """Whether saved-tensor hooks stand between a node and what it saved: checkpoints, or tensors in other memory."""
    return any(saved.unpack_hook is not None for saved in _saved(node))


def release_saved(nodes: Iterable[Node]) -> None:
    """Let go of what nodes have saved, as the engine does behind itself where it doesn't keep the graph.

    What hooks have packed stays theirs. To go through a node again is an error.
    """
    for node in nodes:
        for saved in _saved(node):
            if saved.unpack_hook is None and saved.data is not None:
                saved.register_hooks(_drop, _refuse)  # the only way from Python


def _saved(node: Node) -> Iterator[_SavedTensor]:
    # There is a class for each Function of Python; they are not to be kept in a cache.
    for name in ("_raw_saved_tensors",) if is_python_function(node) else _names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, (tuple, list)):
            yield from saved
        else:
            yield saved


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _drop(_: torch.Tensor) -> None:
    """Keep nothing."""


def _refuse(_: object) -> torch.Tensor:
    raise RuntimeError("this graph was used up by a backward in two phases: call the stage's forward again")
