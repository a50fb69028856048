"""Fourier transforms, and the real view of complex numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.tensor.op_strategy import EinsumPattern, einsum_rule, make_zeros, rule_table
from ferrodist.tensor.ops.linear_algebra import heed_conjugates
from ferrodist.tensor.ops.view import DimMap, dim_map_rule

if TYPE_CHECKING:
    from ferrodist.tensor.op_strategy import LocalFunction, OpCall


def _transform(call: OpCall) -> EinsumPattern:
    """All dims but the transformed ones may be sharded."""
    ndim = call.inputs[0].ndim
    transformed = {dim % max(ndim, 1) for dim in call["dim"]}
    labels = [None if dim in transformed else dim for dim in range(ndim)]
    return EinsumPattern(inputs=[labels], outputs=[labels], linear=((0,),))


def _local_transform(call: OpCall) -> LocalFunction:
    """The operator, or empty results of an empty shard, which torch's kernels refuse."""
    if all(0 not in spec.local_shape for spec in call.placed_inputs):
        return heed_conjugates(call)
    outputs = call.outputs
    return lambda *_: make_zeros(outputs)[0]


def _split_numbers(call: OpCall) -> DimMap:
    """A new last dim has the real and the imaginary part."""
    return [*range(call.inputs[0].ndim), None]


def _join_numbers(call: OpCall) -> EinsumPattern:
    ndim = call.inputs[0].ndim - 1
    return EinsumPattern(inputs=[[*range(ndim), None]], outputs=[range(ndim)], linear=((0,),))


def _complex_view(call: OpCall) -> LocalFunction:
    """A shard may have strides of which torch makes no complex view; then the view is of a copy."""
    del call

    def view(local: torch.Tensor) -> torch.Tensor:
        is_even = all(step % 2 == 0 for step in local.stride()[:-1]) and local.storage_offset() % 2 == 0
        return torch.view_as_complex(local if is_even and local.stride(-1) == 1 else local.contiguous())

    return view


RULES = rule_table(
    (einsum_rule(_transform, local=_local_transform), "_fft_r2c.default _fft_c2r.default _fft_c2c.default"),
    (dim_map_rule(_split_numbers), "view_as_real.default"),
    (einsum_rule(_join_numbers, local=_complex_view), "view_as_complex.default"),
)
