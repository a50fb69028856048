"""Methods of a model that call its forward, on ranks that call its units as often and in the order that they need."""

import copy
import random

import pytest
import torch
from fsdp_models import INPUTS, assert_same, expected_gradients, layers, whole_gradients, wrapped

import ferrodist as fd
from ferrodist import FSDP, CollectiveMismatchError, MixedPrecision, ShardingStrategy
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupAbortedError, RankFailedError
from ferrodist.parallel.fsdp.method_rounds import MethodRounds
from ferrodist.parallel.fsdp.unit import UnitState
from ferrodist.testing import run_ranks


class Writer(torch.nn.Module):
    """Layers that are called in turn; a head that the method uses without calling it."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.out = torch.nn.Parameter(torch.empty(6))
        generator = torch.Generator().manual_seed(2)  # ranks that are threads share torch's own
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    @torch.no_grad()
    def write(self, x, steps, fail_at=-1):
        for step in range(steps):
            if step == fail_at:
                raise ValueError(f"at step {step}")
            x = self(x) + self.out
        return x

    def encode(self, x, order=(0, 1, 2)):
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x

    @torch.no_grad()
    def walk(self, x, order):
        return self.encode(x, order)

    def swallow(self, x, *, fails):
        try:
            return self.write(x, 5, 1 if fails else -1)
        except DistributedError:
            return x

    def stream(self, x):
        yield self(x)

    def descend(self, x):
        self.encode(x).sum().backward()


class Nested(torch.nn.Module):
    """Units inside of units, to any depth."""

    def __init__(self, depth=2):
        super().__init__()
        self.own = torch.nn.Linear(6, 6)
        self.inner = torch.nn.ModuleList(Nested(depth - 1) for _ in range(2 if depth else 0))

    def forward(self, x, path):
        """Go on in each of the inner modules of a path, a tree of indices."""
        x = torch.tanh(self.own(x))
        for index, rest in path:
            x = self.inner[index](x, rest) + self.own(x)
        return x

    @torch.no_grad()
    def walk(self, x, paths):
        for path in paths:
            x = self(x, path)
        return x


def make(group, model=None, wrap=(torch.nn.Linear,), **options):
    fsdp = FSDP(copy.deepcopy(model or Writer()), group, wrap=wrap, **options)
    for name in ("write", "encode", "walk", "swallow", "descend"):
        if hasattr(fsdp.module, name):
            fd.register_forward_method(fsdp, name)
    return fsdp


def inputs(rank):
    """A batch of another size on each rank; rank 2's is empty."""
    return torch.linspace(-1, 1, 6 * [2, 5, 0, 1][rank]).view(-1, 6)


def assert_freed(fsdp):
    assert {unit.state for unit in fsdp._units} == {UnitState.SHARDED}


@pytest.mark.parametrize("wrap", [torch.nn.Linear, None])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_end_at_different_lengths(run, size, wrap):
    """Ranks with other batches and numbers of steps get one process's results, and a forward works after it."""
    model = Writer()

    def program(group):
        fsdp = make(group, model, wrap=wrap)
        rank = group.rank
        for owner in (fsdp, fsdp.module):
            for steps in (3 * rank, 7 - 2 * rank, 0):
                expected = model.write(inputs(rank), steps)
                torch.testing.assert_close(owner.write(inputs(rank), steps), expected, rtol=0, atol=0)
                assert_freed(fsdp)
        torch.testing.assert_close(fsdp(INPUTS), model(INPUTS), rtol=0, atol=0)

    run(program, size)


def test_units_are_there_while_they_run(run):
    """The outermost unit stays for the whole method, and of the others one at a time: no rank has the whole model."""
    counts = []

    def program(group):
        fsdp = make(group)

        def count(*_):
            counts.append([unit.state is UnitState.GATHERED for unit in fsdp._units])

        for layer in fsdp.module.layers:
            layer.register_forward_pre_hook(count)
        fsdp.write(inputs(0), 2 + group.rank)

    run(program, 2)
    assert len(counts) == 3 * 5
    assert all(sum(row) == 2 and row[0] for row in counts)


