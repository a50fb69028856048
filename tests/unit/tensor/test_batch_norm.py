"""Batch and instance normalisation of distributed tensors."""

import pytest
import torch
from operator_checks import check_everywhere, make
from torch import nn
from torch.nn import functional

import ferrodist as fd
from ferrodist import DeviceMesh, Replicate, Shard
from ferrodist.testing import run_ranks


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_equals_plain_batch_norm(training):
    """With weights, in training and evaluation, with batch and channels sharded in all ways."""
    mean, deviation = make(5, seed=1), make(5, seed=2, low=0.5)

    def norm(tensor, weight):
        # Running statistics are made anew for each call, for it changes them.
        where = {"mesh": tensor.mesh, "placements": [Replicate()] * tensor.mesh.ndim} if hasattr(tensor, "mesh") else {}
        running = [fd.distribute(one, *where.values(), src=None) if where else one.clone() for one in (mean, deviation)]
        result = functional.batch_norm(tensor, *running, weight, weight * 2, training, 0.1)
        return (result, *running)

    check_everywhere(norm, [make(4, 5, 3), make(5, seed=3)])


def test_batch_norm_of_the_model_s_input():
    """The input needs no gradient, and torch's shapes for the operator of the gradients have one all the same."""
    model = nn.BatchNorm2d(3).double()
    model(make(4, 3, 5, 2)).square().sum().backward()

    def check(group):
        mine = fd.parallelize(nn.BatchNorm2d(3).double(), DeviceMesh(group, (2,)), {"": fd.Style()})
        mine(make(4, 3, 5, 2)).square().sum().backward()
        torch.testing.assert_close(mine.weight.grad.full_tensor(), model.weight.grad)
        torch.testing.assert_close(mine.bias.grad.full_tensor(), model.bias.grad)

    run_ranks(check, 2, backend="native")


def test_instance_norm_equals_plain_instance_norm():
    check_everywhere(functional.instance_norm, [make(2, 3, 5)])


def test_statistics_of_small_floats():
    """Statistics are float32 if the weights are."""

    def norm(tensor, weight):
        return functional.batch_norm(tensor, None, None, weight, weight, training=True)

    check_everywhere(
        norm,
        [make(4, 5, 3, dtype=torch.bfloat16), make(5, dtype=torch.float32)],
        meshes=((2,),),
        partial=False,
        rtol=0.1,
        atol=0.1,
    )


def test_running_statistics_of_a_module():
    """A network with batch norms is trained and then evaluated, with sharded channels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1), nn.BatchNorm1d(2)
    ).double()
    batches = [make(4, 3, 5, seed=seed) for seed in range(3)]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        model.eval()
        return model(batches[0]).detach()

    def program(group):
        mesh = DeviceMesh(group, (2,), ("tp",))
        mine = nn.Sequential(
            nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1), nn.BatchNorm1d(2)
        ).double()
        mine.load_state_dict(state)
        full = {name: Shard(0) for name in ("weight", "bias")}
        plan = {
            "0": fd.Style(parameters=full),
            "1": fd.Style(parameters=full),
            "3": fd.Style(parameters={"weight": Shard(1)}),
        }
        fd.parallelize(mine, mesh, plan)
        got = train(mine)
        return got, {name: value.full_tensor() for name, value in mine.state_dict().items()}

    expected = train(model)
    for got, found in run_ranks(program, 2):
        torch.testing.assert_close(got, expected)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)
