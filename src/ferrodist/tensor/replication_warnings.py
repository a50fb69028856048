"""Warnings of operators without a rule that a parallel model computes replicated."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ferrodist.wording import counted

if TYPE_CHECKING:
    import torch


class ReplicationWarnings:
    """Warns once of each operator in each module of a model; forwards and backwards of the model share one."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def warn(self, operator: torch._ops.OpOverload, where: str, size_bytes: float) -> None:
        """Warn that an operator's inputs are gathered, unless it was warned of before.

        Args:
            operator: The operator.
            where: The module, or the backward, as " in module 'path'".
            size_bytes: The bytes that a rank sends to gather the inputs, on average.
        """
        key = (str(operator), where)
        if key in self._known:
            return
        self._known.add(key)
        warnings.warn(
            f"{operator}{where} has no rule: its inputs are gathered, {counted(round(size_bytes), 'byte')} from each"
            " rank, and every rank computes all of it; parallelize(..., fallback='error') refuses such operators",
            stacklevel=5,
        )
