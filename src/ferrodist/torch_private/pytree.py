"""Private names of torch's pytrees: ``torch.utils._pytree``, 2.10 to 2.15."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
