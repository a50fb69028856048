"""`context_parallel`: the attention of whole models over a sharded sequence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from ferrodist.arguments import check_type
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.context_parallel import backward
from ferrodist.parallel.context_parallel.agreement import compare_calls
from ferrodist.parallel.context_parallel.arguments import NO_TENSOR_PARALLELISM
from ferrodist.parallel.context_parallel.batch import find_other_kind, stands_for_all
from ferrodist.parallel.context_parallel.layout import check_local
from ferrodist.parallel.context_parallel.multi_head import multi_head_attention
from ferrodist.parallel.context_parallel.ring import ring_attention
from ferrodist.parallel.context_parallel.ulysses import ulysses_attention
from ferrodist.parallel.program_failures import report_failure
from ferrodist.torch_private.compilers import outside_of_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.backends.base import Backend

_METHODS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}
_BACKWARDS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.backward: backward.tensor_backward,
    torch.autograd.backward: backward.backward,
    torch.autograd.grad: backward.grad,
}
_INNERMOST: ContextVar[_AttentionMode | None] = ContextVar("innermost", default=None)
"""The mode of the block that the thread is in; calls in a block inside of another count for both."""


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    method: str = "ring",
    *,
    causal: bool | None = None,
    cu_seqlens: torch.Tensor | Iterable[int] | None = None,
    timeout: float | None = None,
) -> Iterator[None]:
    """Inside the block `torch.nn.functional.scaled_dot_product_attention` attends over all ranks' tokens.

    ::

        batch = fd.context_shard_batch({"input_ids": ids, "labels": ids}, mesh["context"].group)
        with fd.context_parallel(mesh["context"], causal=True):
            model(**batch).loss.backward()

    Every call of that function by this thread counts, so the model must use it for all attention, of the sharded
    sequence only: a model of Hugging Face is made with ``attn_implementation="sdpa"``, without a cache and dropout in
    attention, and ``model=`` of `context_shard_batch` refuses others that don't fit. transformers'
    sliding windows are refused, unless no sequence is longer, and so are its layers of other kinds, as convolutions;
    other models may drop theirs without a word where they are given the mask. `torch.nn.MultiheadAttention` counts,
    too, with ``need_weights=False``, as in torch's transformer layers; its mask may only be the causal one, of this
    rank's number of tokens, with ``is_causal=True``.

    All else that a model does with tokens must be done to each by itself. An activation checkpoint runs attention anew
    in backward: call that inside of the block, too (outside of it `torch.utils.checkpoint` raises; that of another
    library may be silently wrong).

    Args:
        mesh: The axis over which the sequence is sharded, as ``mesh["context"]``; every rank of it enters the block.
        method: "ring" for `ring_attention`, or "ulysses" for `ulysses_attention`.
        causal: The attention that the mask of `context_shard_batch` stands for, which must be given for it. A call
            without a mask says it by ``is_causal``, which must not differ from ``causal`` if this is given.
        cu_seqlens: Bounds of packed documents in the whole sequence.
        timeout: Seconds for each message; None takes the group's.

    An error of the program in the block on some ranks ends the group: the others raise RankFailedError in the attention
    that they are in or call next, within 10 s.

    Raises:
        TypeError, ValueError: An argument is wrong; or by the call of attention on all ranks: it has a mask, dropout, a
            sliding window, or heads that ranks can't share, or is `torch.nn.MultiheadAttention` with ``need_weights``.
        RuntimeError: At the end of the block, if nothing in it called the function: the model has an attention of its
            own, which saw this rank's tokens only.
    """
    check_type(mesh, DeviceMesh, "mesh must be a DeviceMesh of one axis, as mesh['context']")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, as mesh['context'], not {mesh.axis_names}")
    check_type(method, str, "method must be 'ring' or 'ulysses'")
    if method not in _METHODS:
        raise ValueError(f"method must be 'ring' or 'ulysses', not {method!r}")
    check_type(causal, (bool, type(None)), "causal must be True, False or None")
    group, limit = group_and_timeout(mesh.group, timeout)
    if isinstance(cu_seqlens, Iterator):  # every call of attention reads them
        cu_seqlens = tuple(cu_seqlens)
    mode = _AttentionMode(method, group, causal=causal, options={"cu_seqlens": cu_seqlens, "timeout": limit})
    outer = _INNERMOST.get()
    token = _INNERMOST.set(mode)
    try:
        with mode:
            yield
        if outer is not None:
            outer.num_calls += mode.num_calls
        if not mode.num_calls:
            raise RuntimeError(  # noqa: TRY301 - the other ranks learn of it, too
                "context_parallel: nothing inside of the block called"
                " torch.nn.functional.scaled_dot_product_attention, so attention saw this rank's tokens only. Make a"
                ' model of Hugging Face with attn_implementation="sdpa"'
            )
    except Exception as error:
        report_failure(group, "context_parallel", error)
        raise
    finally:
        _INNERMOST.reset(token)


class _AttentionMode(TorchFunctionMode):
    """Replaces torch's attention, on the thread that enters it."""

    def __init__(self, method: str, group: Backend, *, causal: bool | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.num_calls = 0
        self._depth = 0
        self._attend, self._group, self._causal, self._options = _METHODS[method], group, causal, options

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call any function but attention."""
        if func in _BACKWARDS:  # torch calls them without the mode, which activation checkpoints need
            with self:
                return _BACKWARDS[func](*args, **kwargs or {})
        if func is scaled_dot_product_attention or func is multi_head_attention_forward:
            return self._replace_attention(func, args, kwargs or {})
        return func(*args, **kwargs or {})

    @outside_of_compiler
    def _replace_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call attention over all ranks' tokens in place of torch's function; `__torch_function__` calls this."""
        if func is multi_head_attention_forward:
            return multi_head_attention(self._attention, self._refuse, *args, **kwargs)
        # transformers' own attention gets the window as a keyword argument, and leaves it to the mask.
        caller = sys._getframe(2).f_locals  # noqa: SLF001 - public by another name
        named = caller.get("kwargs")
        window = named.get("sliding_window") if isinstance(named, dict) else None
        config = getattr(caller.get("module"), "config", None)
        return self._attention(*args, window=window, config=config, **kwargs)

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
        config: Any = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        if not torch.is_grad_enabled():
            backward.guard_checkpoints(lambda: self._depth > 0)
        try:
            causal = self._is_causal(attn_mask, is_causal=is_causal)
            # No rank's estimate of the whole length is too small where that rank has the most tokens.
            length = query.shape[-2] * self._group.world_size
            if (kind := find_other_kind(config, length)) is not None:
                raise ValueError(  # noqa: TRY301 - on all ranks
                    f"the model has layers of the kind {kind!r}, and context_parallel has only full attention"
                )
            if window is not None and window < length:
                raise ValueError(  # noqa: TRY301 - on all ranks
                    f"the model's attention has a sliding window of {window} tokens, and the whole sequence has more,"
                    " which context parallelism has no mask for"
                )
        except (TypeError, ValueError) as error:
            self._refuse(error)
        output = self._attend(
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
        return backward.mark(output)

    def _is_causal(self, mask: torch.Tensor | None, *, is_causal: bool) -> bool:
        """True if a call is causal; TypeError or ValueError if its mask can't be used."""
        if mask is None:
            if self._causal is not None and is_causal is not self._causal:
                raise ValueError(
                    f"context_parallel has causal={self._causal}, and the model calls attention with"
                    f" is_causal={is_causal}: leave out causal, if its layers differ"
                )
            return is_causal
        check_local("context_parallel", mask, "attn_mask", NO_TENSOR_PARALLELISM)
        if not stands_for_all(mask):
            raise ValueError(
                f"attention has a mask of shape {tuple(mask.shape)} for this rank's tokens, which says nothing of other"
                " ranks'. Pass the model the attention_mask of context_shard_batch, or none; packed documents are"
                " cu_seqlens of context_parallel. Biases and sliding windows can't be used"
            )
        if self._causal is None:
            raise ValueError("the mask of context_shard_batch leaves open whether attention is causal: pass causal=")
        return self._causal

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise an error in place of a call of attention, with which the other ranks are compared."""

        def describe() -> NoReturn:
            raise error

        compare_calls("context_parallel", describe, self._group, self._options["timeout"])
        raise error
