"""Synchronised batch norm over the ranks' batches is torch's batch norm over the joined batch."""

import copy
import math
import pickle

import pytest
import torch

import ferrodist as fd
from ferrodist import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, convert_sync_batchnorm
from ferrodist.collectives.engines.reference import ReferenceEngine
from ferrodist.errors import DistributedTimeoutError, RankFailedError
from ferrodist.testing import run_ranks

SHAPES = {1: (5,), 2: (4, 3), 3: (2, 3, 2)}
PLAIN = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
SYNCHRONISED = {1: SyncBatchNorm1d, 2: SyncBatchNorm2d, 3: SyncBatchNorm3d}
NUM_CHANNELS = 3


def inputs_of(sizes, num_dims, dtype, *, offset=0.0):
    """One batch for each rank, of so many samples."""
    generator = torch.Generator().manual_seed(7)
    shape = SHAPES[num_dims]
    return [
        (torch.randn(size, NUM_CHANNELS, *shape, generator=generator, dtype=torch.float64) + offset).to(dtype)
        for size in sizes
    ]


def train(layer, batches, weights):
    """Steps of one layer: outputs, gradients of the inputs, and the layer."""
    outputs, gradients = [], []
    for given, weight in zip(batches, weights, strict=True):
        batch = given.clone().requires_grad_()
        output = layer(batch)
        (output * weight).sum().backward()
        outputs.append(output.detach())
        gradients.append(batch.grad)
    return outputs, gradients


def compare(
    sizes, num_dims=2, dtype=torch.float64, *, offset=0.0, backend="simulated", atol=None, layer_dtype=None, **options
):
    """Two steps on parts of batches beside two steps of torch's layer on whole batches."""
    steps = [inputs_of(sizes, num_dims, dtype, offset=offset), inputs_of(sizes, num_dims, dtype, offset=offset + 1.0)]
    factors = [inputs_of(sizes, num_dims, dtype), inputs_of(sizes[::-1], num_dims, dtype)]
    factors[1] = [torch.ones_like(batch) * 0.5 for batch in steps[1]]
    parameter_dtype = layer_dtype or (dtype if dtype == torch.float64 else torch.float32)
    torch.manual_seed(3)
    plain = PLAIN[num_dims](NUM_CHANNELS, dtype=parameter_dtype, **options)
    if plain.affine:
        torch.nn.init.normal_(plain.weight)
        torch.nn.init.normal_(plain.bias)
    start = copy.deepcopy(plain)
    expected_outputs, expected_gradients = train(plain, [torch.cat(s) for s in steps], [torch.cat(f) for f in factors])

    def program(group):
        layer = convert_sync_batchnorm(copy.deepcopy(start))
        assert type(layer) is SYNCHRONISED[num_dims]
        results = train(layer, [s[group.rank] for s in steps], [f[group.rank] for f in factors])
        return *results, layer.state_dict(), [p.grad for p in layer.parameters()]

    ranks = run_ranks(program, len(sizes), backend=backend)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if atol is None else {"rtol": atol, "atol": atol}
    for step in range(2):
        joined = torch.cat([rank[0][step] for rank in ranks])
        torch.testing.assert_close(joined, expected_outputs[step], **tolerance)
        joined = torch.cat([rank[1][step] for rank in ranks])
        torch.testing.assert_close(joined, expected_gradients[step], **tolerance)
    for _, _, state, gradients in ranks:
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, **tolerance)
        assert len(gradients) == len(list(plain.parameters()))
    for index, parameter in enumerate(plain.parameters()):
        total = sum(rank[3][index] for rank in ranks)
        torch.testing.assert_close(total, parameter.grad, **tolerance)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5), (3, 0, 2), (1, 1, 1)], ids=str)
def test_equals_torch_on_the_joined_batch(sizes, num_dims):
    """Outputs, running statistics and all gradients, also with unequal and empty batches."""
    compare(sizes, num_dims)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.5, "eps": 0.1}],
    ids=str,
)
def test_every_form_of_the_layer(options):
    """Options have torch's meaning."""
    compare((3, 2), **options)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_narrow_inputs(dtype, atol):
    """Half inputs are summed up in float32."""
    compare((3, 2), dtype=dtype, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-1)], ids=str)