def test_ranks_fall_into_step():
    """Ranks that begin with different units wait for each other once; then one round serves all of them."""

    def program(group):
        fsdp = make(group)
        order = [0, 1, 2] * 10
        fsdp.walk(inputs(0), order[group.rank :])

    begin, seen = MethodRounds.begin, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MethodRounds, "begin", lambda self: (seen.append(self), begin(self)))
        run_ranks(program, 3)
    assert {rounds.num_rounds for rounds in seen} == {30 + 1}


def test_quite_different_units(run):
    """Each rank has an order of its own, some units for itself alone: all get their results, in the order they ask."""
    model = Writer()

    def program(group):
        fsdp = make(group, model)
        for orders in ([[0] * 9, [1] * 5, [2] * 7], [[0, 1, 0], [], [2, 1, 0, 0, 2]], [[1, 2] * 4, [2, 1] * 4, [0]]):
            order = orders[group.rank]
            expected = model.walk(INPUTS, order)
            torch.testing.assert_close(fsdp.walk(INPUTS, order), expected, rtol=0, atol=0)
            assert_freed(fsdp)

    run(program, 3)


def random_path(numbers, depth=2):
    if not depth:
        return ()
    return tuple((numbers.randrange(2), random_path(numbers, depth - 1)) for _ in range(numbers.randrange(4)))


def test_units_inside_of_units(run):
    """A rank that is inside of a unit takes part when another gathers it, and computes on with it."""
    torch.manual_seed(3)
    model = Nested()

    def program(group):
        fsdp = make(group, model, wrap=Nested)
        numbers = random.Random(group.rank)
        for _ in range(6):
            paths = [random_path(numbers) for _ in range(numbers.randrange(3))]
            expected = model.walk(INPUTS, paths)
            torch.testing.assert_close(fsdp.walk(INPUTS, paths), expected, rtol=0, atol=0)
            assert_freed(fsdp)

    run(program, 3)


@pytest.mark.parametrize("strategy", [ShardingStrategy.hybrid(2), ShardingStrategy.NO_SHARD])
def test_replicas_end_at_different_lengths(run, strategy):
    """Replicas gather by themselves, and leave the method together."""
    model = Writer()

    def program(group):
        fsdp = make(group, model, strategy=strategy)
        expected = model.write(INPUTS, 1 + 2 * group.rank)
        torch.testing.assert_close(fsdp.write(INPUTS, 1 + 2 * group.rank), expected, rtol=0, atol=0)
        with pytest.raises(ValueError if group.rank == 3 else RankFailedError, match="at step 2"):
            fsdp.write(INPUTS, 5, 2 if group.rank == 3 else -1)
        fsdp(INPUTS).sum().backward()

    run(program, 4)


def test_a_rank_without_work_joins(run):
    """It takes part until the others are done; all ranks may have nothing to do."""
    model = Writer()

    def program(group):
        fsdp = make(group, model)
        for idle in (0, 1, None):
            if group.rank == idle:
                assert fd.join_forward_method(fsdp, "write") is None
            else:
                torch.testing.assert_close(fsdp.write(INPUTS, 4), model.write(INPUTS, 4), rtol=0, atol=0)
        fd.join_forward_method(fsdp.module, "write")
        assert_freed(fsdp)

    run(program, 2)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_an_error_on_one_rank_is_one_on_all(run, fail_at):
    """The others raise in their next round, or at their end, and name it; the model and the group go on."""
    model = Writer()

    def program(group):
        fsdp = make(group, model)
        for failing in (0, 2):
            expected = ValueError if group.rank == failing else RankFailedError
            with pytest.raises(expected, match=f"at step {fail_at}") as raised:
                fsdp.write(INPUTS, 3 * (1 + group.rank), fail_at if group.rank == failing else -1)
            if group.rank != failing:
                assert raised.value.ranks == (failing,)
                assert f"write() of an FSDP model failed on rank {failing}" in str(raised.value)
            assert_freed(fsdp)
        torch.testing.assert_close(fsdp.write(INPUTS, 2), model.write(INPUTS, 2), rtol=0, atol=0)
        fsdp(INPUTS).sum().backward()
        assert group.failure is None

    run(program, 3)


