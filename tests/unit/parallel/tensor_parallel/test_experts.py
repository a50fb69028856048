"""Experts sharded over ranks, and each sharded, against the same experts in one process."""

import copy
import threading

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist import CollectiveMismatchError, DTensor, ExpertParallel, Replicate, Shard, TensorParallelExperts
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks

WIDTH, INNER, TOP = 6, 5, 2


class Experts(nn.Module):
    """Stacked experts, written as those of transformers 5."""

    def __init__(self, num_experts=5):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(num_experts, WIDTH, INNER))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        assert len(self.gate_up_proj) == self.num_experts
        for expert in range(self.num_experts):
            rows, slots = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[rows], self.gate_up_proj[expert]).chunk(2, -1)
            made = nn.functional.linear(torch.tanh(gate) * up, self.down_proj[expert])
            result.index_add_(0, rows, made * top_k_weights[rows, slots, None])
        return result


class Block(nn.Module):
    """A router and its experts."""

    def __init__(self, num_experts=5):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, num_experts)
        self.experts = Experts(num_experts)

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weights, index = torch.topk(self.gate(flat).softmax(-1), TOP)
        return x + self.experts(flat, index, weights).view(x.shape)


SEEDING = threading.Lock()  # ranks are threads, and have one generator


def seeded(make, *args, seed=0):
    with SEEDING:
        torch.manual_seed(seed)
        return make(*args).double()


