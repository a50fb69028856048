"""Models of Hugging Face's transformers write the text of one process: sharded by FSDP, divided by a plan, and both."""

import copy

import pytest
import torch
import transformers
from test_transformers import SIZES, TOKENS, gpt2, llama, mixtral, t5, words

import ferrodist as fd
from ferrodist import CollectiveMismatchError, RankFailedError
from ferrodist.testing import run_ranks

WAYS = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 20},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "use_cache": False},
]


def made(family):
    torch.manual_seed(0)
    model, plan, batch, beginning = family()
    return model.double().eval(), plan, batch, beginning


def is_block(name, module):
    return type(module).__name__.endswith(("DecoderLayer", "GPT2Block", "T5Block"))


def beginning_of(rank, beginning):
    """Prompts of other number and length on each rank."""
    ids = words(1 + rank, 3 + 2 * rank, seed=rank)
    return {**beginning, "input_ids": ids}


def write(model, rank, beginning, way):
    """The tokens for the prompts of a rank, of other number on each, by a generator with a state of its own."""
    torch.manual_seed(5 + rank)
    return model.generate(**beginning_of(rank, beginning), max_new_tokens=3 + 4 * rank, **way).tolist()


@pytest.mark.parametrize("family", [llama, gpt2, mixtral, t5])
def test_ranks_write_texts_of_their_own(family):
    """Greedy, sampled, beams, static caches and none: each rank has one process's tokens, and units are freed."""
    model, _, batch, beginning = made(family)
    expected = [[write(copy.deepcopy(model), rank, beginning, way) for way in WAYS] for rank in range(3)]

    def program(group):
        fsdp = fd.FSDP(copy.deepcopy(model), group, wrap=is_block)
        fd.register_forward_method(fsdp, "generate")
        for way, tokens in zip(WAYS, expected[group.rank], strict=True):
            assert write(fsdp, group.rank, beginning, way) == tokens
        assert write(fsdp.module, group.rank, beginning, WAYS[0]) == expected[group.rank][0]
        assert fsdp(**batch).loss.requires_grad

    run_ranks(program, 3, backend="native")


def test_ranks_that_stop_or_have_nothing():
    """A rank whose text ends by its stopping rule, and one without prompts, take part until the longest is done."""
    model, _, _, beginning = made(llama)
    expected = write(copy.deepcopy(model), 1, beginning, WAYS[0])

    class AtOnce(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return torch.ones(len(ids), dtype=torch.bool)

    def program(group):
        fsdp = fd.FSDP(copy.deepcopy(model), group, wrap=is_block)
        fd.register_forward_method(fsdp, "generate")
        if group.rank == 0:
            fd.join_forward_method(fsdp, "generate")
        elif group.rank == 1:
            assert write(fsdp, 1, beginning, WAYS[0]) == expected
        else:
            stops = {**WAYS[0], "stopping_criteria": [AtOnce()]}
            assert [len(text) for text in write(fsdp, 2, beginning, stops)] == [8] * 3
        refuses = group.rank == 2
        with pytest.raises(ValueError if refuses else RankFailedError, match="temperature"):
            write(fsdp, group.rank, beginning, {"do_sample": True, "temperature": 0.0} if refuses else WAYS[0])

    run_ranks(program, 3)


def test_no_rank_has_the_whole_model():
    """At any time the embeddings, the head and one block of eight are there."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 8}, **TOKENS))
    blocks = sum(each.numel() for each in model.model.layers.parameters())
    rest = sum(each.numel() for each in model.parameters()) - blocks

    def program(group):
        fsdp = fd.FSDP(copy.deepcopy(model), group, wrap=is_block)
        fd.register_forward_method(fsdp, "generate")
        most = []

        def measure(*_):
            flats = [flat for unit in fsdp._units for flat in unit.flats]
            most.append(sum(flat._full.untyped_storage().nbytes() // flat._full.itemsize for flat in flats))

        for layer in fsdp.module.model.layers:
            layer.register_forward_pre_hook(measure)
        fsdp.generate(words(2, 4), max_new_tokens=2 + group.rank, do_sample=False)
        return max(most)

    for most in run_ranks(program, 2, backend="tcp"):
        assert rest + blocks / 8 <= most <= 1.01 * (rest + blocks / 8)


def test_a_method_under_a_plan():
    """All ranks sample one process's tokens from one state; other states are an error, also for the last token."""
    model, plan, _, beginning = made(llama)
    expected = [write(copy.deepcopy(model), 0, beginning, way) for way in WAYS]

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), fd.DeviceMesh(group, (-1,), ("tensor",)), plan)
        assert [write(mine, 0, beginning, way) for way in WAYS] == expected
        for length in (1, 9):
            torch.manual_seed(group.rank)
            with pytest.raises(CollectiveMismatchError, match=r"differ between ranks.*the same seed"):
                mine.generate(words(3, 4), max_new_tokens=length, **WAYS[1])
        assert write(mine, 0, beginning, WAYS[0]) == expected[0]

    run_ranks(program, 2, backend="native")


