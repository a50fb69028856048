"""Key-value caches in blocks on local tensors: decoding gives one process's tokens, and caches stay distributed."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

import ferrodist as fd
from ferrodist.parallel.tensor_parallel.local_blocks import LocalBlock
from ferrodist.parallel.tensor_parallel.local_caches import LocalCache, copy_cache
from ferrodist.parallel.tensor_parallel.local_calls import LOCAL_CALL, NotLocalError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.testing import run_ranks

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "pad_token_id": 0}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "one head of keys": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "sliding": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": 4}),
}


@functools.cache
def model_of(name: str) -> nn.Module:
    """A model, made before the ranks start, as threads share torch's seed."""
    kind, config, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {"num_attention_heads": 4, "num_key_value_heads": 4} | SIZES | options
        return kind(config(**settings, bos_token_id=None, eos_token_id=None)).eval()


@pytest.fixture(autouse=True)
def _models():
    for name in MODELS:
        model_of(name)


def prompt(length: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 40, (2, length), generator=torch.Generator().manual_seed(seed))


def generate(model: nn.Module, tokens: torch.Tensor, number: int = 8, **options) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    made = model.generate(tokens, attention_mask=mask, max_new_tokens=number, do_sample=False, **options)
    return made[:, tokens.shape[1] :]


def split(model: nn.Module, group: fd.Backend, **options) -> nn.Module:
    return fd.parallelize(copy.deepcopy(model), fd.DeviceMesh(group, (2,), ("tp",)), "auto", **options)


def blocks_of(model: nn.Module) -> list[LocalBlock]:
    found = []
    for one in model.modules():
        forward = one.__dict__.get("forward")
        while forward is not None and not isinstance(forward, LocalBlock):
            forward = getattr(forward, "_forward", None)
        found += [] if forward is None else [forward]
    return found


def count_dispatches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators on DTensors from now on, of all ranks."""
    seen: list[str] = []
    dispatch = DTensor.__torch_dispatch__

    def counted(func, types, args=(), kwargs=None):
        seen.append(str(func))
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(DTensor, "__torch_dispatch__", staticmethod(counted))
    return seen


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_decoding_runs_on_local_tensors(name, monkeypatch):
    """The tokens are one process's; after the first of them blocks dispatch nothing on DTensors but the cache's own."""
    expected = [generate(model_of(name), prompt(seed=seed)) for seed in range(2)]
    seen = count_dispatches(monkeypatch)

    def program(group):
        model = split(model_of(name), group)
        assert torch.equal(generate(model, prompt()), expected[0])
        blocks = blocks_of(model)
        assert len(blocks) == 2
        assert all(one.sizes and not one.has_failed for block in blocks for one in block.trials.values())
        group.barrier()
        seen.clear()
        group.barrier()
        assert torch.equal(generate(model, prompt(seed=1)), expected[1])

    run_ranks(program, 2, backend="simulated")
    # Two ranks, eight forwards: the models' own code outside of the blocks.
    assert len(seen) < 2 * 8 * 15, sorted(set(seen))


def test_a_cache_is_distributed_outside():
    """A forward on DTensors goes on with the cache of forwards on local tensors, and the other way round."""
    expected = generate(model_of("llama"), prompt())

    def program(group):
        model = split(model_of("llama"), group)
        generate(model, prompt())
        inner = model.model.layers[0].mlp.act_fn
        cache, tokens, found, hook = transformers.DynamicCache(config=model.config), prompt(), [], None
        with torch.no_grad():
            for step in range(8):
                if step in (2, 5):
                    hook = inner.register_forward_hook(lambda *_: None)  # who looks into a block sees DTensors
                logits = model(input_ids=tokens, past_key_values=cache).logits[:, -1]
                tokens = logits.argmax(-1, keepdim=True)
                found.append(tokens)
                if hook is not None:
                    hook.remove()
                for layer in cache.layers:
                    for each in (layer.keys, layer.values):
                        assert isinstance(each, DTensor)
                        assert each.placements == (fd.Shard(1),)
                        assert each.shape == (2, 2, 3 + step, 4)
        assert torch.equal(torch.cat(found, 1), expected)

    run_ranks(program, 2, backend="simulated")


def test_keys_that_all_ranks_have_stay_distributed():
    """One head of keys for two ranks is no shard: attention stays on DTensors, with the right tokens."""
    expected = generate(model_of("one head of keys"), prompt())
    run_ranks(
        lambda group: torch.equal(generate(split(model_of("one head of keys"), group), prompt()), expected) or 1 / 0,
        2,
        backend="simulated",
    )


def test_a_forward_that_gives_up_leaves_the_cache(monkeypatch):
    """A forward that stops after its cache's update, and runs again on DTensors, adds its tokens once."""
    expected = generate(model_of("llama"), prompt())
    update = LocalCache.update
    stopped = []

    def stop_late(self, keys, values, index, *args, **kwargs):
        result = update(self, keys, values, index, *args, **kwargs)
        call = LOCAL_CALL.get()
        if keys.shape[-2] == 1 and index == 1 and call is not None and not call.is_trial and result[0].shape[-2] == 7:
            stopped.append(index)
            raise NotLocalError
        return result

    monkeypatch.setattr(LocalCache, "update", stop_late)

    def program(group):
        model = split(model_of("llama"), group)
        cache = transformers.DynamicCache(config=model.config)
        assert torch.equal(generate(model, prompt(), past_key_values=cache), expected)
        assert [layer.get_seq_length() for layer in cache.layers] == [3 + 7, 3 + 7]
        assert [any(one.has_failed for one in block.trials.values()) for block in blocks_of(model)] == [False, True]

    run_ranks(program, 2, backend="simulated")
    assert stopped == [1, 1]


