"""Attention of queries to blocks of keys, merged by an online softmax, and its gradients.

Each block gives its output and its log-sum-exp L, the logarithm of the sum of the exponentials of a query's scores. Two
blocks' outputs o, o' are merged by w = exp(L' - logaddexp(L, L')) to o + w (o' - o): M. Milakov and N. Gimelshein,
"Online normalizer calculation for softmax", 2018 (https://arxiv.org/abs/1805.02867). The backward of a block needs the
L and the output over all keys only: M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021
(https://arxiv.org/abs/2112.05682), and T. Dao et al., "FlashAttention", 2022 (https://arxiv.org/abs/2205.14135).

Shapes: B batch, H heads of queries, G of them for each head of keys and values, T queries, S keys, D and E the sizes of
heads of keys and values. Blocks are computed by torch's flash attention on the CPU, or by `torch.matmul` in tiles, so
that no more than `_TILE` x `_TILE` scores of each head exist at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.torch_private.attention import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    has_cpu_flash_attention,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_TILE = 512  # queries and keys at a time where torch has no kernel; 8 MB of float64 scores for 4 heads


class Block(NamedTuple):
    """A rectangle of queries and keys, as slices of two ranks' parts; ``causal`` is its lower triangle."""

    queries: slice
    keys: slice
    causal: bool


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def empty_by_tokens(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor (B, H, T, D) with tokens before heads in memory, as models have it before and after attention.

    It is no view: one that an autograd function returns can't be written to in place.
    """
    _, heads, tokens, size = shape
    strides = (tokens * heads * size, size, heads * size, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class OnlineAttention:
    """The attention of queries (B, H, T, D) to blocks of keys, merged so far.

    Args:
        query: The queries.
        value_size: The size E of a value.
        scale: The factor of scores.
    """

    def __init__(self, query: torch.Tensor, value_size: int, scale: float) -> None:
        dtype = accumulation_dtype(query.dtype)
        self._query, self._scale = query, scale
        self._output = empty_by_tokens((*query.shape[:-1], value_size), dtype, query.device).zero_()
        self._log_sum_exp = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)

    def add(self, key: torch.Tensor, value: torch.Tensor, block: Block) -> None:
        """Attend to a block of keys (B, H/G, S, D) and values (B, H/G, S, E)."""
        keys, values = key[:, :, block.keys], value[:, :, block.keys]
        for heads in _groups(self._query, key):
            output, log_sum_exp = _forward(
                self._query[:, heads, block.queries], keys, values, block.causal, self._scale
            )
            _merge(
                self._output[:, heads, block.queries], self._log_sum_exp[:, heads, block.queries], output, log_sum_exp
            )

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (B, H, T, E) in the queries' dtype, and the log-sum-exp (B, H, T). Without keys output is 0."""
        return self._output.to(self._query.dtype), self._log_sum_exp


class AttentionGradients:
    """The gradients of attention, block by block.

    Args:
        grad: The gradient of the output.
        query: The queries.
        output: The output over all keys.
        log_sum_exp: The log-sum-exp over all keys.
        scale: The factor of scores.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        scale: float,
    ) -> None:
        self._grad, self._query, self._output, self._log_sum_exp = grad, query, output, log_sum_exp
        self._scale = scale
        self.of_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))

    def add(
        self, key: torch.Tensor, value: torch.Tensor, block: Block, grads: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Add a block's gradients to that of the queries, and to ``grads`` of key and value."""
        grad_key, grad_value = (each[:, :, block.keys] for each in grads)
        for heads in _groups(self._query, key):
            at = (slice(None), heads, block.queries)
            inputs = (self._query[at], key[:, :, block.keys], value[:, :, block.keys])
            of_query, of_key, of_value = _backward(
                self._grad[at], inputs, self._output[at], self._log_sum_exp[at], block.causal, self._scale
            )
            self.of_query[at] += of_query
            grad_key += of_key
            grad_value += of_value


def _groups(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Heads of queries, one for each head of keys at a time: no key is copied for grouped heads."""
    num_groups = query.shape[1] // max(key.shape[1], 1)
    return (slice(group, None, num_groups) for group in range(num_groups))


def _merge(
    output: torch.Tensor, log_sum_exp: torch.Tensor, block_output: torch.Tensor, block_log_sum_exp: torch.Tensor
) -> None:
    """Merge a block's result into those of the blocks before, and overwrite it; none has a log-sum-exp of -inf."""
    weight = torch.sigmoid(block_log_sum_exp - log_sum_exp).unsqueeze(-1)
    output += block_output.to(output.dtype).sub_(output).mul_(weight)
    torch.logaddexp(log_sum_exp, block_log_sum_exp, out=log_sum_exp)


def _is_for_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if torch's kernel takes these tensors: it has one size of heads, and divides by sizes of 0."""
    sizes_differ = query.shape[-1] != value.shape[-1]
    return (
        has_cpu_flash_attention and query.device.type == "cpu" and not sizes_differ and 0 not in query.shape + key.shape
    )


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,  # noqa: FBT001
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of (B, H, T, D) by (B, H, S, D), with as many heads."""
    if _is_for_kernel(query, key, value):
        return cpu_flash_attention(_packed(query), _packed(key), _packed(value), causal=causal, scale=scale)
    dtype = accumulation_dtype(query.dtype)
    output = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype, device=query.device)
    log_sum_exp = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    for rows, columns, masked in _tiles(query.shape[-2], key.shape[-2], causal):
        scores = _scores(query[:, :, rows], key[:, :, columns], masked, scale)
        normalizer = scores.logsumexp(-1)
        weights = scores.sub_(normalizer.unsqueeze(-1)).exp_()
        _merge(output[:, :, rows], log_sum_exp[:, :, rows], weights @ value[:, :, columns].to(dtype), normalizer)
    return output, log_sum_exp


def _backward(  # noqa: PLR0917 - a block's tensors
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    causal: bool,  # noqa: FBT001
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    if _is_for_kernel(*inputs):
        query, key, value = (_packed(each) for each in inputs)
        return cpu_flash_attention_backward(
            _packed(grad), (query, key, value), output, log_sum_exp, causal=causal, scale=scale
        )
    dtype = log_sum_exp.dtype
    query, key, value = inputs
    grad, output = grad.to(dtype), output.to(dtype)
    grads = [torch.zeros_like(each, dtype=dtype) for each in inputs]
    weighted = (grad * output).sum(-1, keepdim=True)
    for rows, columns, masked in _tiles(query.shape[-2], key.shape[-2], causal):
        scores = _scores(query[:, :, rows], key[:, :, columns], masked, scale)
        weights = scores.sub_(log_sum_exp[:, :, rows].unsqueeze(-1)).exp_()
        grads[2][:, :, columns] += weights.mT @ grad[:, :, rows]
        of_weights = grad[:, :, rows] @ value[:, :, columns].to(dtype).mT
        of_scores = of_weights.sub_(weighted[:, :, rows]).mul_(weights).mul_(scale)
        grads[0][:, :, rows] += of_scores @ key[:, :, columns].to(dtype)
        grads[1][:, :, columns] += of_scores.mT @ query[:, :, rows].to(dtype)
    return grads[0], grads[1], grads[2]


def _packed(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim contiguous, as the kernel reads it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(num_queries: int, num_keys: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:  # noqa: FBT001
    """Rows, columns, and whether they are on the diagonal of a causal block, where each row has a key: square tiles."""
    for row in range(0, num_queries, _TILE):
        for column in range(0, min(num_keys, row + _TILE) if causal else num_keys, _TILE):
            yield slice(row, row + _TILE), slice(column, column + _TILE), causal and row == column


def _scores(query: torch.Tensor, key: torch.Tensor, masked: bool, scale: float) -> torch.Tensor:  # noqa: FBT001
    dtype = accumulation_dtype(query.dtype)
    scores = (query.to(dtype) @ key.to(dtype).mT).mul_(scale)
    if masked:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(above, -torch.inf)
    return scores