def test_narrow_layers(dtype, atol):
    """A layer whose own tensors are half precision trains as torch's does."""
    compare((3, 2), dtype=dtype, layer_dtype=dtype, atol=atol)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("missing", [["running_mean", "running_var"], ["num_batches_tracked"]], ids=str)
def test_buffers_that_a_user_removed(missing, momentum):
    """They stay None, and the others are updated, as in torch."""
    plain = torch.nn.BatchNorm1d(2, momentum=momentum)
    for name in missing:
        setattr(plain, name, None)
    batches = [torch.randn(3, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def program(group):
        layer = convert_sync_batchnorm(copy.deepcopy(plain), group)
        return layer(batches[group.rank]), layer.state_dict()

    results = run_ranks(program, 2)
    torch.testing.assert_close(torch.cat([output for output, _ in results]), plain(torch.cat(batches)))
    for _, state in results:
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("num_features", [0, -1])
def test_no_channels(num_features):
    """A layer without channels is refused when it is made, and so is one that is converted."""
    with pytest.raises(ValueError, match="num_features of at least 1"):
        SyncBatchNorm2d(num_features)
    with pytest.raises(ValueError, match="num_features of at least 1"):
        convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(0)))


def test_one_rank_without_a_batch():
    """A group of one rank refuses an empty batch, which several ranks together refuse, too."""
    with (
        fd.use_group(fd.SimulatedBackend.create_group(1)[0]),
        pytest.raises(ValueError, match="more than one value a channel in the batches of all ranks together, not 0"),
    ):
        SyncBatchNorm2d(3)(torch.zeros(0, 3, 2, 2))


def test_values_far_from_zero():
    """Variances are not differences of large sums."""
    compare((40, 30), 1, torch.float32, offset=1000.0, atol=1e-3)


@pytest.mark.parametrize("backend", ["native", "tcp"])
def test_over_processes(backend):
    """The same over real processes."""
    compare((3, 1), backend=backend)


def test_one_rank_and_evaluation_send_nothing():
    """A group of one is torch's layer; a rank evaluates by itself."""
    layer = SyncBatchNorm2d(NUM_CHANNELS, dtype=torch.float64)
    (batch,) = inputs_of((4,), 2, torch.float64)
    plain = torch.nn.BatchNorm2d(NUM_CHANNELS, dtype=torch.float64)
    run_ranks(lambda _: torch.testing.assert_close(layer(batch), plain(batch)), 1)

    def program(group):
        own = copy.deepcopy(layer).eval()
        return own(batch) if group.rank == 0 else None

    torch.testing.assert_close(run_ranks(program, 2)[0], plain.eval()(batch))
    torch.testing.assert_close(layer.eval()(batch), plain(batch))  # without any group


class CountingCollectives(ReferenceEngine):
    """Takes down what was called."""

    def __init__(self, group):
        super().__init__(group)
        self.calls = []

    def run(self, op, sequence):
        if op.kind in ("allreduce", "all_gather"):
            self.calls.append((op.kind, op.source.numel()))
        return super().run(op, sequence)


def test_counts_of_collectives():
    """A forward is one collective, and so is a backward; none without a gradient of the input."""

    def program(group):
        group.use_engine("cpu", CountingCollectives(group))
        layer = SyncBatchNorm1d(2, group=group)
        batch = torch.randn(3, 2, requires_grad=True)
        layer(batch).sum().backward()
        layer(batch.detach()).sum().backward()
        return group.engine("cpu").calls

    for calls in run_ranks(program, 2):
        assert calls == [("all_gather", 5), ("allreduce", 4), ("all_gather", 5)]


def test_convert_keeps_the_module():
    """Same tensors, names, modes and sharing; everything else stays as it is."""
    shared = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), shared, torch.nn.Sequential(shared, torch.nn.BatchNorm2d(2).eval()), torch.nn.ReLU()
    )
    before = dict(model.state_dict(keep_vars=True))
    assert convert_sync_batchnorm(model) is model
    after = dict(model.state_dict(keep_vars=True))
    assert all(after[name] is tensor for name, tensor in before.items())
    assert after.keys() == before.keys()
    assert model[1] is model[2][0]
    assert type(model[2][1]) is SyncBatchNorm2d
    assert not model[2][1].training
    assert model[1].training
    convert_sync_batchnorm(model)  # again changes nothing
    assert type(model[1]) is SyncBatchNorm1d


