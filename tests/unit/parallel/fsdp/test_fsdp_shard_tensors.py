"""torch's own functions on shards of parameters and gradients."""

import copy
import io
import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import ferrodist as fd
from ferrodist import FSDP, ShardingStrategy, UnsupportedOpError
from ferrodist.parallel.fsdp.shard_tensors import FlatShardTensor
from ferrodist.testing import run_ranks

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.hybrid(2),
}
INPUTS = torch.linspace(-1, 1, 24).view(4, 6)


def make():
    """A model some of whose parameters lie on one rank, so that others have empty shards of them."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5), torch.nn.Linear(5, 1))


def loss_of(model):
    return (model(INPUTS) * 30).square().mean()


def divided(model, group, **options):
    """The model on this group, with the gradients of one backward."""
    fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear, **options)
    loss_of(fsdp).backward()
    return fsdp


def with_gradients():
    model = make()
    loss_of(model).backward()
    return model


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf])
def test_clipping_by_torch_is_that_of_one_process(norm_type, foreach):
    """torch.nn.utils.clip_grad_norm_ returns the full model's norm on all ranks, and scales by it."""
    model, own = make(), with_gradients()
    expected = clip_grad_norm_(own.parameters(), 1.0, norm_type, foreach=foreach)

    def program(group):
        fsdp = divided(model, group)
        total = clip_grad_norm_(fsdp.parameters(), 1.0, norm_type, error_if_nonfinite=True, foreach=foreach)
        return total, get_total_norm(gradients(fsdp), norm_type, foreach=foreach)

    for total, left in run_ranks(program, 3):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(left, get_total_norm(gradients(own), norm_type), rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_by_torch_however_the_model_is_divided(strategy):
    """Replicas count once, and unsharded gradients aren't added up."""
    model, own = make(), with_gradients()
    expected = clip_grad_norm_(own.parameters(), 1.0)

    def program(group):
        return clip_grad_norm_(divided(model, group, strategy=STRATEGIES[strategy]).parameters(), 1.0)

    for total in run_ranks(program, 4):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_of_divided_distributed_and_plain_gradients_together(foreach):
    """A list may contain shards, DTensors and gradients of a DDP: each counts in full, once."""
    torch.manual_seed(4)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]

    def clipped(models):
        loss_of(torch.nn.Sequential(*models)).backward()
        parameters = [parameter for model in models for parameter in model.parameters()]
        norms = [clip_grad_norm_(parameters, 1.0, foreach=foreach), get_total_norm([each.grad for each in parameters])]
        return [norm.full_tensor() if isinstance(norm, fd.DTensor) else norm for norm in norms]

    expected = clipped(copy.deepcopy(layers))

    def program(group):
        first, second, third = copy.deepcopy(layers)
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        parallel = fd.parallelize(second, mesh, {"": fd.ColumnParallel()})
        return clipped([FSDP(first, group), parallel, fd.DDP(third, group)])

    for norms in run_ranks(program, 2):
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-5)


def test_norms_written_by_hand():
    """Loops around .norm() compute the full model's norm, in whatever form they access gradients."""
    model, own = make(), with_gradients()
    expected = float(get_total_norm(gradients(own)))

    def program(group):
        found = gradients(divided(model, group))
        return [
            math.sqrt(sum(each.norm().item() ** 2 for each in found)),
            math.sqrt(sum(each.detach().data.norm(2).item() ** 2 for each in found)),
            math.sqrt(sum(float((each**2).sum()) for each in found)),
            math.sqrt(sum(float(each.float().abs().square().sum()) for each in found)),
            float(torch.norm(torch.stack([torch.norm(each, 2.0) for each in found]))),
            float(torch.cat([each.view(-1) for each in found]).norm()),
            float(torch.linalg.norm(torch.cat([each.flatten() for each in found]))),
            math.sqrt(sum(float((each * each).sum()) for each in found)),
            math.sqrt(sum(float(each.mul(each.detach().clone()).sum()) for each in found)),
            math.sqrt(sum(float((each / 2 + 0.5 * each).clone().norm()) ** 2 for each in found)),
            float(torch.stack(torch._foreach_norm(torch._foreach_mul(found, 2.0))).norm()) / 2,
        ]

    for norms in run_ranks(program, 2):
        assert norms == pytest.approx([expected] * len(norms), rel=1e-5)


