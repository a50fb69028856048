"""`ring_attention` against torch's attention over the whole sequence in one process."""

import math
import threading
import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ferrodist as fd
from ferrodist.deadline import Deadline
from ferrodist.parallel.context_parallel import block_attention, layout
from ferrodist.parallel.context_parallel import ring as module
from ferrodist.testing import run_ranks

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(length, *, heads=4, key_heads=4, size=8, value_size=8, dtype=torch.float64, key_length=None):
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(length)
    key_length = length if key_length is None else key_length
    shapes = [(heads, length, size), (key_heads, key_length, size), (key_heads, key_length, value_size)]
    shapes.append((heads, length, value_size))
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def mask_of(length, causal, cu_seqlens):
    """The whole mask, as one process has it."""
    positions = torch.arange(length)
    documents = torch.zeros(length) if cu_seqlens is None else torch.bucketize(positions, cu_seqlens[1:], right=True)
    mask = documents[:, None] == documents
    return mask & (positions[:, None] >= positions) if causal else mask


def alone(q, k, v, grad, *, causal=False, cu_seqlens=None, scale=None):
    """Output and gradients of one process in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = mask_of(q.shape[2], causal, cu_seqlens) if causal or cu_seqlens is not None else None
    output = scaled_dot_product_attention(*leaves, attn_mask=mask, scale=scale, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


def sharded(group, q, k, v, grad, **options):
    """Output and gradients over the ranks, joined."""
    leaves = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
    output = fd.ring_attention(*leaves, group=group, enable_gqa=True, **options)
    grads = torch.autograd.grad(output, leaves, fd.context_shard(grad, 2, group))
    assert output.dtype is q.dtype
    assert all(one.dtype is q.dtype for one in grads)
    return [fd.context_unshard(x.detach(), 2, group) for x in (output, *grads)]


def check(results, expected, dtype=torch.float64):
    for joined in results:
        for one, other in zip(joined, expected, strict=True):
            # Of a token that sees only itself the gradients of query and key are zero, or rounding, by processor.
            error = (one.double() - other).abs().max() / other.abs().max().clamp(min=0.1)
            assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_outputs_and_gradients_are_those_of_one_process(monkeypatch, num_ranks, causal, has_kernel):
    """Any of the blocks, merges and messages, with torch's kernel and without: a wrong one changes the result."""
    monkeypatch.setattr(block_attention, "has_cpu_flash_attention", has_kernel)
    monkeypatch.setattr(block_attention, "_TILE", 3)
    data = inputs(29, heads=4, key_heads=2)
    check(run_ranks(lambda group: sharded(group, *data, causal=causal), num_ranks), alone(*data, causal=causal))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bounds", [None, [0, 37], [0, 9, 9, 26, 37]])
@pytest.mark.parametrize("causal", [False, True])
def test_pieces_are_joined_again(monkeypatch, num_ranks, bounds, causal):
    """Keys of a long sequence travel in pieces, which cut chunks and documents, and whose gradients come home."""
    monkeypatch.setattr(layout, "MIN_PIECE", 3)
    data, cu_seqlens = inputs(37, key_heads=2), None if bounds is None else torch.tensor(bounds)
    results = run_ranks(lambda group: sharded(group, *data, causal=causal, cu_seqlens=cu_seqlens), num_ranks)
    check(results, alone(*data, causal=causal, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6])
def test_ranks_may_have_few_tokens_or_none(length):
    """Sequences shorter than the number of chunks leave ranks without a token, which pass on what others have."""
    data = inputs(length)
    results = run_ranks(lambda group: sharded(group, *data, causal=True), 3)
    if length:
        check(results, alone(*data, causal=True))
    else:
        assert all(x.numel() == 0 for joined in results for x in joined)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds", [[0, 5, 23], [0, 1, 2, 3, 11, 11, 12, 23], [0, 23], [0, 12, 23]])
def test_documents_in_a_row_do_not_see_each_other(causal, bounds):
    """A document that ends inside of a chunk, spans chunks of both kinds, or is empty, is cut where it is."""
    data, cu_seqlens = inputs(23, key_heads=1), torch.tensor(bounds)
    results = run_ranks(lambda group: sharded(group, *data, causal=causal, cu_seqlens=cu_seqlens), 3)
    check(results, alone(*data, causal=causal, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_right_to_their_rounding(dtype):
    """Sums over blocks and ranks in 16 bits would lose digits with each rank."""
    data = inputs(61, dtype=dtype)
    check(run_ranks(lambda group: sharded(group, *data, causal=True), 4), alone(*data, causal=True), dtype)


@pytest.mark.parametrize("options", [{"scale": 0.7}, {"overlap": False}, {"causal": True, "overlap": False}])
def test_options_that_change_no_layout(options):
    """The scale is that of forward and backward; messages that don't overlap give the same bits as those that do."""
    data = inputs(17, value_size=5)
    results = run_ranks(lambda group: sharded(group, *data, **options), 3)
    plain = {name: value for name, value in options.items() if name != "overlap"}
    check(results, alone(*data, **plain))
    overlapped = run_ranks(lambda group: sharded(group, *data, **plain), 3)
    assert all(torch.equal(*pair) for pair in zip(results[0], overlapped[0], strict=True))


@pytest.mark.parametrize("min_piece", [layout.MIN_PIECE, 2])
def test_without_a_mask_any_lengths_will_do(monkeypatch, min_piece):
    """Attention to other tokens than the queries' own, divided in a way of the user's own, in pieces, too."""
    monkeypatch.setattr(layout, "MIN_PIECE", min_piece)
    q, k, v, grad = inputs(11, key_length=7)

    def program(group):
        rows, columns = ([4, 0, 7], [1, 5, 1])
        part = [q.split(rows, 2)[group.rank], *(x.split(columns, 2)[group.rank] for x in (k, v))]
        leaves = [x.clone().requires_grad_() for x in part]
        output = fd.ring_attention(*leaves, group=group)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.split(rows, 2)[group.rank])]

    parts = run_ranks(program, 3)
    check([[torch.cat(each, 2) for each in zip(*parts, strict=True)]], alone(q, k, v, grad))


