"""`context_parallel` and `ulysses_attention`: attention of calls and of whole models over a sharded sequence."""

import copy
import time

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ferrodist as fd
from ferrodist.errors import RankFailedError
from ferrodist.parallel.context_parallel import layout
from ferrodist.testing import run_ranks

METHODS = ["ring", "ulysses"]
HALVES = (slice(0, 5), slice(5, 12))


def close(one, other, tolerance=1e-12):
    assert (one - other).abs().max() <= tolerance * other.abs().max(), (one - other).abs().max()


def whole(length=13, heads=6, key_heads=6):
    generator = torch.Generator().manual_seed(length)  # ranks that are threads share torch's own
    shapes = [(2, heads, length, 4), (2, key_heads, length, 4), (2, key_heads, length, 4), (2, heads, length, 4)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 13]])
@pytest.mark.parametrize("min_piece", [layout.MIN_PIECE, 2])
def test_ulysses_is_attention_of_one_process(monkeypatch, num_ranks, causal, bounds, min_piece):
    """Heads exchanged for tokens and back, with uneven lengths, grouped heads, documents and pieces, backward too."""
    monkeypatch.setattr(layout, "MIN_PIECE", min_piece)
    q, k, v, grad = whole(heads=12)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    pieces = [slice(0, 13)] if bounds is None else [slice(0, 4), slice(4, 13)]
    expected = torch.cat(
        [
            scaled_dot_product_attention(*[x[:, :, piece] for x in leaves], is_causal=causal, enable_gqa=True)
            for piece in pieces
        ],
        2,
    )
    expected = [expected.detach(), *torch.autograd.grad(expected, leaves, grad)]

    def program(group):
        parts = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
        options = {"causal": causal, "cu_seqlens": bounds, "enable_gqa": True}
        output = fd.ulysses_attention(*parts, group=group, **options)
        grads = torch.autograd.grad(output, parts, fd.context_shard(grad, 2, group))
        return [fd.context_unshard(x.detach(), 2, group) for x in (output, *grads)]

    for joined in run_ranks(program, num_ranks):
        for one, other in zip(joined, expected, strict=True):
            close(one, other)


def test_ulysses_of_fewer_tokens_than_ranks():
    """Ranks without a token compute heads, and take part in backward."""
    q, k, v, grad = whole(length=1)

    def program(group):
        parts = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
        output = fd.ulysses_attention(*parts, group=group, causal=True)
        output.backward(fd.context_shard(grad, 2, group))
        return fd.context_unshard(parts[2].grad, 2, group)

    close(run_ranks(program, 3)[0], grad)


def test_the_output_of_ulysses_may_be_written_to_in_place():
    """A residual sum or a scale in place comes after attention in models; autograd forbids it for some results."""
    q, k, v, grad = whole()

    def program(group):
        parts = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
        output = fd.ulysses_attention(*parts, group=group)
        grads = torch.autograd.grad(output, parts, fd.context_shard(grad, 2, group))
        scaled = fd.ulysses_attention(*parts, group=group).mul_(2)
        return grads, torch.autograd.grad(scaled, parts, fd.context_shard(grad, 2, group))

    for grads, doubled in run_ranks(program, 2):
        assert all(torch.equal(2 * one, other) for one, other in zip(grads, doubled, strict=True))


def test_ulysses_needs_heads_that_ranks_share():
    """The error says what to do, on all ranks."""
    q, k, v, _ = whole(heads=6, key_heads=2)

    def program(group):
        parts = [fd.context_shard(x, 2, group) for x in (q, k, v)]
        with pytest.raises(ValueError, match="3 ranks can't share the 2 of k and v evenly"):
            fd.ulysses_attention(*parts, group=group, enable_gqa=True)

    run_ranks(program, 3)


class ElementCount(TorchDispatchMode):
    """Counts the elements of all results of operators."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.total += sum(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def test_ulysses_backward_is_linear_in_the_number_of_documents():
    """A slice's gradient is a tensor of the whole sequence: 64 documents would fill 192 of them."""

    def program(group):
        counts = []
        for step in (16, 2):
            q = fd.context_shard(whole(128)[0], 2, group).requires_grad_()
            output = fd.ulysses_attention(q, q, q, group=group, cu_seqlens=range(0, 129, step))
            with ElementCount() as count:
                output.sum().backward()
            counts.append(count.total)
        return counts

    for few, many in run_ranks(program, 2):
        assert many < 1.2 * few