def test_totals_of_shards_are_those_of_whole_tensors():
    """Sums, means, extremes, counts and predicates are those of the full tensor, also with empty shards."""
    names = ("sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero")
    model, own = make(), with_gradients()
    expected = [[getattr(each, name)() for name in names] for each in gradients(own)]

    def program(group):
        return [[getattr(each, name)() for name in names] for each in gradients(divided(model, group))]

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_totals_of_results_computed_from_shards():
    """Elementwise results stay shards, also of conditions and comparisons; with plain tensors they are plain."""

    def ask(model):
        pairs = [(each.detach(), each.grad) for each in model.parameters()]
        return [
            (
                (weight * slope).sum(),
                (weight - 0.1 * slope).norm(),
                (weight > 0).sum(),
                (slope != 0).float().mean(),
                torch.where(weight > 0, weight, 0).sum(),
                weight.clamp(0).sum(),
                (1 - weight).abs().max(),
                (-slope).relu().mean(),
                slope.isfinite().all(),
            )
            for weight, slope in pairs
        ]

    model, own = make(), with_gradients()
    expected = ask(own)

    def program(group):
        fsdp = divided(model, group)
        for each in fsdp.parameters():
            assert type(torch.zeros_like(each) + each.grad) is torch.Tensor
        return ask(fsdp)

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_an_infinite_gradient_on_one_rank_is_found_on_all():
    """error_if_nonfinite raises on the ranks whose shards are finite, too, and NaN is not lost."""
    model = make()

    def program(group):
        fsdp = divided(model, group)
        largest = None
        if group.rank == 1:
            next(shard.grad for shard in fsdp.parameters() if shard.grad.numel())[0] = math.nan
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(fsdp.parameters(), 1.0, error_if_nonfinite=True)
        largest = [float(each.abs().max()) for each in gradients(fsdp)]
        return any(map(math.isnan, largest)), bool(torch.cat([each.view(-1) for each in gradients(fsdp)]).isnan().any())

    assert run_ranks(program, 2) == [(True, True)] * 2


def test_a_gradient_assigned_by_the_program_is_a_shard():
    """A tensor assigned to .grad, as after a division, has the norm of the full gradient."""
    model, own = make(), with_gradients()
    expected = get_total_norm(gradients(own)) / 2

    def program(group):
        fsdp = divided(model, group)
        for shard in fsdp.parameters():
            shard.grad = shard.grad.clone() / 2
        return clip_grad_norm_(fsdp.parameters(), math.inf)

    for total in run_ranks(program, 2):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


def test_clipping_by_value():
    """clip_grad_value_ limits each element of a shard, as of the full gradient."""
    model, own = make(), with_gradients()
    clip_grad_value_(own.parameters(), 0.5)
    expected = get_total_norm(gradients(own))

    def program(group):
        fsdp = divided(model, group)
        clip_grad_value_(fsdp.parameters(), 0.5)
        return get_total_norm(gradients(fsdp))

    for total in run_ranks(program, 2):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


def test_norms_of_the_parameters_themselves():
    """A parameter's norm is that of the full one, in whatever form a program computes it."""
    model = make()
    expected = get_total_norm(list(model.parameters())).detach()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group)
        vector = torch.nn.utils.parameters_to_vector(fsdp.parameters())
        return [get_total_norm(fsdp.parameters()), vector.norm(), vector.detach().norm()]

    for totals in run_ranks(program, 2):
        for total in totals:
            torch.testing.assert_close(total.detach(), expected, rtol=1e-5, atol=0)


PENALTIES = {
    "squares": lambda parameters: sum(each.pow(2).sum() for each in parameters),
    "norms": lambda parameters: sum(each.norm() for each in parameters),
    "1-norms": lambda parameters: sum(torch.linalg.vector_norm(each, 1) for each in parameters),
    "means": lambda parameters: sum(each.square().mean() for each in parameters),
    "products": lambda parameters: sum((each * each).sum() for each in parameters),
    "largest": lambda parameters: sum(each.abs().max() for each in parameters),
    "of all": lambda parameters: torch.nn.utils.parameters_to_vector(parameters).norm(),
}


@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties_on_weights(penalty, strategy):
    """A penalty outside of forward has the value and the gradient of one process, also at zeros."""
    model = make()
    with torch.no_grad():
        model[0].bias.zero_()

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(INPUTS).square().mean() + PENALTIES[penalty](list(model.parameters()))
            loss.backward()
            optimizer.step()
        return loss.detach()

    own = copy.deepcopy(model)
    expected = trained(own)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        return trained(fsdp), fsdp.full_state_dict()

    for loss, state in run_ranks(program, 4):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state, dict(own.state_dict()), rtol=1e-4, atol=1e-6)