def test_processes_give_the_bits_of_threads():
    """Messages of the native engine, in processes, carry what those of threads do."""
    data = inputs(40)
    threads = run_ranks(lambda group: sharded(group, *data, causal=True), 2)
    processes = run_ranks(lambda group: sharded(group, *data, causal=True), 2, backend="native")
    assert all(torch.equal(*pair) for pair in zip(threads[0], processes[1], strict=True))


@pytest.mark.parametrize("backend", ["simulated", "native-threads", "gloo-threads"])
def test_messages_arrive_while_blocks_are_computed(monkeypatch, backend):
    """Nothing but the backend moves them: if it did so only in a wait, overlap would save nothing."""
    under_way = threading.local()

    class RingExchange(module.RingExchange):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            under_way.exchanges = [*getattr(under_way, "exchanges", []), self]

        def wait(self):
            under_way.exchanges.remove(self)
            return super().wait()

    arrived = []

    def wait_for_arrival():
        for exchange in under_way.exchanges:
            deadline = Deadline(20)
            while not all(request.done() for request in exchange._requests) and not deadline.expired:
                time.sleep(0)
            arrived.append(not deadline.expired)

    class OnlineAttention(module.OnlineAttention):
        def add(self, *args):
            wait_for_arrival()
            super().add(*args)

    class AttentionGradients(module.AttentionGradients):
        def add(self, *args):
            wait_for_arrival()
            super().add(*args)

    for each in (RingExchange, OnlineAttention, AttentionGradients):
        monkeypatch.setattr(module, each.__name__, each)
    data = inputs(1024)  # 512 KiB of keys and values a rank: more than travels without being asked for
    results = run_ranks(lambda group: sharded(group, *data), 2, backend=backend)
    assert arrived == [True] * 6  # a rank's keys in forward, and in backward keys and gradients
    check(results, alone(*data))


