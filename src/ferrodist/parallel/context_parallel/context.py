"""`context_parallel`: the attention of whole models over a sharded sequence."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ferrodist.arguments import check_type
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.context_parallel.agreement import compare_calls
from ferrodist.parallel.context_parallel.ring import ring_attention
from ferrodist.parallel.context_parallel.ulysses import ulysses_attention
from ferrodist.torch_private.autograd import run_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.base import Backend

_METHODS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    method: str = "ring",
    *,
    causal: bool | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    timeout: float | None = None,
) -> Iterator[None]:
    """Inside the block `torch.nn.functional.scaled_dot_product_attention` attends over all ranks' tokens.

    ::

        batch = fd.context_shard_batch({"input_ids": ids, "labels": ids}, mesh["context"].group)
        with fd.context_parallel(mesh["context"], causal=True):
            model(**batch).loss.backward()

    Every call of that function by this thread counts, so the model must use it for all attention, of the sharded
    sequence only: a model of Hugging Face is made with ``attn_implementation="sdpa"``, without a cache, sliding windows
    and dropout in attention. All else that a model does with tokens must be done to each by itself. An activation
    checkpoint runs attention anew in backward: call that inside of the block, too (outside of it a checkpoint with
    ``use_reentrant=False`` raises).

    Args:
        mesh: The axis over which the sequence is sharded, as ``mesh["context"]``; every rank of it enters the block.
        method: "ring" for `ring_attention`, or "ulysses" for `ulysses_attention`.
        causal: The attention that the mask of `context_shard_batch` stands for, which must be given for it. A call
            without a mask says it by ``is_causal``, which must not differ from ``causal`` if this is given.
        cu_seqlens: Bounds of packed documents in the whole sequence.
        timeout: Seconds for each message; None takes the group's.

    Raises:
        TypeError, ValueError: An argument is wrong; or by the call of attention on all ranks: it has a mask, dropout, a
            sliding window, or heads that ranks can't share.
        NotImplementedError: By `torch.nn.MultiheadAttention`, whose attention is not seen here.
        RuntimeError: At the end of the block, if nothing in it called the function: the model has an attention of its
            own, which saw this rank's tokens only.
    """
    check_type(mesh, DeviceMesh, "mesh must be a DeviceMesh of one axis, as mesh['context']")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, as mesh['context'], not {mesh.axis_names}")
    if method not in _METHODS:
        raise ValueError(f"method must be 'ring' or 'ulysses', not {method!r}")
    check_type(causal, (bool, type(None)), "causal must be True, False or None")
    group, limit = group_and_timeout(mesh.group, timeout)
    mode = _AttentionMode(method, group, causal=causal, options={"cu_seqlens": cu_seqlens, "timeout": limit})
    with mode:
        yield
    if not mode.num_calls:
        raise RuntimeError(
            "context_parallel: nothing inside of the block called"
            " torch.nn.functional.scaled_dot_product_attention, so attention saw this rank's tokens only. Make a model"
            ' of Hugging Face with attn_implementation="sdpa"'
        )


class _AttentionMode(TorchFunctionMode):
    """Replaces torch's attention, on the thread that enters it."""

    def __init__(self, method: str, group: Backend, *, causal: bool | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.num_calls = 0
        self._attend, self._group, self._causal, self._options = _METHODS[method], group, causal, options

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call any function but attention."""
        if func is torch.Tensor.backward:  # torch calls it without the mode, which activation checkpoints need
            with self:
                return _backward(*args, **kwargs or {})
        if func is multi_head_attention_forward:
            raise NotImplementedError(
                "context_parallel does not see the attention inside of torch.nn.MultiheadAttention and its transformer"
                " layers: use layers that call torch.nn.functional.scaled_dot_product_attention themselves"
            )
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs or {})
        self.num_calls += 1
        # transformers' own attention gets the window as a keyword argument, and leaves it to the mask.
        caller = sys._getframe(1).f_locals.get("kwargs")  # noqa: SLF001 - public by another name
        window = caller.get("sliding_window") if isinstance(caller, dict) else None
        return self._attention(*args, window=window, **kwargs or {})

    def _attention(  # noqa: PLR0917 - torch's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        try:
            causal = self._kind_of(attn_mask, is_causal=is_causal)
            # No rank's estimate of the whole length is too small where that rank has the most tokens.
            if window is not None and window < query.shape[-2] * self._group.world_size:
                raise ValueError(  # noqa: TRY301 - on all ranks
                    f"the model's attention has a sliding window of {window} tokens, and the whole sequence has more,"
                    " which context parallelism has no mask for"
                )
        except ValueError as error:
            _raise_on_all_ranks(error, self._group, self._options["timeout"])
        return self._attend(
            query,
            key,
            value,
            group=self._group,
            causal=causal,
            scale=scale,
            enable_gqa=enable_gqa,
            dropout_p=dropout_p,
            **self._options,
        )

    def _kind_of(self, mask: torch.Tensor | None, *, is_causal: bool) -> bool:
        """True if a call is causal; ValueError if its mask can't be used."""
        if mask is None:
            if self._causal is not None and is_causal is not self._causal:
                raise ValueError(
                    f"context_parallel has causal={self._causal}, and the model calls attention with"
                    f" is_causal={is_causal}: leave out causal, if its layers differ"
                )
            return is_causal
        if not _stands_for_all(mask):
            raise ValueError(
                f"attention has a mask of shape {tuple(mask.shape)} for this rank's tokens, which says nothing of other"
                " ranks'. Pass the model the attention_mask of context_shard_batch, or none; packed documents are"
                " cu_seqlens of context_parallel. Biases and sliding windows can't be used"
            )
        if self._causal is None:
            raise ValueError("the mask of context_shard_batch leaves open whether attention is causal: pass causal=")
        return self._causal


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """`torch.Tensor.backward` by the engine itself: torch's functions hand the call to the mode, and leave that."""
    if inputs is not None or (gradient is None and tensor.numel() != 1):  # torch checks these
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
        return
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    run_backward((tensor,), (gradient,), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _raise_on_all_ranks(error: ValueError, group: Backend, timeout: float) -> NoReturn:
    """Raise an error in place of a call of attention, with which the other ranks are compared."""

    def describe() -> NoReturn:
        raise error

    compare_calls("context_parallel", describe, group, timeout)
    raise error


def _stands_for_all(mask: torch.Tensor) -> bool:
    """True if a mask is that of `context_shard_batch`: one element, True, expanded."""
    steps = [stride for stride, size in zip(mask.stride(), mask.shape, strict=True) if size > 1]
    is_one = mask.dtype is torch.bool and not any(steps)
    return is_one and (not mask.numel() or bool(mask[(0,) * mask.dim()]))
