"""The ways that values go from stage to stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAIN", "Edge", "find_edges"]

MAIN = ""
"""The name of what goes from each stage to the next one; skips have names of their own."""


class Edge(NamedTuple):
    """A way from stage to stage.

    Args:
        name: Of a skip, or that of the way to the next stage.
        source: The stage that gives.
        target: The stage that takes.
    """

    name: str
    source: int
    target: int


def find_edges(num_stages: int, skips: Mapping[str, tuple[int, int]]) -> list[Edge]:
    """All ways between stages: from each to the next, and what goes past some.

    Args:
        num_stages: Of the model.
        skips: By their names: the stage that gives it, and the one that takes it.

    Raises:
        ValueError: A skip goes nowhere, or its name is none of an argument.
    """
    edges = [Edge(MAIN, stage, stage + 1) for stage in range(num_stages - 1)]
    for name, (source, target) in skips.items():
        if not name.isidentifier():
            raise ValueError(f"the skip {name!r} is no name of an argument")
        if not 0 <= source < target < num_stages:
            raise ValueError(
                f"the skip {name!r} goes from stage {source} to stage {target}: a later one, of"
                f" {counted(num_stages, 'stage')}"
            )
        edges.append(Edge(name, source, target))
    return edges