def test_inputs_of_any_strides_and_gradients_of_one_number():
    """Hugging Face passes transposed views; ``sum().backward()`` gives a gradient of stride 0."""
    q, k, v, grad = inputs(12)
    grad = torch.ones_like(grad)

    def program(group):
        leaves = [fd.context_shard(x, 2, group).transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        fd.ring_attention(*[x.transpose(1, 2) for x in leaves], group=group, causal=True).sum().backward()
        return [fd.context_unshard(x.grad, 1, group).transpose(1, 2) for x in leaves]

    check(run_ranks(program, 2), alone(q, k, v, grad, causal=True)[1:])


def test_only_inputs_that_need_a_gradient_get_one():
    """Frozen layers before a part of the inputs."""
    q, k, v, grad = inputs(12)

    def program(group):
        parts = [fd.context_shard(x, 2, group) for x in (q, k, v)]
        parts[2].requires_grad_()
        fd.ring_attention(*parts, group=group).backward(fd.context_shard(grad, 2, group))
        return [fd.context_unshard(parts[2].grad, 2, group)]

    check(run_ranks(program, 2), alone(q, k, v, grad)[3:])


def test_no_grad_records_nothing_and_autocast_casts():
    """Evaluation has no graph; under autocast the dtype is that of torch's attention."""
    q, k, v, _ = inputs(12, dtype=torch.float32)

    def program(group):
        parts = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
        with torch.no_grad():
            assert not fd.ring_attention(*parts, group=group).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            return fd.ring_attention(*parts, group=group).dtype

    assert run_ranks(program, 2) == [torch.bfloat16] * 2


def _fails(change, match, error=ValueError, *, num_ranks=2, rank=None):
    """Call with changed arguments on one rank, or on all; return what the ranks raised."""

    def program(group):
        q, k, v, _ = (x[:, :, :4] for x in inputs(4 * num_ranks))
        arguments = {"q": q, "k": k, "v": v, "group": group}
        if rank in (None, group.rank):
            arguments |= change(arguments)
        try:
            fd.ring_attention(**arguments)
        except Exception as raised:
            fd.barrier(group=group)  # the group goes on
            return raised
        return None

    raised = run_ranks(program, num_ranks)
    for each in range(num_ranks):
        is_own = rank in (None, each)
        assert isinstance(raised[each], error if is_own else fd.CollectiveMismatchError), raised[each]
    wrong = raised[0 if rank is None else rank]
    assert match in str(wrong), wrong
    return raised


def test_one_head_of_keys_serves_all_heads_of_queries():
    """Multi-query attention: torch's attention broadcasts one head without being told."""
    q, k, v, grad = inputs(13, key_heads=1)

    def program(group):
        leaves = [fd.context_shard(x, 2, group).requires_grad_() for x in (q, k, v)]
        output = fd.ring_attention(*leaves, group=group, causal=True)
        grads = torch.autograd.grad(output, leaves, fd.context_shard(grad, 2, group))
        return [fd.context_unshard(x.detach(), 2, group) for x in (output, *grads)]

    check(run_ranks(program, 2), alone(q, k, v, grad, causal=True))


BAD = {
    "overlap": (lambda a: {"overlap": 1}, "overlap must be", TypeError),
    "no tensor": (lambda a: {"q": 1}, "q must be a torch.Tensor", TypeError),
    "dims": (lambda a: {"k": a["k"][0]}, "k must be of shape", ValueError),
    "dtype": (lambda a: {x: a[x].long() for x in "qkv"}, "floating dtype", TypeError),
    "mixed": (lambda a: {"v": a["v"].float()}, "one dtype", TypeError),
    "heads": (lambda a: {x: a[x][:, :2] for x in "kv"}, "enable_gqa=True", ValueError),
    "groups": (lambda a: {"enable_gqa": True} | {x: a[x][:, :3] for x in "kv"}, "can't be grouped", ValueError),
    "size": (lambda a: {"k": a["k"][..., :3]}, "q and k must have", ValueError),
    "values": (lambda a: {"v": a["v"][:, :, :3]}, "k and v must be alike", ValueError),
    "keys": (lambda a: {"causal": True} | {x: a[x][:, :, :3] for x in "kv"}, "as many queries as keys", ValueError),
    "dropout": (lambda a: {"dropout_p": 0.1}, "dropout_p must be 0", ValueError),
    "causal": (lambda a: {"causal": 1}, "causal must be", TypeError),
    "scale": (lambda a: {"scale": "1"}, "scale must be", TypeError),
    "infinite scale": (lambda a: {"scale": math.inf}, "scale must be finite", ValueError),
    "bounds": (lambda a: {"cu_seqlens": [0, 5, 4]}, "ascending order", ValueError),
    "bounds' type": (lambda a: {"cu_seqlens": 5}, "cu_seqlens must be integers", TypeError),
    "bounds' values": (lambda a: {"cu_seqlens": [0, 2.5, 8]}, "cu_seqlens[1]", TypeError),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("rank", [None, 1])
def test_wrong_arguments_raise_on_all_ranks(name, rank):
    """The argument is named on the rank that passed it; the others would wait for its messages."""
    change, match, error = BAD[name]
    raised = _fails(change, match, error, rank=rank)
    if rank is not None:
        assert "the arguments of rank 1 are wrong" in str(raised[0])


DIFFERENT = {
    "heads": lambda a: {x: a[x][:, :2] for x in "qkv"},
    "batch": lambda a: {x: a[x][:1] for x in "qkv"},
    "dtype": lambda a: {x: a[x].float() for x in "qkv"},
    "causal": lambda a: {"causal": True},
    "scale": lambda a: {"scale": 0.5},
    "bounds": lambda a: {"cu_seqlens": [0, 8]},
    "gradient": lambda a: {"q": a["q"].requires_grad_()},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_all_raise(name):
    """Else they would exchange keys that mean something else, or one would wait for another's backward."""
    _fails(DIFFERENT[name], "the ranks' arguments differ", fd.CollectiveMismatchError, num_ranks=3, rank=2)


def test_lengths_must_be_those_of_the_layout():
    """With a mask, tokens of another layout would be taken for those of other positions."""

    def program(group):
        q = torch.ones(1, 1, [2, 5][group.rank], 4)
        with pytest.raises(ValueError, match="divide it by context_shard"):
            fd.ring_attention(q, q, q, group=group, causal=True)
        q = torch.ones(1, 1, 4, 4)
        with pytest.raises(ValueError, match="cu_seqlens ends at 9, and the whole sequence has 8 tokens"):
            fd.ring_attention(q, q, q, group=group, cu_seqlens=[0, 9])

    run_ranks(program, 2)


def test_a_rank_that_fails_between_messages_ends_the_group(monkeypatch):
    """A lack of memory on one rank: the others wait for its messages, and learn why none comes."""

    class OnlineAttention(module.OnlineAttention):
        def add(self, key, value, block):
            if float(key.sum()) == 0:
                raise MemoryError("no memory")
            super().add(key, value, block)

    monkeypatch.setattr(module, "OnlineAttention", OnlineAttention)

    def program(group):
        q = torch.full((1, 1, 4, 4), float(group.rank))
        with pytest.raises((MemoryError, fd.DistributedError), match="no memory"):
            fd.ring_attention(q, q, q, group=group, timeout=30)

    run_ranks(program, 3)