def test_an_undone_cache_is_as_before():
    """Layers that were there have their tensors and counters again, and those that were added are gone."""

    def program(group):
        mesh = fd.DeviceMesh(group, (1,), ("tp",))
        config = model_of("sliding").config
        cache = transformers.DynamicCache(config=config)
        states = [torch.randn(1, 4, length, 4) for length in (3, 2)]
        LocalCache(cache, mesh).update(states[0], states[0], 0)
        before = dict(cache.layers[0].__dict__)
        local = LocalCache(cache, mesh)
        keys, _ = local.update(states[1], states[1], 0)
        local.update(states[1], states[1], 1)
        assert torch.equal(keys, torch.cat(states, -2))
        assert cache.layers[0].cumulative_length == 5
        local.undo()
        assert cache.layers[0].__dict__ == before
        assert not cache.layers[1].is_initialized
        lazy = transformers.DynamicCache()
        local = LocalCache(lazy, mesh)
        local.update(states[0], states[0], 0)
        assert len(lazy.layers) == 1
        local.undo()
        assert not lazy.layers

    run_ranks(program, 1, backend="simulated")


def test_a_copied_cache_is_another():
    """To update a copy leaves the original."""
    cache = transformers.DynamicCache()
    states = torch.randn(1, 4, 3, 4)
    cache.update(states, states, 0)
    copied = copy_cache(cache)
    copied.update(states, states, 0)
    copied.update(states, states, 1)
    assert (cache.get_seq_length(), len(cache.layers)) == (3, 1)
    assert copied.get_seq_length() == 6


def test_attributes_that_a_block_sets_are_kept():
    """A block without gradients runs on other modules: what its code sets there is set in the block, and what the
    program adds to the block is there.
    """
    kind = transformers.models.llama.modeling_llama.LlamaMLP

    class Marking(kind):
        def forward(self, x):
            if x.shape[1] == 1 and x.shape[0] == 2:
                self.seen = getattr(self, "seen", 0) + 1
            result = super().forward(x)
            return self.extra(result) if hasattr(self, "extra") else result

    config = model_of("llama").config

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Marking(config)

        def forward(self, x):
            return self.mlp(x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        original = Model()
    plan = {
        "mlp.gate_proj": fd.ColumnParallel(),
        "mlp.up_proj": fd.ColumnParallel(),
        "mlp.down_proj": fd.RowParallel(),
    }

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tp",))
        model = fd.parallelize(copy.deepcopy(original), mesh, plan, local_blocks=True)
        with torch.no_grad():
            for length in (3, 4):  # the shapes that are tried
                model(torch.ones(2, length, 16))
            for _ in range(3):
                assert torch.allclose(model(torch.ones(2, 1, 16)), original(torch.ones(2, 1, 16)))
        assert model.mlp.seen == 3
        with torch.no_grad():
            before = model(torch.ones(2, 1, 16))
            model.mlp.extra = nn.Tanh()
            assert torch.equal(model(torch.ones(2, 1, 16)), before.tanh())

    run_ranks(program, 2, backend="simulated")


def recorded_kinds(model: nn.Module) -> list[str]:
    """For each kind of forward with gradients of each block: "local", "tried" or "failed"."""
    kinds = [one for block in blocks_of(model) for kind, one in block.trials.items() if kind.settings[0]]
    return ["failed" if one.has_failed else "local" if one.sizes else "tried" for one in kinds]


def train(model: nn.Module, forward) -> list[torch.Tensor]:
    """Losses and parameters of four steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss = forward(model, prompt(6, seed=step))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *[one.full_tensor().detach() for one in model.parameters()]]


def loss_alone(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    result = model(input_ids=tokens, labels=tokens)
    assert all(isinstance(layer.keys, DTensor) and layer.keys.requires_grad for layer in result.past_key_values.layers)
    return result.loss


def loss_of_the_cache(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    result = model(input_ids=tokens, labels=tokens)
    kept = [one.full_tensor() for layer in result.past_key_values.layers for one in (layer.keys, layer.values)]
    return result.loss + sum(one.square().mean() for one in kept)


def loss_of_two_parts(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    first = model(input_ids=tokens[:, :3])
    second = model(input_ids=tokens[:, 3:], past_key_values=first.past_key_values)
    return first.logits.square().mean() + second.logits.square().mean()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [(loss_alone, ["local"] * 2), (loss_of_the_cache, ["local"] * 2), (loss_of_two_parts, ["local", "failed"] * 2)],
)
@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_training_with_a_cache(name, forward, expected):
    """Models keep keys and values in training, too, unless they are told not to: gradients go through them with the
    bits of DTensors. Those of a former forward's stay on DTensors.
    """

    def program(group):
        model, other = split(model_of(name), group), split(model_of(name), group, local_blocks=False)
        found, wanted = train(model, forward), train(other, forward)
        assert recorded_kinds(model) == expected
        assert all(map(torch.equal, found, wanted))

    run_ranks(program, 2, backend="simulated")