def decoder():
    """A small Llama with grouped heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("bounds", [None, [0, 7, 19]])
def test_a_model_of_hugging_face_trains_as_in_one_process(method, num_ranks, bounds):
    """Position ids, shifted labels, the mean of the loss, and gradients that DDP averages."""
    torch.manual_seed(1)
    ids = torch.randint(37, (1, 19))
    labels = ids.clone()
    labels[:, 3:6] = -100
    alone = decoder()
    positions = torch.arange(19) if bounds is None else torch.cat([torch.arange(7), torch.arange(12)])
    counted = labels.clone()
    if bounds is not None:
        counted[:, 7] = -100
    loss = alone(input_ids=ids, labels=counted, position_ids=positions[None]).loss
    loss.backward()
    start = decoder()

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        model = fd.DDP(copy.deepcopy(start), group)
        batch = fd.context_shard_batch({"input_ids": ids, "labels": labels}, group, cu_seqlens=bounds)
        with fd.context_parallel(mesh["context"], method, causal=True, cu_seqlens=bounds):
            own = model(**batch).loss
            own.backward()
        mean = fd.allreduce(own.detach(), fd.ReduceOp.MEAN, group=group)
        return mean, [parameter.grad for parameter in model.parameters()]

    for mean, grads in run_ranks(program, num_ranks):
        assert abs(float(mean) - float(loss.detach())) < 1e-6  # Hugging Face computes losses in float32
        for one, other in zip(grads, alone.parameters(), strict=True):
            close(one, other.grad, 1e-5)


def test_sliding_windows_are_refused():
    """transformers' mask has the window, and context parallelism has another mask: it would attend to all tokens."""
    sizes = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 9}
    config = transformers.MistralConfig(**sizes, **heads, attn_implementation="sdpa", use_cache=False)
    model = transformers.MistralForCausalLM(config)

    def program(group, length):
        batch = fd.context_shard_batch({"input_ids": torch.zeros(1, length, dtype=torch.long)}, group)
        with fd.context_parallel(fd.DeviceMesh(group, (-1,), ("context",)), causal=True):
            return model(**batch).logits.shape[1]

    assert sum(run_ranks(program, 3, 9)) == 9  # no longer than the window
    with pytest.raises(fd.RankFailedError, match="sliding window of 9 tokens, and the whole sequence has more"):
        run_ranks(program, 3, 10)


def _convolutional_model():
    sizes = {"vocab_size": 37, "hidden_size": 24, "block_ff_dim": 32, "block_multiple_of": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "layer_types": ["conv", "full_attention"]}
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**sizes, **heads, attn_implementation="sdpa", use_cache=False)
    )


def _model_of_trigrams():
    sizes = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
    inner = {"num_attention_heads": 2, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}
    return transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**sizes, **inner)).eval()


@pytest.mark.parametrize(("make", "kind"), [(_convolutional_model, "conv"), (_model_of_trigrams, "trigram_input")])
def test_layers_of_other_kinds_are_refused(make, kind):
    """Convolutions over this rank's tokens alone would be wrong without a word."""
    model = make()

    def program(group):
        batch = fd.context_shard_batch({"input_ids": torch.zeros(1, 8, dtype=torch.long)}, group)
        with fd.context_parallel(fd.DeviceMesh(group, (-1,), ("context",)), causal=kind == "conv"):
            return model(**batch)

    with pytest.raises(fd.RankFailedError, match=f"layers of the kind '{kind}', and context_parallel has only"):
        run_ranks(program, 2)


