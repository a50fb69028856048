"""Methods of a parallel model that call its forwards, such as ``generate``, with full plain tensors as results."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import DistributedError, RankFailedError, add_error_context, ranks_text
from ferrodist.parallel.tensor_parallel.wrapped_forwards import gather, map_nested

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.parallel.tensor_parallel.wrapped_forwards import ParallelState


class GatheredMethod:
    """A method such as ``generate``, which calls the model's forwards and works on their caches.

    All ranks call it, with the same inputs, and draw the same random numbers. The ranks compare what it gives to
    forwards and what it returns, and an error on one rank is one on all.
    """

    def __init__(self, method: Callable[..., Any], state: ParallelState) -> None:
        functools.update_wrapper(self, method)
        self._method, self._state = method, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; its results are plain tensors."""
        state = self._state
        check = state.make_check()

        def gather_result(tensor: torch.Tensor) -> torch.Tensor:
            full = gather(tensor)
            check.record("the result", full, state.mesh)
            return full

        try:
            with state.checking(check):
                result = map_nested(gather_result, self._method(*args, **kwargs))
        except Exception:
            with contextlib.suppress(DistributedError):  # if the others are in another collective, they raise in that
                self._agree_on_end(failed=True)
            raise
        self._agree_on_end(failed=False)
        return result

    def _agree_on_end(self, *, failed: bool) -> None:
        """Raise RankFailedError if the method failed on another rank; all ranks call this at its end."""
        group, name = self._state.mesh.group, getattr(self._method, "__name__", "a method")
        if group.world_size == 1 or group.failure is not None:
            return
        with add_error_context(
            lambda: f"Rank {group.rank} was at the end of {name}() of a parallelized model.",
            "Every rank must call it, with the same inputs and the same state of torch's random generator.",
        ):
            ends = share_bytes(group, "end_of_method", bytes([failed]), group.timeout)
        ranks = tuple(rank for rank, end in enumerate(ends) if end == b"\1")
        if ranks and not failed:
            raise RankFailedError(
                f"{name}() of a parallelized model failed on {ranks_text(ranks)} of group {group.name!r}, and ends on"
                " all ranks: see the error there",
                ranks=ranks,
            )