def test_convert_reaches_a_layer_under_each_of_its_names():
    """One layer that a module has twice is replaced twice, by one layer."""
    layer = torch.nn.BatchNorm1d(3)
    model = convert_sync_batchnorm(torch.nn.Sequential(layer, torch.nn.ReLU(), layer))
    assert type(model[0]) is SyncBatchNorm1d
    assert model[2] is model[0]


class Widened(torch.nn.BatchNorm2d):
    """A batch norm with code of its own."""


def test_convert_refuses_other_subclasses():
    """An unconverted subclass would silently not be synchronised; the model is left unchanged."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Widened(3))
    with pytest.raises(TypeError, match=r"'1' is a Widened, a subclass of a batch norm"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is torch.nn.BatchNorm1d
    kept = torch.nn.Sequential(torch.nn.InstanceNorm1d(3), torch.nn.LazyInstanceNorm1d(), SyncBatchNorm1d(3))
    before = list(kept)
    assert all(new is old for new, old in zip(convert_sync_batchnorm(kept), before, strict=True))


class Activated(torch.nn.BatchNorm1d):
    """A batch norm with its activation."""

    def forward(self, batch):
        return super().forward(batch).relu()


class SyncActivated(SyncBatchNorm1d):
    """Its synchronised sibling, as a user writes it."""

    def forward(self, batch):
        return super().forward(batch).relu()


def _as_two(layer):
    plain = torch.nn.BatchNorm1d(layer.num_features, layer.eps, layer.momentum)
    plain.load_state_dict(layer.state_dict())
    return torch.nn.Sequential(plain, torch.nn.ReLU())


@pytest.mark.parametrize("replace", [_as_two, lambda layer: SyncActivated(layer.num_features)])
def test_convert_calls_replace_for_subclasses(replace):
    """The replacement of a layer with code of its own computes the layer over all batches."""
    batches = torch.arange(16.0).view(8, 2).square()
    expected = Activated(2)(batches)

    def program(group):
        model = convert_sync_batchnorm(torch.nn.Sequential(Activated(2).eval()), replace=replace)
        assert not model[0].training
        return model.train()(batches[group.rank * 4 :][:4])

    torch.testing.assert_close(torch.cat(run_ranks(program, 2)), expected)


def test_convert_leaves_what_replace_returns():
    """A layer that is to normalise by its own batch stays, and another result than a module is an error."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Widened(3))
    kept = model[1]
    assert convert_sync_batchnorm(model, replace=lambda layer: layer)[1] is kept
    assert type(model[0]) is SyncBatchNorm1d
    for wrong in (lambda _: None, lambda _: torch.nn.Module):
        with pytest.raises(TypeError, match=r"as for '1'"):
            convert_sync_batchnorm(model, replace=wrong)
    with pytest.raises(TypeError, match="'1' that has a Widened again"):
        convert_sync_batchnorm(model, replace=lambda layer: torch.nn.Sequential(layer, torch.nn.ReLU()))
    assert isinstance(
        convert_sync_batchnorm(Activated(2), replace=lambda _: torch.nn.Sequential()), torch.nn.Sequential
    )
    with pytest.raises(TypeError, match="replace must be a function"):
        convert_sync_batchnorm(model, replace=torch.nn.Linear(1, 1).weight)


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 3), (2, 2, 3, 2)])
def test_convert_takes_torchs_own_synchronised_layers(shape):
    """A model that torch has converted is converted once more, for inputs of any number of dims."""
    batch = torch.arange(48.0)[: math.prod(shape)].view(shape).square()
    plain = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d][len(shape) - 2](2)
    expected = plain(batch)

    def program(group):
        layer = convert_sync_batchnorm(torch.nn.SyncBatchNorm(2))
        return layer(batch.chunk(2)[group.rank]), layer.state_dict()

    (first, state), (second, _) = run_ranks(program, 2)
    torch.testing.assert_close(torch.cat([first, second]), expected)
    torch.testing.assert_close(state, plain.state_dict())


@pytest.mark.parametrize("wrapper", [fd.DDP, fd.FSDP])
def test_torchs_own_synchronised_layers_are_refused(wrapper):
    """DDP and FSDP refuse a layer that would silently be a plain batch norm, with an alternative, which works."""

    def program(group):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
        with pytest.raises(fd.UnsupportedOpError, match=r"'1' is a torch.nn.SyncBatchNorm.*convert_sync_batchnorm"):
            wrapper(model, group)
        wrapped = wrapper(convert_sync_batchnorm(model), group)
        wrapped(torch.ones(3, 2) * group.rank).sum().backward()
        return wrapped.module[1].running_mean

    first, second = run_ranks(program, 2)
    assert torch.equal(first, second)


