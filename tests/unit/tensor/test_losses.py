"""Losses of distributed tensors, and the bytes that cross-entropy sends."""

import pytest
import torch
import torch.nn.functional as F
from byte_counter import ByteCounter
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make, spread

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.testing import run_ranks

REDUCTIONS = st.sampled_from(["mean", "sum", "none"])
PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial()])
MESHES = st.sampled_from([(2,), (3,), (2, 2)])

ELEMENTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "cross-entropy of bits": lambda x, y, **named: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid(), **named),
    "the same from logits": lambda x, y, **named: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **named),
    "soft margin": lambda x, y, **named: F.soft_margin_loss(x, y.detach().sign(), **named),
    "divergence": lambda x, y, reduction: F.kl_div(
        x.log_softmax(1), y.softmax(1), reduction=reduction.replace("mean", "batchmean")
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@settings(max_examples=10, deadline=None)
@given(shape=st.tuples(st.integers(1, 5), st.integers(1, 5)), mesh_shape=MESHES, reduction=REDUCTIONS, data=st.data())
def test_elementwise_loss_equals_plain_loss(name, shape, mesh_shape, reduction, data):
    placements = [data.draw(st.tuples(*[PLACEMENTS] * len(mesh_shape))) for _ in range(2)]

    def loss(x, y):
        return ELEMENTWISE[name](x, y, reduction=reduction)

    def check(group):
        mesh = DeviceMesh(group, mesh_shape)
        check_operator(mesh, loss, [make(*shape), make(*shape, seed=1)], placements)

    run_ranks(check, NUM_RANKS[mesh_shape])


def test_binary_weights_are_broadcast():
    def loss(x, y, weight, positive):
        return F.binary_cross_entropy_with_logits(
            x, y.sigmoid().detach(), weight=weight.detach(), pos_weight=positive.detach()
        )

    inputs = [make(5, 3), make(5, 3, seed=1), make(5, 1, low=0), make(3, low=0)]

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            check_operator(mesh, loss, inputs, [[placement], [placement], [Replicate()], [Replicate()]])

    run_ranks(check, 2)


def test_mean_of_small_floats_does_not_overflow():
    inputs = [torch.full((64, 64), 30.0, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.float16)]

    def check(group):
        check_operator(DeviceMesh(group, (2,)), F.mse_loss, inputs, [[Shard(0)], [Shard(0)]])

    run_ranks(check, 2)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    extra=st.sampled_from([(), (), (3,), (2, 2)]),
    mesh_shape=MESHES,
    reduction=REDUCTIONS,
    weighted=st.booleans(),
    target_placement=st.sampled_from([Shard(0), Replicate()]),
    data=st.data(),
)
def test_cross_entropy_equals_the_plain_one(sizes, extra, mesh_shape, reduction, weighted, target_placement, data):
    batch, classes = sizes
    placements = data.draw(st.tuples(*[PLACEMENTS] * len(mesh_shape)))
    target = data.draw(st.lists(st.sampled_from([-100, *range(classes)]), min_size=batch, max_size=batch))
    targets = torch.tensor(target).view(batch, *[1] * len(extra)).expand(batch, *extra).contiguous()
    weights = [make(classes, low=0.1)] if weighted else []

    def loss(x, y, *weight):
        return F.cross_entropy(x, y, *[one.detach() for one in weight], reduction=reduction)

    def check(group):
        mesh = DeviceMesh(group, mesh_shape)
        full = (Replicate(),) * len(mesh_shape)
        check_operator(
            mesh,
            loss,
            [make(batch, classes, *extra), targets, *weights],
            [placements, (target_placement,) * len(mesh_shape), *[full for _ in weights]],
        )

    run_ranks(check, NUM_RANKS[mesh_shape])


def test_options_of_cross_entropy_with_sharded_classes():
    targets = torch.tensor([1, 6, -100, 0, 3])
    losses = {
        "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        "smoothed sum": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.3, reduction="sum"),
        "smoothed each": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.3, reduction="none"),
        "another index": lambda x, y: F.cross_entropy(x, y.clamp(min=0), ignore_index=6),
        "one sample": lambda x, y: F.cross_entropy(x.sum(0), y.amax()),
        "probabilities": lambda x, y: F.cross_entropy(x, x.detach().softmax(1)) + 0 * y.sum(),
    }

    def check(group):
        mesh = DeviceMesh(group, (3,))
        for function in losses.values():
            for placement in (Shard(0), Shard(1)):
                check_operator(mesh, function, [make(5, 7), targets], [[placement], [Replicate()]])
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        inputs = [make(5, 7), targets]
                        check_operator(mesh, function, inputs, [[placement], [Replicate()]], backward=False)

    run_ranks(check, 3)


def test_invalid_target_raises_as_in_torch():
    def compute(group):
        mesh = DeviceMesh(group, (2,))
        logits = spread(make(2, 6), mesh, [Shard(1)])
        with pytest.raises(IndexError, match="Target 6 is out of bounds"):
            F.cross_entropy(logits, spread(torch.tensor([0, 6]), mesh, [Replicate()]))

    run_ranks(compute, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_sharded_by_classes_are_not_gathered(reduction):
    """Cross-entropy of 8 tokens over a vocabulary of 4001: 128 kB of logits, none of which is sent."""

    def compute(group):
        mesh = DeviceMesh(group, (2,))
        logits = spread(make(8, 4001, dtype=torch.float32), mesh, [Shard(1)]).requires_grad_()
        before = group.num_bytes
        loss = F.cross_entropy(logits, spread(torch.arange(8) * 500, mesh, [Replicate()]), reduction=reduction)
        loss.sum().backward()
        assert logits.grad.placements == (Shard(1),)
        return group.num_bytes - before

    for num_bytes in run_ranks(compute, 2, backend=ByteCounter.create_group):
        assert 0 < num_bytes < 6000


def test_sharded_batch_sends_scalars_only():
    def compute(group):
        mesh = DeviceMesh(group, (2,))
        logits = spread(make(9, 400, dtype=torch.float32), mesh, [Shard(0)]).requires_grad_()
        before = group.num_bytes
        F.cross_entropy(logits, spread(torch.arange(9), mesh, [Shard(0)])).backward()
        assert logits.grad.placements == (Shard(0),)
        return group.num_bytes - before

    for num_bytes in run_ranks(compute, 2, backend=ByteCounter.create_group):
        assert 0 < num_bytes < 2000


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_that_are_added_to_a_plain_scalar(reduction):
    """As MusicGen adds up those of its codebooks: the gradient of such a sum is a plain scalar."""
    targets = torch.tensor([0, 3, -100, 2])

    def total(x, y):
        result = torch.zeros([], dtype=x.dtype)
        result += F.cross_entropy(x, y, reduction=reduction)
        result += F.mse_loss(x, x.detach() + 1, reduction=reduction)
        return result

    expected = make(4, 5).requires_grad_()
    total(expected, targets).backward()

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = spread(make(4, 5), mesh, [placement]).requires_grad_()
            total(x, spread(targets, mesh, [Replicate()])).backward()
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad)

    run_ranks(check, 2)