def test_a_method_that_swallows_the_error():
    """The call fails nevertheless: the ranks are at other places of it."""

    def program(group):
        fsdp = make(group)
        with pytest.raises(ValueError if group.rank else RankFailedError, match="at step 1"):
            fsdp.swallow(INPUTS, fails=group.rank == 1)
        fsdp(INPUTS)

    run_ranks(program, 2)


def test_an_interrupt_aborts():
    """A rank that is interrupted waits for nobody, and the others end at once."""

    class Interrupted(Writer):
        def write(self, x, steps, rank):
            for step in range(steps):
                if rank == 1 and step == 1:
                    raise KeyboardInterrupt
                x = self(x)

    def program(group):
        fsdp = make(group, Interrupted())
        with pytest.raises(KeyboardInterrupt if group.rank else GroupAbortedError):
            fsdp.write(INPUTS, 5, group.rank)
        assert fsdp.sharded_state_dict()

    run_ranks(program, 2)


def test_different_methods():
    """All ranks name both, and the group goes on."""

    def program(group):
        fsdp = make(group)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 called write\(\), rank 1 walk\(\)"):
            fsdp.walk(INPUTS, [0]) if group.rank else fsdp.write(INPUTS, 1)
        fsdp.write(INPUTS, 1)

    run_ranks(program, 2)


def test_a_rank_that_does_not_call():
    """The others wait until the timeout, and are told to join; a forward elsewhere is a mismatch."""

    def late(group):
        fsdp = make(group)
        if group.rank == 0:
            with pytest.raises(DistributedTimeoutError, match=r"write\(\) of an FSDP model.*join_forward_method"):
                fsdp.write(INPUTS, 1)

    def other(group):
        fsdp = make(group)
        with pytest.raises(CollectiveMismatchError, match="begin_method"):
            fsdp(INPUTS) if group.rank else fsdp.write(INPUTS, 1)

    run_ranks(late, 2, timeout=1)
    run_ranks(other, 2)


def test_a_backward_follows(run):
    """The results of two calls have the gradients of one process, and a forward after them, too."""
    model = Writer()

    def loss(encode):
        return (encode(INPUTS) ** 2).sum() + encode(INPUTS, (2, 0)).sum()

    expected = expected_gradients(model, lambda own: loss(own.encode))

    def program(group):
        fsdp = make(group, model)
        loss(fsdp.encode).backward()
        assert_same(whole_gradients(fsdp), expected)
        assert_freed(fsdp)
        fsdp.zero_grad()
        with torch.no_grad():
            fsdp.encode(INPUTS, (0,) * (1 + group.rank))
        fsdp(INPUTS).sum().backward()

    run(program, 2)


def test_a_backward_that_ranks_would_not_share():
    """Ranks that called different units get an error before the backward, and a backward inside of a method, too."""

    def program(group):
        fsdp = make(group)
        with pytest.raises(CollectiveMismatchError, match=r"encode\(\).*requires grad.*no_grad"):
            fsdp.encode(INPUTS, (0,) * (1 + group.rank))
        with pytest.raises(TypeError, match="a backward inside of a registered forward method"):
            fsdp.descend(INPUTS)
        fsdp.encode(INPUTS).sum().backward()
        assert_freed(fsdp)

    run_ranks(program, 2)