def test_a_layer_pickles_without_its_group():
    """A file of a layer has no group, and uses the default one."""

    def program(group):
        layer = SyncBatchNorm1d(2, group=group)
        loaded = pickle.loads(pickle.dumps(layer))
        batch = torch.arange(6.0).view(3, 2) * (group.rank + 1)
        return layer(batch), loaded(batch)

    for results in run_ranks(program, 2):
        assert torch.equal(*results)


def test_a_layer_with_a_reference_to_itself_is_copied():
    """A deep copy refers to its copy."""
    layer = SyncBatchNorm1d(2)
    layer.parts = [layer]
    twin = copy.deepcopy(layer)
    assert twin.parts[0] is twin


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy])
def test_a_copy_keeps_its_group(act):
    """A copy of a layer in a part of the ranks shares statistics with that part."""

    def program(group):
        half = fd.new_group([[0, 1], [2, 3]][group.rank // 2], group=group)
        model = torch.nn.Sequential(SyncBatchNorm1d(2, group=half))
        batch = torch.randn(3, 2, generator=torch.Generator().manual_seed(group.rank))
        twin = act(model[0])
        return model(batch), twin(batch), copy.deepcopy(model)(batch), twin is model[0]

    for output, *others, is_same in run_ranks(program, 4):
        assert not is_same
        assert all(torch.equal(output, other) for other in others)


def test_in_ddp_equals_one_process():
    """A convolutional net with batch norm over two ranks learns what one process learns."""

    torch.manual_seed(0)
    one = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 2)
    ).double()
    start = copy.deepcopy(one)

    def learn(module, parameters, part):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            batch = torch.randn(8, 1, 6, 6, dtype=torch.float64, generator=generator)[part]
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()

    learn(one, one.parameters(), slice(None))

    def program(group):
        ddp = fd.DDP(convert_sync_batchnorm(copy.deepcopy(start)), group)
        learn(ddp, ddp.parameters(), slice(group.rank * 4, group.rank * 4 + 4))
        return ddp.module.state_dict()

    for state in run_ranks(program, 2):
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-8)


def test_wrong_inputs():
    """Each is refused with the reason, before communication where possible."""
    with pytest.raises(TypeError, match="group must be a ferrodist Backend"):
        SyncBatchNorm1d(3, group="world")
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        convert_sync_batchnorm([])
    with pytest.raises(ValueError, match=r"'0' is a torch\.nn\.SyncBatchNorm over a process group.*pass group="):
        convert_sync_batchnorm(torch.nn.Sequential(torch.nn.SyncBatchNorm(3, process_group=object())))
    with pytest.raises(ValueError, match="'0' is lazy"):
        convert_sync_batchnorm(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()))
    hooked = torch.nn.BatchNorm1d(3)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        convert_sync_batchnorm(hooked)
    layer = SyncBatchNorm2d(3)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.zeros(2, 3))

    def program(group):
        with pytest.raises(ValueError, match="3 channels got an input of 2"):
            SyncBatchNorm1d(3, group=group)(torch.zeros(2, 2))
        with pytest.raises(ValueError, match="more than one value a channel"):
            SyncBatchNorm1d(3, group=group)(torch.zeros(1 - group.rank, 3))
        with pytest.raises(ValueError, match="together, not 0"):
            SyncBatchNorm1d(3, group=group)(torch.zeros(0, 3))

    run_ranks(program, 2)


def test_second_derivatives_are_refused():
    """They would need another round of communication."""

    def program(group):
        batch = torch.randn(3, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(
            SyncBatchNorm1d(2, group=group)(batch).square().sum(), batch, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    run_ranks(program, 2)


def test_a_rank_that_stays_away_is_named():
    """The error says what the layer was doing."""

    def program(group):
        if group.rank == 0:
            SyncBatchNorm1d(2, group=group)(torch.randn(3, 2))

    with pytest.raises(RankFailedError) as caught:
        run_ranks(program, 2, timeout=4)
    assert isinstance(caught.value.__cause__, (DistributedTimeoutError, fd.PeerLostError))
    assert "SyncBatchNorm1d was sharing a batch's statistics" in str(caught.value)
