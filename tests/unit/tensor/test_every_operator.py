"""Each operator against the plain one, forward and backward, with shapes, placements and meshes by hypothesis."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_checks import check_operator, make, placements_of
from torch.nn import functional

from ferrodist import DeviceMesh
from ferrodist.testing import run_ranks

MESHES = [(2,), (3,), (2, 2), (1, 2)]


class Draw:
    """Sizes and tensors drawn by hypothesis."""

    def __init__(self, data):
        self._data = data
        self._seed = 0

    def size(self, least=1, most=5):
        return self._data.draw(st.integers(least, most))

    def of(self, *values):
        return self._data.draw(st.sampled_from(values))

    def shape(self, least=1, most=3):
        return [self.size() for _ in range(self.size(least, most))]

    def dim(self, ndim):
        return self._data.draw(st.integers(-ndim, ndim - 1))

    def tensor(self, *shape, **options):
        self._seed += 1
        return make(*shape, seed=self._seed, **options)

    def integers(self, *shape, below):
        return self.tensor(*shape, low=0, high=below).long().clamp(0, below - 1)

    def placements(self, tensor, num_axes):
        is_float = tensor.is_floating_point()
        return self._data.draw(st.sampled_from(placements_of(tensor.dim(), num_axes, partial=is_float)))


OPERATORS = {}


def operator(function):
    """Register a function that draws inputs and returns the computation."""
    OPERATORS[function.__name__] = function
    return function


def unary(name, function, **options):
    """Register an operator of one tensor."""
    OPERATORS[name] = lambda draw: (function, [draw.tensor(*draw.shape(), **options)])


for _function in (torch.exp, torch.tanh, torch.sin, torch.neg, torch.abs, torch.sigmoid, torch.square):
    unary(_function.__name__, _function)
for _function in (functional.gelu, functional.silu, functional.relu, functional.elu, functional.softplus):
    unary(_function.__name__, _function)
for _function in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal):
    unary(_function.__name__, _function, low=0.5)
unary("clone", torch.clone)
unary("clamp", lambda x: x.clamp(-0.5, 0.5))
unary("power", lambda x: x**3)
unary("all_of_it", lambda x: [x.sum(), x.mean(), x.amax(), x.amin(), x.norm()])


@operator
def prelu(draw):
    shape = draw.shape()
    slopes = shape[1] if len(shape) > 1 else 1
    return functional.prelu, [draw.tensor(*shape), draw.tensor(draw.of(slopes, 1) or 1, low=0.5)]


def binary(name, function):
    def build(draw):
        shape = draw.shape()
        other = [draw.of(size, 1) for size in shape[draw.size(0, len(shape)) :]]
        return function, [draw.tensor(*shape), draw.tensor(*other, low=0.5)]

    OPERATORS[name] = build


for _function in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2):
    binary(_function.__name__, _function)
binary("where", lambda x, y: torch.where(x > y, x, y))
binary("lerp", lambda x, y: torch.lerp(x, y, 0.3))
binary("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5))


@operator
def mm(draw):
    m, k, n = draw.size(), draw.size(), draw.size()
    return torch.mm, [draw.tensor(m, k), draw.tensor(k, n)]


@operator
def addmm(draw):
    m, k, n = draw.size(), draw.size(), draw.size()
    return torch.addmm, [draw.tensor(*draw.of((n,), (m, n), (1, n))), draw.tensor(m, k), draw.tensor(k, n)]


@operator
def bmm(draw):
    b, m, k, n = (draw.size() for _ in range(4))
    return torch.bmm, [draw.tensor(b, m, k), draw.tensor(b, k, n)]


@operator
def linear(draw):
    batch, k, n = draw.shape(0, 2), draw.size(), draw.size()
    return functional.linear, [draw.tensor(*batch, k), draw.tensor(n, k), draw.tensor(n)][: draw.of(2, 3)]


@operator
def matmul(draw):
    k = draw.size()
    left = draw.of([k], [draw.size(), k], [draw.size(), draw.size(), k])
    right = draw.of([k], [k, draw.size()])
    return torch.matmul, [draw.tensor(*left), draw.tensor(*right)]


@operator
def einsum(draw):
    sizes = {letter: draw.size() for letter in "bijk"}
    text = draw.of("bij,bjk->bik", "ij,jk->ki", "bi,bi->b", "bij,kj->bik", "ij,k->ikj")
    operands = [draw.tensor(*[sizes[letter] for letter in part]) for part in text.split("->")[0].split(",")]
    return lambda *tensors: torch.einsum(text, *tensors), operands


def reduction(name, function):
    def build(draw):
        shape = draw.shape()
        dim, keepdim = draw.dim(len(shape)), draw.of(True, False)
        return lambda x: function(x, dim, keepdim), [draw.tensor(*shape)]

    OPERATORS[name] = build


reduction("sum", lambda x, dim, keepdim: x.sum(dim, keepdim=keepdim))
reduction("mean", lambda x, dim, keepdim: x.mean(dim, keepdim=keepdim))
reduction("amax", lambda x, dim, keepdim: x.amax(dim, keepdim=keepdim))
reduction("max", lambda x, dim, keepdim: x.max(dim, keepdim=keepdim)[0])
reduction("var", lambda x, dim, keepdim: x.var(dim, correction=0, keepdim=keepdim))
reduction("logsumexp", lambda x, dim, keepdim: x.logsumexp(dim, keepdim=keepdim))
reduction("vector_norm", lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim=keepdim))
reduction("softmax", lambda x, dim, keepdim: torch.softmax(x, dim))
reduction("log_softmax", lambda x, dim, keepdim: torch.log_softmax(x, dim))
reduction("cumsum", lambda x, dim, keepdim: x.cumsum(dim))
reduction("sort", lambda x, dim, keepdim: x.sort(dim)[0])
reduction("unbind", lambda x, dim, keepdim: x.unbind(dim))
reduction("chunk", lambda x, dim, keepdim: x.chunk(2, dim))
reduction("select", lambda x, dim, keepdim: x.select(dim, -1))
reduction("narrow", lambda x, dim, keepdim: x.narrow(dim, 0, max(x.shape[dim] - 1, 1)))
reduction("flip", lambda x, dim, keepdim: x.flip(dim))
reduction("squeeze_in_place", lambda x, dim, keepdim: x.clone().unsqueeze_(dim).squeeze_(dim).transpose_(dim, 0))
reduction("unsqueeze", lambda x, dim, keepdim: x.unsqueeze(dim))
reduction("transpose", lambda x, dim, keepdim: x.transpose(dim, 0))
reduction("flatten", lambda x, dim, keepdim: x.flatten(min(dim % x.dim(), x.dim() - 1)))
reduction("expand", lambda x, dim, keepdim: x.unsqueeze(0).expand(3, *x.shape))
reduction("repeat", lambda x, dim, keepdim: x.repeat(*[2 if at == dim % x.dim() else 1 for at in range(x.dim())]))


@operator
def reshape(draw):
    a, b, c = draw.size(), draw.size(), draw.size()
    before = draw.of((a, b, c), (a * b, c), (a, b * c), (a * b * c,))
    after = draw.of((a, b, c), (a * b, c), (a, b * c), (a * b * c,), (a, 1, b, c))
    return lambda x: x.reshape(after), [draw.tensor(*before)]


@operator
def permute(draw):
    shape = draw.shape()
    order = draw.of(*[list(range(at, len(shape))) + list(range(at)) for at in range(len(shape))])
    return lambda x: x.permute(order), [draw.tensor(*shape)]


@operator
def cat(draw):
    shape, count = draw.shape(), draw.size(1, 3)
    dim = draw.dim(len(shape))
    sizes = [[draw.size() if at == dim % len(shape) else size for at, size in enumerate(shape)] for _ in range(count)]
    return lambda *tensors: torch.cat(tensors, dim), [draw.tensor(*one) for one in sizes]


@operator
def stack(draw):
    shape = draw.shape()
    dim = draw.dim(len(shape) + 1)
    return lambda *tensors: torch.stack(tensors, dim), [draw.tensor(*shape) for _ in range(draw.size(1, 3))]


@operator
def index_select(draw):
    shape = draw.shape()
    dim = draw.dim(len(shape))
    indices = draw.integers(draw.size(), below=shape[dim])
    return lambda x, index: x.index_select(dim, index), [draw.tensor(*shape), indices]


@operator
def gather(draw):
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return lambda x, index: x.gather(dim, index), [draw.tensor(*shape), draw.integers(*shape, below=shape[dim])]


@operator
def embedding(draw):
    vocabulary = draw.size(2, 7)
    indices = draw.integers(*draw.shape(1, 2), below=vocabulary)
    return functional.embedding, [indices, draw.tensor(vocabulary, draw.size())]


@operator
def layer_norm(draw):
    shape = [*draw.shape(0, 2), draw.size(2)]
    weight, bias = draw.tensor(shape[-1]), draw.tensor(shape[-1])
    return lambda x, w, b: functional.layer_norm(x, shape[-1:], w, b), [draw.tensor(*shape), weight, bias]


@operator
def rms_norm(draw):
    shape = [*draw.shape(0, 2), draw.size(2)]
    return lambda x, w: functional.rms_norm(x, shape[-1:], w), [draw.tensor(*shape), draw.tensor(shape[-1])]


@operator
def cross_entropy(draw):
    rows, classes = draw.size(), draw.size(2, 7)
    how = {"reduction": draw.of("mean", "sum", "none"), "label_smoothing": draw.of(0.0, 0.1)}
    function = lambda scores, target: functional.cross_entropy(scores, target, **how)  # noqa: E731
    return function, [draw.tensor(rows, classes), draw.integers(rows, below=classes)]


@operator
def mse_loss(draw):
    shape, reduction = draw.shape(), draw.of("mean", "sum", "none")
    function = lambda x, y: functional.mse_loss(x, y, reduction=reduction)  # noqa: E731
    return function, [draw.tensor(*shape), draw.tensor(*shape)]


@operator
def attention(draw):
    batch, groups, length, features = draw.size(1, 3), draw.size(1, 3), draw.size(), draw.size(2, 4)
    repeats, is_causal = draw.size(1, 2), draw.of(True, False)

    def attend(queries, keys, values):
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal, enable_gqa=True)

    tensors = [draw.tensor(batch, heads, length, features) for heads in (groups * repeats, groups, groups)]
    return attend, tensors


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_plain_operator(name):
    @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data):
        draw = Draw(data)
        function, inputs = OPERATORS[name](draw)
        mesh_shape = draw.of(*MESHES)
        placements = [draw.placements(one, len(mesh_shape)) for one in inputs]

        def program(group):
            check_operator(DeviceMesh(group, mesh_shape), function, inputs, placements, rtol=1e-9, atol=1e-9)

        run_ranks(program, torch.Size(mesh_shape).numel())

    check()