class Layer(nn.Module):
    """Attention to all tokens, and a residual."""

    def __init__(self):
        super().__init__()
        self.inputs, self.output = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (6, 2)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        return x + self.output(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """A model of plain layers, with an embedding of positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(17, 12), nn.Embedding(32, 12)
        self.layers = nn.Sequential(Layer(), nn.LayerNorm(12), Layer())
        self.head = nn.Linear(12, 17)
        self.double()

    def forward(self, input_ids, position_ids):
        return self.head(self.layers(self.embedding(input_ids) + self.positions(position_ids)))


@pytest.mark.parametrize("method", METHODS)
def test_an_encoder_of_plain_layers_trains_as_in_one_process(method):
    """Attention without a mask, and a loss of one's own, exact in float64."""
    torch.manual_seed(2)
    ids = torch.randint(17, (2, 11))
    alone = Encoder()
    logits = alone(ids, torch.arange(11)[None])
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    start = Encoder()

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        model = fd.DDP(copy.deepcopy(start), group)
        batch = fd.context_shard_batch({"input_ids": ids, "labels": ids}, group)
        with fd.context_parallel(mesh, method, causal=False):
            logits = model(batch["input_ids"], batch["position_ids"])
            total = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (total / batch["num_items_in_batch"]).backward()
        return [parameter.grad for parameter in model.parameters()]

    for grads in run_ranks(program, 3):
        for one, other in zip(grads, alone.parameters(), strict=True):
            # The gradient of a key's bias is 0 but for rounding.
            assert (one - other.grad).abs().max() < 1e-13


def test_other_threads_and_later_calls_have_torchs_attention():
    """Only the block of this thread is changed, not torch."""
    q, k, v, _ = whole()

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        with fd.context_parallel(mesh):
            if group.rank == 0:
                fd.recv_object(1, group=group)
            else:
                fd.send_object(True, 0, group=group)
            scaled_dot_product_attention(q, k, v)
        return scaled_dot_product_attention(q, k, v)

    assert all(torch.equal(x, scaled_dot_product_attention(q, k, v)) for x in run_ranks(program, 2))


def run_in_context(call, match, error=ValueError, *, rank=1, **options):
    """Run ``call(group, q, k, v)`` in a context, which fails on one rank by ``error``, and on others, too."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        parts = [fd.context_shard(x, 2, group) for x in whole(12)[:3]]
        is_own = rank in (None, group.rank)
        with (
            pytest.raises(error if is_own else fd.CollectiveMismatchError, match=match),
            fd.context_parallel(mesh, **options),
        ):
            call(group, *parts)
        fd.barrier(group=group)

    run_ranks(program, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("masked", [False, True])
def test_dtensors_are_refused_by_name(method, masked):
    """Under tensor parallelism heads are sharded, too; its local lengths would be taken for those of the sequence."""

    def call(group, q, k, v):
        mesh = fd.DeviceMesh(group, (2,))
        parts = [fd.DTensor.from_local(x, mesh, [fd.Shard(1)]) for x in (q, k, v)]
        mask = fd.distribute(torch.ones(1, 1, 6, 6, dtype=torch.bool), mesh, [fd.Replicate()]) if masked else None
        scaled_dot_product_attention(*parts, mask)

    run_in_context(call, f"{'attn_mask' if masked else 'q'} is a DTensor", TypeError, method=method, rank=None)


@pytest.mark.parametrize("method", METHODS)
def test_bounds_from_a_generator_serve_all_calls(method):
    """The second layer would find it empty."""
    q, k, v, _ = whole(12)
    expected = torch.cat([scaled_dot_product_attention(*[x[:, :, s] for x in (q, k, v)]) for s in HALVES], 2)

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        parts = [fd.context_shard(x, 2, group) for x in (q, k, v)]
        with fd.context_parallel(mesh, method, cu_seqlens=(bound for bound in (0, 5, 12))):
            return [fd.context_unshard(scaled_dot_product_attention(*parts), 2, group) for _ in range(2)]

    for outputs in run_ranks(program, 2):
        for output in outputs:
            close(output, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [None, 1])
def test_masks_dropout_and_other_kinds_raise_on_all_ranks(method, rank):
    """Each would be of this rank's tokens only, and silently so."""

    def call(**options):
        def attend(group, q, k, v):
            own = options if rank in (None, group.rank) else {}
            scaled_dot_product_attention(q, k, v, **own)

        return attend

    mask = torch.ones(6, 6, dtype=torch.bool)
    run_in_context(call(attn_mask=mask.tril()), "has a mask of shape", method=method, rank=rank)
    run_in_context(call(attn_mask=torch.zeros(6, 6)), "has a mask of shape", method=method, rank=rank)
    run_in_context(call(dropout_p=0.5), "dropout_p must be 0", method=method, rank=rank)
    run_in_context(call(is_causal=True), "is_causal=True", method=method, rank=rank, causal=False)
    alone = fd.SimulatedBackend.create_group(1)[0]
    marker = fd.context_shard_batch({"input_ids": torch.ones(2, 6, dtype=torch.int64)}, alone)["attention_mask"]
    run_in_context(call(attn_mask=marker), "pass causal=", method=method, rank=rank)


def test_ranks_with_different_methods():
    """One would wait for a ring's messages, the other for an exchange of heads."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        parts = [fd.context_shard(x, 2, group) for x in whole(12)[:3]]
        with (
            pytest.raises(
                fd.CollectiveMismatchError, match=r"Rank 0: ring_attention with .* Rank 1: ulysses_attention"
            ),
            fd.context_parallel(mesh, METHODS[group.rank]),
        ):
            scaled_dot_product_attention(*parts)

    run_ranks(program, 2, timeout=20)


def test_an_error_in_the_block_on_one_rank():
    """The others learn of it in the attention that they call next."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("context",))
        parts = [fd.context_shard(x, 2, group) for x in whole(12)[:3]]

        def model():
            for layer in range(2):
                if group.rank == layer == 1:
                    raise KeyError("on purpose")
                scaled_dot_product_attention(*parts)

        kind = KeyError if group.rank == 1 else fd.RankFailedError
        with pytest.raises(kind, match="on purpose"), fd.context_parallel(mesh):
            model()

    run_ranks(program, 2, timeout=20)


def test_wrong_arguments_of_the_block():
    """Errors name the argument, before anything is sent."""
    with fd.use_group(fd.SimulatedBackend.create_group(1)[0]) as _:
        mesh = fd.DeviceMesh(None, (1, 1), ("data", "context"))
        for arguments, match, error in [
            ((1,), "mesh must be a DeviceMesh", TypeError),
            ((mesh,), "mesh must have one axis", ValueError),
            ((mesh["context"], "tree"), "method must be", ValueError),
            ((mesh["context"], ["ring"]), "method must be 'ring' or 'ulysses', not list", TypeError),
        ]:
            with pytest.raises(error, match=match), fd.context_parallel(*arguments):
                pass
        with pytest.raises(TypeError, match="causal must be"), fd.context_parallel(mesh["context"], causal=1):
            pass
        with pytest.raises(RuntimeError, match="sdpa"), fd.context_parallel(mesh["context"]):
            torch.ones(1) + 1


def test_calls_in_a_block_inside_of_another_count_for_both():
    """As of a function that opens a block, and is called in one."""

    def program(group):
        mesh, q = fd.DeviceMesh(group, (2,), ("context",)), torch.ones(1, 1, 2, 4)
        with fd.context_parallel(mesh):
            with fd.context_parallel(mesh):
                scaled_dot_product_attention(q, q, q)
            with pytest.raises(RuntimeError, match="nothing inside of the block"), fd.context_parallel(mesh):
                pass

    run_ranks(program, 2)


def test_a_block_without_attention_on_one_rank_is_an_error_on_all():
    """At once, and not when the other ranks' time is over."""

    def program(group):
        mesh, q = fd.DeviceMesh(group, (2,), ("context",)), torch.ones(1, 1, 2, 4)
        kind, match = (RuntimeError, "sdpa") if group.rank == 0 else (RankFailedError, "nothing inside of the block")
        with pytest.raises(kind, match=match), fd.context_parallel(mesh):
            _ = scaled_dot_product_attention(q, q, q) if group.rank == 1 else None

    begin = time.monotonic()
    run_ranks(program, 2, timeout=30)
    assert time.monotonic() - begin < 8


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler looks at the .grad of all inputs, and at much else
def test_compiled_models_break_at_attention():
    """With the results of the eager model: the graphs have all but attention, which the ranks compute together."""

    def program(group):
        torch.manual_seed(1)
        layer = nn.Linear(8, 24).double()

        def model(inputs):
            queries, keys, values = (each.view(1, -1, 2, 4).transpose(1, 2) for each in layer(inputs).chunk(3, -1))
            return scaled_dot_product_attention(queries, keys, values, is_causal=True).square()

        found = []
        num_graphs = []
        compiled = torch.compile(model, backend=lambda graph, _: num_graphs.append(1) or graph.forward)
        part = fd.context_shard(torch.linspace(-1, 1, 64, dtype=torch.float64).view(1, 8, 8).sin(), group=group)
        for called in (model, compiled):
            with fd.context_parallel(fd.DeviceMesh(group, (2,), ("context",))):
                outputs = called(part)
                found.append([outputs.detach(), *torch.autograd.grad(outputs.sum(), layer.parameters())])
        assert all(map(torch.equal, *found))
        assert len(num_graphs) == 2

    run_ranks(program, 2, backend="native")
