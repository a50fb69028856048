"""Backward through activation checkpoints in `context_parallel`, which run attention anew."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import ferrodist as fd
from ferrodist.testing import run_ranks

METHODS = ["ring", "ulysses"]
UNCHECKED = {"use_reentrant": False, "determinism_check": "none"}  # compares the number of saved tensors only


def weight():
    return torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def tokens():
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def layer(x, matrix):
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (x @ matrix).chunk(3, -1))
    return x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def expected():
    matrix = weight()
    layer(layer(tokens(), matrix), matrix).square().sum().backward()
    return matrix.grad


def by_method(loss, matrix):
    loss.backward()


def by_inputs(loss, matrix):
    loss.backward(inputs=[matrix])


def by_function(loss, matrix):
    torch.autograd.backward(loss)


def by_function_of_outputs(loss, matrix):
    torch.autograd.backward([loss, loss], [torch.zeros_like(loss), torch.ones_like(loss)])


def by_grad(loss, matrix):
    (matrix.grad,) = torch.autograd.grad(loss, matrix)


def by_grad_of_a_dict(loss, matrix):
    other = torch.zeros(3, requires_grad=True)
    found = torch.autograd.grad([loss], {"matrix": matrix, "other": other}, materialize_grads=True)
    assert not found["other"].any()
    matrix.grad = found["matrix"]


def train(group, reentrant, method, backward, nested=False):
    mesh = fd.DeviceMesh(group, (-1,), ("context",))
    matrix = weight()

    def run(x, matrix):
        return checkpoint(layer, x, matrix, use_reentrant=reentrant) if nested else layer(x, matrix)

    with fd.context_parallel(mesh, method):
        x = fd.context_shard(tokens(), 1, group)
        for _ in range(2):
            x = checkpoint(run, x, matrix, use_reentrant=reentrant)
        backward(x.square().sum(), matrix)
    return fd.allreduce(matrix.grad, group=group)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backward", [by_method, by_function, by_function_of_outputs])
@pytest.mark.parametrize("nested", [False, True])
def test_reentrant_checkpoints_are_run_anew_over_all_ranks(method, backward, nested):
    """Without the mode the gradients are those of attention to a rank's own tokens, silently."""
    wanted = expected()
    for one in run_ranks(lambda group: train(group, True, method, backward, nested), 2):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "backward",
    [
        *(by_method, by_inputs, by_function, by_function_of_outputs, by_grad),
        pytest.param(
            by_grad_of_a_dict,
            marks=pytest.mark.skipif(
                "dict" not in torch.autograd.grad.__doc__, reason="autograd.grad of this torch takes no dict of inputs"
            ),
        ),
    ],
)
def test_checkpoints_are_run_anew_over_all_ranks(method, backward):
    """All ways to call backward inside of the block; a wrong mode raises CheckpointError."""
    wanted = expected()
    for one in run_ranks(lambda group: train(group, False, method, backward), 2):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}, UNCHECKED])
def test_backward_of_checkpoints_outside_of_the_block_raises(method, options):
    """Gradients would be those of attention to a rank's own tokens."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        matrix = weight()
        with fd.context_parallel(mesh, method):
            loss = checkpoint(layer, fd.context_shard(tokens(), 1, group), matrix, **options).sum()
        is_reentrant = options["use_reentrant"]
        error, match = (RuntimeError, "inside of the block") if is_reentrant else (CheckpointError, "checkpoint")
        with pytest.raises(error, match=match):
            loss.backward()

    run_ranks(program, 2)


def test_wrong_gradients_raise_as_without_the_block():
    """The engine would expand some, and sum others."""
    x = torch.ones(3, requires_grad=True)
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(1)[0], (1,), ("context",))
    q = torch.ones(1, 1, 2, 4)
    with fd.context_parallel(mesh):
        scaled_dot_product_attention(q, q, q)
        with pytest.raises(RuntimeError, match="scalar outputs"):
            (x * 2).backward()
        with pytest.raises(RuntimeError, match=r"does not fit|Mismatch in shape"):
            torch.autograd.grad(x * 2, x, torch.ones(2, 3))
        with pytest.raises(RuntimeError, match=r"does not fit|Mismatch in shape"):
            torch.autograd.backward(x * 2, torch.ones(1))
        with pytest.raises(RuntimeError, match="cannot be empty"):
            torch.autograd.backward((x * 2).sum(), inputs=[])
        with pytest.raises(RuntimeError, match="cannot be empty"):
            torch.autograd.grad((x * 2).sum(), [])
        with pytest.raises(NotImplementedError, match="is_grads_batched"):
            torch.autograd.grad(x * 2, x, torch.ones(2, 3), is_grads_batched=True)
        with pytest.raises(ValueError, match="allow_unused"):
            torch.autograd.grad((x * 2).sum(), x, allow_unused=False, materialize_grads=True)