class Failing(transformers.StoppingCriteria):
    """Raises after the third token."""

    def __init__(self, *, fails):
        self.fails, self.num_calls = fails, 0

    def __call__(self, ids, scores, **_):
        self.num_calls += 1
        if self.fails and self.num_calls == 3:
            raise ValueError("a rule of its own")
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_an_error_under_a_plan(failing):
    """An error of all ranks is each one's own; that of one is an error on all, and nobody waits for the timeout."""
    model, plan, _, beginning = made(llama)

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), fd.DeviceMesh(group, (-1,), ("tensor",)), plan)
        fails = group.rank in failing
        with pytest.raises(ValueError if fails else CollectiveMismatchError, match=r"a rule of its own|end_of_method"):
            write(mine, 1, beginning, {**WAYS[0], "stopping_criteria": [Failing(fails=fails)]})
        assert (group.failure is None) == (len(failing) == 2)

    run_ranks(program, 2)


@pytest.mark.parametrize("family", [llama, mixtral])
def test_a_sharded_model_under_a_plan(family):
    """The ranks of an axis with one text have the same tokens; the texts of the other axis end at other lengths."""
    model, plan, _, beginning = made(family)
    ways = WAYS[:4] if family is llama else WAYS[:2]
    expected = [[write(copy.deepcopy(model), rank, beginning, way) for way in ways] for rank in range(2)]

    def program(group):
        mesh = fd.DeviceMesh(group, (2, 2), ("data", "tensor"))
        mine = fd.parallelize(copy.deepcopy(model), mesh["tensor"], plan)
        fsdp = fd.FSDP(mine, mesh["data"], wrap=is_block)
        fd.register_forward_method(fsdp, "generate")
        rank = mesh["data"].group.rank
        for way, tokens in zip(ways, expected[rank], strict=True):
            assert write(fsdp, rank, beginning, way) == tokens
        fails = rank == 1
        with pytest.raises(ValueError if fails else RankFailedError, match="a rule of its own"):
            write(fsdp, 1, beginning, {**WAYS[0], "stopping_criteria": [Failing(fails=fails)]})
        assert write(fsdp, rank, beginning, WAYS[0]) == expected[rank][0]

    run_ranks(program, 4, backend="native")


def test_one_rank_of_a_mesh_fails():
    """The error reaches all ranks of both axes."""
    model, plan, _, beginning = made(llama)

    def program(group):
        mesh = fd.DeviceMesh(group, (2, 2), ("data", "tensor"))
        fsdp = fd.FSDP(fd.parallelize(copy.deepcopy(model), mesh["tensor"], plan), mesh["data"], wrap=is_block)
        fd.register_forward_method(fsdp, "generate")
        fails = group.rank == 3
        with pytest.raises(ValueError if fails else fd.DistributedError):
            write(fsdp, 1, beginning, {**WAYS[0], "stopping_criteria": [Failing(fails=fails)]})

    run_ranks(program, 4)