def mesh_of(group):
    return fd.DeviceMesh(group, (group.world_size,), ("expert",))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model, other, scale=1.0):
    for (name, one), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(full(one.grad) * scale, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


STYLES = {"experts": ExpertParallel(), "each": TensorParallelExperts()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("style", STYLES)
def test_replicated_tokens_give_the_results_and_gradients_of_one_process(style, size):
    """In a model given to parallelize: outputs, gradients of the input, the router and the experts, uneven sizes."""
    model, x = seeded(Block), torch.randn(1, 7, WIDTH, dtype=torch.float64)
    own = x.clone().requires_grad_()
    expected = model(own)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def program(group):
        sharded = fd.parallelize(seeded(Block), mesh_of(group), {"experts": STYLES[style]})
        its = x.clone().requires_grad_()
        got = sharded(its)
        assert type(got) is torch.Tensor
        got.backward(grad)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(its.grad, own.grad)
        assert_same_gradients(sharded, model)
        load = fd.expert_loads(sharded)["experts"]
        return load.counts.tolist(), load.imbalance

    first, *others = run_ranks(program, size)
    assert sum(first[0]) == 7 * TOP
    assert all(other == first for other in others)


def test_parameters_are_dtensors_by_experts_and_by_features():
    """Checkpoints and optimizers see shards of experts, or of the inner features, gates and ups alike."""

    def program(group):
        found = []
        for style in STYLES.values():
            model = fd.parallelize(seeded(Experts), mesh_of(group), {"": style})
            found.append(
                {name: (one.placements[0], tuple(one.to_local().shape)) for name, one in model.named_parameters()}
            )
        return found

    by_expert, by_feature = run_ranks(program, 2)[0]
    assert by_expert == {"gate_up_proj": (Shard(0), (3, 10, 6)), "down_proj": (Shard(0), (3, 6, 5))}
    assert by_feature == {"gate_up_proj": (Shard(1, blocks=2), (5, 6, 6)), "down_proj": (Shard(2), (5, 6, 3))}


def make_routing(tokens, num_experts, seed, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :TOP]
    weights = torch.rand(tokens, TOP, generator=generator, dtype=torch.float64)
    return torch.randn(tokens, width, generator=generator, dtype=torch.float64), index, weights


def share(tensor, sizes, rank):
    return tensor.split(sizes)[rank].clone()


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize(("sizes", "num_experts"), [([6], 4), ([5, 4], 4), ([6, 0, 3], 5), ([2, 4, 1], 2)])
def test_own_tokens_give_the_results_and_gradients_of_one_process(sizes, num_experts, averages):
    """Ranks with different tokens, some with none, and some without experts."""
    model = seeded(Experts, num_experts)
    tokens, index, weights = make_routing(sum(sizes), num_experts, 1)
    mine, own_weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    expected = model(mine, index, own_weights)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def program(group):
        parallel = fd.parallelize_experts(
            nn.Sequential(seeded(Experts, num_experts)),
            mesh_of(group),
            {"0": ExpertParallel()},
            averages_gradients=averages,
        )
        x, w = (share(one, sizes, group.rank).requires_grad_() for one in (tokens, weights))
        got = parallel[0](x, top_k_weights=w, top_k_index=share(index, sizes, group.rank))
        torch.testing.assert_close(got, share(expected.detach(), sizes, group.rank))
        got.backward(share(grad, sizes, group.rank))
        torch.testing.assert_close(x.grad, share(mine.grad, sizes, group.rank))
        torch.testing.assert_close(w.grad, share(own_weights.grad, sizes, group.rank))
        assert_same_gradients(parallel, model, len(sizes) if averages else 1)

    run_ranks(program, len(sizes))


def test_all_tokens_to_one_rank_over_processes():
    """A rank whose experts get nothing takes part in backward, and has gradients of zeros; with processes."""

    def program(group):
        parallel = fd.parallelize_experts(seeded(Experts, 4), mesh_of(group), {"": ExpertParallel()})
        tokens = torch.ones(3, WIDTH, dtype=torch.float64)  # without gradients, as behind a frozen embedding
        index, weights = torch.tensor([[0, 1]] * 3), torch.ones(3, TOP, dtype=torch.float64)
        parallel(tokens, index, weights).sum().backward()
        return parallel.down_proj.grad.to_local().abs().sum().item()

    first, second = run_ranks(program, 2, backend="native")
    assert first > 0
    assert second == 0


def limited(index, weights, num_experts, factor):
    """The weights without those of pairs beyond the capacity, in order of tokens."""
    capacity = -(-factor * index.numel() // num_experts)
    used, kept = [0] * num_experts, weights.clone()
    for row in range(len(index)):
        for slot, expert in enumerate(index[row].tolist()):
            used[expert] += 1
            if used[expert] > capacity:
                kept[row, slot] = 0
    return kept


@pytest.mark.parametrize("sizes", [[9], [5, 4], [2, 0, 7]])
def test_capacity_drops_the_last_tokens_whatever_the_number_of_ranks(sizes):
    """The same tokens are dropped for each number of ranks, without a gradient, and counted."""
    model = seeded(Experts, 4)
    tokens, index, weights = make_routing(9, 4, 2)
    index[:6, 0], index[:6, 1] = 3, 0
    kept = limited(index, weights, 4, 1)
    mine = tokens.clone().requires_grad_()
    expected = model(mine, index, kept)
    expected.sum().backward()

    def program(group):
        parallel = fd.parallelize_experts(
            seeded(Experts, 4), mesh_of(group), {"": ExpertParallel(capacity_factor=1)}, averages_gradients=False
        )
        x, i, w = (share(one, sizes, group.rank) for one in (tokens, index, weights))
        got = parallel(x.requires_grad_(), i, w)
        torch.testing.assert_close(got, share(expected.detach(), sizes, group.rank))
        got.sum().backward()
        torch.testing.assert_close(x.grad, share(mine.grad, sizes, group.rank))
        assert_same_gradients(parallel, model)
        load = parallel.expert_load
        return load.counts.tolist(), load.dropped.sum().item(), int((w != share(kept, sizes, group.rank)).sum())

    results = run_ranks(program, len(sizes))
    assert sum(result[2] for result in results) == results[0][1] > 0
    assert results[0][0] == torch.bincount(index.flatten(), minlength=4).tolist()


def test_a_recomputed_forward_counts_once():
    """Activation checkpointing gives the same gradients, and tokens are counted once."""

    def program(group):
        found = []
        for recomputes in (False, True):
            model = fd.parallelize(seeded(Block), mesh_of(group), {"experts": ExpertParallel()})
            x = torch.ones(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
            made = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
            made.sum().backward()
            found.append((model.experts.down_proj.grad.full_tensor(), model.experts.expert_load.counts))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    run_ranks(program, 2)


def test_training_steps_over_two_axes_equal_one_process():
    """Experts over one axis and FSDP over the other: three steps give one process's parameters."""
    model, batches = seeded(Block, 4), torch.randn(3, 2, 4, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def program(group):
        mesh = fd.DeviceMesh(group, (2, 2), ("data", "expert"))
        sharded = fd.parallelize(seeded(Block, 4), mesh["expert"], {"experts": ExpertParallel()})
        fsdp = fd.FSDP(sharded, mesh["data"])
        optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
        for batch in batches:
            optimizer.zero_grad()
            fsdp(batch[[mesh["data"].group.rank]]).square().mean().backward()
            optimizer.step()
        with fsdp.summon_full_params():
            for (name, one), other in zip(sharded.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(
                    full(one.detach()), other.detach(), msg=lambda text, name=name: f"{name}: {text}"
                )

    run_ranks(program, 4)


def test_optimizers_and_clipping_take_experts_beside_plain_parameters():
    """AdamW and clip_grad_norm_ on plain parameters and sharded experts equal one process's."""
    model = seeded(Block, 4)
    batch = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(batch).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()

    def program(group):
        parallel = fd.parallelize_experts(seeded(Block, 4), mesh_of(group), {"experts": ExpertParallel()})
        optimizer = torch.optim.AdamW(parallel.parameters(), 0.1)
        parallel(batch[[group.rank]]).square().mean().backward()
        for one in parallel.parameters():
            if not isinstance(one, DTensor):
                fd.allreduce(one.grad, op=fd.ReduceOp.MEAN, out=one.grad)
        torch.testing.assert_close(full(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.01)), norm)
        optimizer.step()
        for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(one.detach()), other.detach())

    run_ranks(program, 2)


def test_checkpoints_load_into_another_sharding(tmp_path):
    """Experts saved by three ranks load into two ranks' features, and into one process."""

    def save(group):
        model = fd.parallelize_experts(seeded(Experts), mesh_of(group), {"": ExpertParallel()})
        fd.checkpoint.save_distributed({"model": model}, tmp_path / "saved", group=group)

    def load(group):
        model = fd.parallelize(seeded(Experts, seed=1), mesh_of(group), {"": TensorParallelExperts()})
        fd.checkpoint.load_distributed(tmp_path / "saved", {"model": model}, group=group)
        for one, other in zip(model.parameters(), seeded(Experts).parameters(), strict=True):
            assert torch.equal(full(one.detach()), other.detach())

    run_ranks(save, 3)
    run_ranks(load, 2)


def test_a_sharded_sequence_stays_sharded():
    """Tokens that are sharded between layers travel from the ranks that have them, and come back there."""
    model = seeded(Experts)
    tokens, index, weights = make_routing(7, 5, 3)
    expected = model(tokens, index, weights)

    def program(group):
        mesh = mesh_of(group)
        parallel = fd.parallelize(seeded(Experts), mesh, {"": ExpertParallel()})
        got = parallel(
            fd.distribute(tokens, mesh, Shard(0)), *(fd.distribute(one, mesh, Replicate()) for one in (index, weights))
        )
        assert got.placements == (Shard(0),)
        torch.testing.assert_close(got.full_tensor(), expected)

    run_ranks(program, 2)


BAD_CALLS = {
    "a missing expert": (ValueError, "top_k_index has 9", lambda x, i, w: (x, i.fill_(9), w)),
    "weights of another shape": (ValueError, "top_k_weights of", lambda x, i, w: (x, i, w[:1])),
    "an index of floats": (TypeError, "top_k_index must be of int64", lambda x, i, w: (x, i.double(), w)),
    "a missing argument": (TypeError, "take hidden_states, top_k_index", lambda x, i, w: (x, i)),
    "no tensor": (TypeError, "hidden_states must be a torch.Tensor", lambda x, i, w: (3, i, w)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_on_one_rank_is_an_error_on_all(case):
    """The rank with the wrong input raises it by name, the others say which rank has it; the next call works."""
    kind, text, spoil = BAD_CALLS[case]

    def program(group):
        parallel = fd.parallelize_experts(seeded(Experts), mesh_of(group), {"": ExpertParallel()})
        good = make_routing(3, 5, 4)
        bad = spoil(*(one.clone() for one in good)) if group.rank == 1 else good
        with pytest.raises(kind if group.rank == 1 else UnsupportedOpError, match=text):
            parallel(*bad)
        assert parallel(*good).shape == (3, WIDTH)

    run_ranks(program, 2)


def test_ranks_that_disagree_on_gradients_or_features_are_told():
    """A backward that only some ranks would compute, and rows of other sizes, are mismatches on all ranks."""

    def program(group):
        parallel = fd.parallelize_experts(seeded(Experts), mesh_of(group), {"": ExpertParallel()})
        good = make_routing(3, 5, 4)
        with torch.set_grad_enabled(group.rank == 0), pytest.raises(CollectiveMismatchError, match="no_grad"):
            parallel(*good)
        tokens = torch.ones(3, WIDTH + group.rank, dtype=torch.float64)
        with pytest.raises(CollectiveMismatchError):
            parallel(tokens, *good[1:])

    run_ranks(program, 2)


def test_ranks_that_call_experts_in_another_order_are_told():
    """Tokens would be computed by the experts of another layer, whose shapes are the same."""

    def program(group):
        mesh = mesh_of(group)
        layers = [fd.parallelize_experts(seeded(Experts), mesh, {"": ExpertParallel()}) for _ in range(2)]
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 the 1\. .*, rank 1 the 2\."):
            layers[group.rank](*make_routing(3, 5, 4))
        assert copy.deepcopy(layers[1])(*make_routing(3, 5, 4)).shape == (3, WIDTH)

    run_ranks(program, 2)


class Failing(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise ArithmeticError("no such number")


def test_experts_that_raise_on_one_rank_end_the_group():
    """The others are in the exchange of outputs by then, and would wait for it until the timeout."""
    done = threading.Event()

    def program(group):
        parallel = fd.parallelize_experts(
            seeded(Failing if group.rank else Experts), mesh_of(group), {"": ExpertParallel()}
        )
        with pytest.raises(ArithmeticError if group.rank else fd.DistributedError, match="no such number"):
            parallel(*make_routing(3, 5, 4))
        if group.rank == 0:
            done.set()
        assert done.wait(20)

    run_ranks(program, 2, timeout=10)


class Odd(Experts):
    """Experts with a parameter that isn't stacked."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


BAD_PLANS = {
    "a parent": (Block, {"": ExpertParallel()}, TypeError, "takes x"),
    "another layer": (Block, {"gate": ExpertParallel()}, TypeError, "takes input"),
    "another style": (Block, {"experts": TensorParallelExperts()}, TypeError, "use parallelize"),
    "a wrong path": (Block, {"expert": ExpertParallel()}, ValueError, "matches no module"),
    "another dim": (
        Block,
        {"experts": ExpertParallel(parameters={"down_proj": Shard(1)})},
        ValueError,
        r"can't have parameter 'down_proj' of module 'experts' as Shard\(1\)",
    ),
    "a list of parameters": (
        Block,
        {"experts": ExpertParallel(parameters=["down_proj"])},
        TypeError,
        "module 'experts' must have parameters= of placements",
    ),
    "a parameter of another size": (Odd, {"": ExpertParallel()}, ValueError, "different sizes of dim 0"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_bad_plan_changes_nothing(case):
    """Errors name what is wrong, on all ranks, and the model still computes."""
    make, plan, kind, text = BAD_PLANS[case]

    def program(group):
        model = seeded(make)
        before = copy.copy(model.state_dict())
        with pytest.raises((kind, UnsupportedOpError), match=text):
            fd.parallelize_experts(
                model, mesh_of(group), plan if group.rank == 0 else {"": ExpertParallel()} if make is Odd else plan
            )
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        assert list(before) == list(model.state_dict())

    run_ranks(program, 2)


def test_experts_are_sharded_once():
    """The error has the parameter's whole name."""

    def program(group):
        model = fd.parallelize_experts(seeded(Block), mesh_of(group), {"experts": ExpertParallel()})
        with pytest.raises(ValueError, match=r"'experts\.gate_up_proj' is distributed already"):
            fd.parallelize_experts(model, mesh_of(group), {"experts": ExpertParallel()})

    run_ranks(program, 2)


def test_experts_that_cannot_be_initialised_leave_the_others_as_they_were():
    """Those of modules before are plain again."""

    class Uninitialised(Experts):
        def reset_parameters(self):
            raise KeyError("on purpose")

    def program(group):
        model = nn.ModuleDict({"first": Experts(), "second": Uninitialised().to("meta")})
        before = list(model.parameters())
        with pytest.raises(KeyError, match="on purpose"):
            fd.parallelize_experts(model, mesh_of(group), dict.fromkeys(model, ExpertParallel()))
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert not any("forward" in vars(module) for module in model.modules())

    run_ranks(program, 2, timeout=20)


@pytest.mark.parametrize(
    ("value", "kind"), [(0, ValueError), (float("inf"), ValueError), ("2", TypeError), (True, TypeError)]
)
def test_capacity_factors_are_checked(value, kind):
    """A capacity of nothing would drop all tokens without a word."""
    with pytest.raises(kind, match="capacity_factor"):
        ExpertParallel(capacity_factor=value)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize(
    ("implementation", "dtype", "sizes"),
    # torch's grouped_mm takes neither float64 nor rows of odd sizes.
    [
        ("eager", torch.float64, (6, 5)),
        ("batched_mm", torch.float64, (6, 5)),
        ("grouped_mm", torch.float32, (8, 8)),
    ],
)
def test_experts_of_transformers(family, implementation, dtype, sizes):
    """transformers' own experts by all of its implementations on CPUs, sharded over experts and within each."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        moe_intermediate_size=sizes[1],
        num_local_experts=4,
        num_experts=4,
        n_routed_experts=4,
        experts_implementation=implementation,
    )
    folder = {"Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}.get(family, family.lower())
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[family])
    torch.manual_seed(0)
    model = getattr(module, f"{family}Experts")(config).to(dtype)
    for one in model.parameters():
        nn.init.normal_(one)
    assert model.num_experts == 4
    tokens, index, weights = (
        one.to(dtype) if one.is_floating_point() else one for one in make_routing(6, 4, 5, sizes[0])
    )
    mine = tokens.clone().requires_grad_()
    expected = model(mine, index, weights)
    expected.sum().backward()

    def program(group):
        for style in STYLES.values():
            alike = copy.deepcopy(model)
            alike.zero_grad()
            parallel = fd.parallelize(alike, mesh_of(group), {"": style})
            its = tokens.clone().requires_grad_()
            got = parallel(its, index, weights)
            torch.testing.assert_close(got, expected)
            got.sum().backward()
            torch.testing.assert_close(its.grad, mine.grad)
            assert_same_gradients(parallel, model)

    run_ranks(program, 2)