WHOLE = {
    "sum along a dim": lambda gradient: gradient.sum(0),
    "norm along a dim": lambda gradient: torch.linalg.vector_norm(gradient, dim=0),
    "matrix norm": lambda gradient: torch.linalg.norm(gradient, 1),
    "largest along a dim": lambda gradient: torch.max(gradient, 0),
    "product": lambda gradient: gradient @ torch.ones(1, 1),
    "inner product": lambda gradient: torch.dot(gradient.view(-1), gradient.view(-1)),
    "standard deviation": torch.std,
    "order": lambda gradient: gradient.view(-1).topk(1),
    "distance": lambda gradient: torch.nn.functional.mse_loss(gradient, gradient * 2),
    "normal form": lambda gradient: torch.nn.functional.normalize(gradient.view(-1), dim=0),
    "inner product by letters": lambda gradient: torch.einsum("i,i->", gradient.view(-1), gradient.view(-1)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_functions_of_full_tensors_are_refused(name):
    """A function that needs the full tensor raises an error, and returns no number."""
    model = make()

    def program(group):
        fsdp = divided(model, group)
        with pytest.raises(UnsupportedOpError, match="whole tensor"):
            WHOLE[name](fsdp.module[0].weight.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_matrices_are_refused(name):
    """An optimizer that mixes the elements of a matrix would compute other steps on shards: it gets an error."""
    model = make()
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")

    def program(group):
        fsdp = divided(model, group)
        matrices = [shard for shard in fsdp.parameters() if shard.ndim == 2]
        optimizer = getattr(torch.optim, name)(matrices)
        with pytest.raises(UnsupportedOpError, match="element by element"):
            optimizer.step(lambda: loss_of(fsdp))

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
        ("AdamW", {"foreach": True, "amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("Adamax", {}),
        ("Rprop", {}),
        ("NAdam", {}),
    ],
)
def test_optimizers_step_on_shards_and_keep_plain_state(name, options):
    """Optimizers' own tensors are plain, and they step as on full parameters."""
    model = make()

    def trained(model):
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return optimizer

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group)
        states = trained(fsdp).state.values()
        state_types = {key: type(value) for state in states for key, value in state.items()}
        assert state_types.pop("momentum_buffer", FlatShardTensor) is FlatShardTensor  # copies of gradients
        assert set(state_types.values()) <= {torch.Tensor}
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    trained(own)
    for state in run_ranks(program, 2):
        for key, value in own.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_a_scaler_without_unscale():
    """GradScaler.step skips the step on all ranks when one rank's shard is infinite."""
    model = make()

    def program(group):
        fsdp = divided(model, group)
        optimizer, scaler = torch.optim.SGD(fsdp.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
        fsdp.zero_grad()
        scaler.scale(loss_of(fsdp)).backward()
        if group.rank == 1:
            next(shard.grad for shard in fsdp.parameters() if shard.grad.numel())[0] = math.inf
        before = [shard.detach().clone() for shard in fsdp.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return all(map(torch.equal, before, fsdp.parameters())), scaler.get_scale()

    assert run_ranks(program, 2) == [(True, 1.0)] * 2


def test_shards_are_saved_and_copied_as_plain_tensors():
    """torch.save, torch.load and deepcopy of shards and their gradients need no ferrodist."""
    model = make()

    def program(group):
        weight = divided(model, group).module[0].weight
        file = io.BytesIO()
        torch.save([weight, weight.grad], file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        twins = copy.deepcopy([weight, weight.grad])
        for pair in (read, twins):
            assert [type(each) for each in pair] == [torch.nn.Parameter, torch.Tensor]
            assert torch.equal(pair[0], weight)
            assert torch.equal(pair[1], weight.grad)

    run_ranks(program, 2)


def test_a_norm_that_one_rank_asks_for():
    """It waits for the others until the timeout, and names the missing call."""
    model = make()

    def program(group):
        fsdp = divided(model, group)
        if group.rank == 1:
            return
        with pytest.raises(fd.DistributedError, match="Every rank must ask for it"):
            clip_grad_norm_(fsdp.parameters(), 1.0)

    run_ranks(program, 2, timeout=4)