def test_methods_inside_of_others():
    """Inside of a forward, a method, and `summon_full_params` a method is called as it is, and a forward as well."""
    model = Writer()

    class Caller(Writer):
        def forward(self, x):
            return self.encode(x)

        def write(self, x, steps):
            for _ in range(steps):
                x = self.wrapper(self.encode(x))
            return x

    def program(group):
        fsdp = make(group, Caller())
        object.__setattr__(fsdp.module, "wrapper", fsdp)
        expected = model.encode(INPUTS)
        torch.testing.assert_close(fsdp(INPUTS), expected, rtol=0, atol=0)
        with torch.no_grad():
            got = fsdp.write(INPUTS, 1 + group.rank)
        for _ in range(1 + 2 * group.rank):
            expected = model.encode(expected)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        with fsdp.summon_full_params():
            torch.testing.assert_close(fsdp.module.encode(INPUTS), model.encode(INPUTS), rtol=0, atol=0)

    run_ranks(program, 2)


def test_a_method_of_an_inner_module(run):
    """It gathers what it calls, and the parameters that the outermost unit has."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.writer = Writer()

        def forward(self, x):
            return self.writer(x)

    model = Outer()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        fd.register_forward_method(fsdp.module.writer, "write")
        got = fsdp.module.writer.write(INPUTS, 1 + group.rank)
        torch.testing.assert_close(got, model.writer.write(INPUTS, 1 + group.rank), rtol=0, atol=0)
        assert not hasattr(fsdp, "write")

    run(program, 2)


def test_mixed_precision_and_prefetched_units(run):
    """Inputs are cast as a forward's, and units that were gathered ahead are gathered when they are called."""

    model = Writer()
    half = copy.deepcopy(model).bfloat16()

    def program(group):
        fsdp = make(group, model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        fsdp(INPUTS)
        fsdp.prefetch_forward_params()
        got = fsdp.walk(INPUTS, [2] * (1 + group.rank))
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got, half.walk(INPUTS.bfloat16(), [2] * (1 + group.rank)), rtol=0, atol=0)
        assert_freed(fsdp)

    run(program, 2)


def test_training_goes_on_between(run):
    """Gradients that wait for others of a step, and the order of forwards, are untouched by a method between steps."""
    model = layers()
    model.write = Writer.write.__get__(model)
    model.out = torch.zeros(6)

    def program(group):
        results = []
        for writes in (False, True):
            fsdp = wrapped(model, group)
            fsdp.module.write = Writer.write.__get__(fsdp.module)
            fd.register_forward_method(fsdp, "write")
            optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
            for _ in range(3):
                with fsdp.no_sync():
                    fsdp(INPUTS).sum().backward()
                if writes:
                    fsdp.write(INPUTS, 1 + group.rank)
                fsdp(INPUTS).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(fsdp.full_state_dict())
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name], value, rtol=0, atol=0)

    run(program, 2)


def test_wrong_arguments():
    """Each names the argument; a module without FSDP is left alone, and a second registration changes nothing."""

    def program(group):
        plain = Writer()
        fd.register_forward_method(plain, "write")
        fd.join_forward_method(plain, "write")
        assert "write" not in vars(plain)
        fsdp = make(group)
        registered = fsdp.write
        fd.register_forward_method(fsdp.module, "write")
        assert fsdp.write is registered is fsdp.module.write
        for name, kind, text in [
            ("draw", ValueError, "a Writer has no method 'draw'"),
            ("forward", ValueError, "'forward' is a method of every"),
            ("state_dict", ValueError, "'state_dict' is a method of every"),
            ("head", TypeError, "'head' of a Writer is a sub-module"),
            ("out", TypeError, "'out' of a Writer is a .*Parameter, not a method"),
            (3, TypeError, "method_name must be"),
            ("stream", TypeError, "'stream' of a Writer returns before its code has run"),
        ]:
            with pytest.raises(kind, match=text):
                fd.register_forward_method(fsdp, name)
        with pytest.raises(TypeError, match="register_forward_method takes an FSDP"):
            fd.register_forward_method("model", "write")
        with pytest.raises(ValueError, match="'forward' was not registered"):
            fd.join_forward_method(fsdp, "forward")
        lost = make(group).module
        with pytest.raises(RuntimeError, match=r"register_forward_method\(fsdp, name\)"):
            FSDP(Writer(), group).module(INPUTS)
        lost.write(INPUTS, 1)

    run_ranks(program, 2)
