"""Attention over distributed tensors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make, spread

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.testing import run_ranks

WAYS = st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()])


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (3, 3), (1, 1), (4, 2), (8, 4), (3, 1), (4, 1), (6, 2)]),
    is_causal=st.booleans(),
    mask=st.sampled_from([None, None, (), (1, 1), (1, "heads"), ("batch", 1), ("batch", "heads")]),
    mesh_shape=st.sampled_from([(2,), (3,), (2, 2)]),
    data=st.data(),
)
def test_attention_equals_plain_attention(batch, heads, is_causal, mask, mesh_shape, data):
    of_queries, of_keys = heads
    placements = [data.draw(st.tuples(*[WAYS] * len(mesh_shape))) for _ in range(2)]
    inputs = [make(batch, of_queries, 5, 8), make(batch, of_keys, 5, 8, seed=1), make(batch, of_keys, 5, 8, seed=2)]
    placements.append(placements[1])
    if mask is not None:
        sizes = {"batch": batch, "heads": of_queries, 1: 1}
        inputs.append(make(*[sizes[one] for one in mask], 5, 5, seed=3))
        placements.append((Replicate(),) * len(mesh_shape))

    def attend(q, k, v, *masks):
        return F.scaled_dot_product_attention(
            q, k, v, *[one.detach() for one in masks], is_causal=is_causal and not masks, enable_gqa=True
        )

    def check(group):
        check_operator(DeviceMesh(group, mesh_shape), attend, inputs, placements)

    run_ranks(check, NUM_RANKS[mesh_shape])


def test_sharded_heads_are_not_redistributed():
    """Column-parallel projections shard the heads, also if several heads of queries share one of keys."""

    def attend(group):
        mesh = DeviceMesh(group, (2,))
        found = []
        for placement, of_keys in ((Shard(0), 4), (Shard(1), 4), (Shard(1), 2)):
            inputs = [make(2, 4, 3, 8), make(2, of_keys, 3, 8, seed=1), make(2, of_keys, 3, 8, seed=2)]
            sharded = [spread(one, mesh, [placement]).requires_grad_() for one in inputs]
            result = F.scaled_dot_product_attention(*sharded, is_causal=True, enable_gqa=True)
            grads = torch.autograd.grad(result, sharded, result.detach())
            found.append({(placement,)} == {one.placements for one in (result, *grads)})
        return found

    assert run_ranks(attend, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("blocks", [2, 4])
def test_grouped_heads_sharded_in_blocks(blocks):
    """Queries stay with their keys, whatever the input's sharding."""
    inputs = [make(1, 8, 3, 8), make(1, 4, 3, 8, seed=1), make(1, 4, 3, 8, seed=2)]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def check(group):
        check_operator(DeviceMesh(group, (2,)), attend, inputs, [[Shard(1, blocks=blocks)]] * 3)

    run_ranks(check, 2)


def test_single_key_head_has_partial_gradients():
    def attend(group):
        mesh = DeviceMesh(group, (2,))
        queries = spread(make(2, 4, 3, 8), mesh, [Shard(1)])
        keys = spread(make(2, 1, 3, 8), mesh, [Replicate()]).requires_grad_()
        result = F.scaled_dot_product_attention(queries, keys, keys.detach(), enable_gqa=True)
        (grad,) = torch.autograd.grad(result.sum(), [keys])
        return result.placements, grad.placements

    assert run_ranks(attend, 2) == [((Shard(1),), (Partial(),))] * 2


def test_attention_without_gradients_and_with_bool_masks():
    inputs = [make(2, 4, 5, 8), make(2, 2, 5, 8, seed=1), make(2, 2, 5, 8, seed=2), make(5, 5, dtype=torch.bool)]
    inputs[3].fill_diagonal_(fill_value=True)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placement in (Shard(0), Shard(1)):
            for count in (3, 4):
                given_ = inputs[:count], [*[[placement]] * 3, [Replicate()]][:count]

                def attend(*tensors):
                    return F.scaled_dot_product_attention(*tensors, enable_gqa=True)

                check_operator(mesh, attend, *given_)
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        check_operator(mesh, attend, *given_, backward=False)

    run_ranks(check, 2)


def test_a_rank_without_a_batch():
    """A rank whose shard is empty sends sums of the type that the others send, also in float64 with torch 2.10."""
    shapes = [(1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2)]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64) for shape in shapes]
    by_batch, twice = (Shard(0), Replicate()), (Shard(0), Shard(0))

    def program(group):
        mesh = DeviceMesh(group, (1, 2))
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        check_operator(mesh, attend, inputs, [by_batch, by_batch, twice], rtol=1e-9, atol=1e-9)

    run_ranks(program, 2)
