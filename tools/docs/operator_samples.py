"""Sample calls of operators on distributed tensors, of every kind, for pages and tests of all operators.

`SAMPLES` are functions of a `SampleFactory`, which creates their tensors; their results are differentiated.
`bind_sample` creates arguments from an operator's schema, where any values will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ferrodist.tensor.factories import distribute
from ferrodist.tensor.placement import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.dtensor import DTensor
    from ferrodist.tensor.placement import Placement

_aten = torch.ops.aten


class SampleFactory:
    """Creates the tensors of samples, with one placement where they have its dim, and replicated elsewhere.

    Args:
        mesh: A mesh of one rank.
        placement: The placement. Integers and bools are not partial.
    """

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        self._mesh, self._placement = mesh, placement

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> DTensor:
        """A leaf of this shape, with elements from 0 to 1; it requires grad if it is of floats."""
        tensor = torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)
        made = self._place(tensor.to(dtype))
        made.requires_grad_(dtype.is_floating_point)
        return made

    def numbers(self, *numbers: int) -> DTensor:
        """A tensor of these integers."""
        return self._place(torch.tensor(numbers))

    def _place(self, tensor: torch.Tensor) -> DTensor:
        now = self._placement
        fits = now.dim < tensor.dim() if isinstance(now, Shard) else tensor.dtype.is_floating_point
        return distribute(tensor, self._mesh, now if fits else Replicate(), src=None)


def bind_sample(
    operator: torch._ops.OpOverload, tensors: Iterator[Any], number: float = 1.0
) -> tuple[list[Any], dict[str, Any]] | None:
    """Create arguments for an operator's schema; None if it takes others than tensors and numbers.

    Args:
        operator: The operator.
        tensors: The source of tensor arguments.
        number: The value of arguments that may be any number.

    Returns:
        The positional arguments without a default, and the others without one.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in operator._schema.arguments:  # noqa: SLF001 - there is no public way to a schema
        if argument.default_value is not None:
            continue
        kind = str(argument.type)
        if kind == "Tensor":
            value = next(tensors)
        elif kind == "List[Tensor]":
            value = [next(tensors)]
        elif kind == "number":
            value = number
        elif kind in _BY_KIND:
            value = _BY_KIND[kind]
        elif kind.startswith("Optional"):
            value = None
        else:
            return None
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


_BY_KIND: dict[str, Any] = {
    "float": 1.0,
    "int": 1,
    "bool": False,
    "List[int]": [1],
    "List[number]": [1.0],
}


def _fused_step(new: SampleFactory, kind: type[torch.optim.Optimizer], **options: Any) -> None:
    parameter = new(4, 6)
    parameter.grad = torch.ones_like(parameter)
    kind([parameter], fused=True, **options).step()  # type: ignore[call-arg]


def _each_loss(new: SampleFactory) -> list[Any]:
    x, y = new(4, 6), new(4, 6).detach()
    losses = (
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.soft_margin_loss,
    )
    return [loss(x, y) for loss in losses]


def _attention(new: SampleFactory) -> Any:
    shape = (2, 4, 3, 8)
    return functional.scaled_dot_product_attention(new(*shape), new(*shape), new(*shape))


SAMPLES: Sequence[Callable[[SampleFactory], Any]] = (
    lambda new: new(4, 6).exp(),
    lambda new: new(4, 6) + new(6),
    lambda new: new(4, 6) * new(6),
    lambda new: new(4, 6) / new(6),
    lambda new: torch.maximum(new(4, 6), new(6)),
    lambda new: torch.where(new(4, 6, dtype=torch.bool), new(4, 6), new(6)),
    lambda new: new(4, 6).detach().add_(new(4, 6).detach()),
    lambda new: new(4, 6).masked_fill(new(4, 6, dtype=torch.bool), 0.0),
    lambda new: new(4, 6).masked_fill(new(4, 6, dtype=torch.bool), new().detach()),
    lambda new: new(4, 6).clamp(0.2, 0.5),
    lambda new: torch._foreach_mul([new(4, 6).detach()], new().detach()),  # noqa: SLF001 - how norms are clipped
    lambda new: functional.gelu(new(4, 6)),
    lambda new: functional.pad(new(4, 6), (0, 1)),
    lambda new: _fused_step(new, torch.optim.Adam),
    lambda new: _fused_step(new, torch.optim.Adam, lr=torch.tensor(0.1)),
    lambda new: _fused_step(new, torch.optim.AdamW),
    lambda new: _fused_step(new, torch.optim.AdamW, lr=torch.tensor(0.1)),
    lambda new: _fused_step(new, torch.optim.SGD, momentum=0.9),
    lambda new: _fused_step(new, torch.optim.SGD, momentum=0.9, lr=torch.tensor(0.1)),
    lambda new: _fused_step(new, torch.optim.Adagrad),
    lambda new: _fused_step(new, torch.optim.Adagrad, lr=torch.tensor(0.1)),
    lambda new: new(4, 6) @ new(6, 8),
    lambda new: torch.bmm(new(2, 4, 6), new(2, 6, 8)),
    lambda new: torch.mv(new(4, 6), new(6)),
    lambda new: torch.dot(new(6), new(6)),
    lambda new: torch.addmm(new(8), new(4, 6), new(6, 8)),
    lambda new: torch.addmv(new(4), new(4, 6), new(6)),
    lambda new: torch.baddbmm(new(2, 4, 8), new(2, 4, 6), new(2, 6, 8)),
    lambda new: new(4, 6).sum(1),
    lambda new: new(4, 6).mean(1),
    lambda new: new(4, 6).prod(1).detach(),
    lambda new: new(4, 6).amax(1).detach(),
    lambda new: new(4, 6).amin(1).detach(),
    lambda new: new(4, 6, dtype=torch.bool).all(1),
    lambda new: new(4, 6, dtype=torch.bool).any(1),
    lambda new: new(4, 6).count_nonzero(1),
    lambda new: new(4, 6).var(1).detach(),
    lambda new: torch.linalg.vector_norm(new(4, 6), dim=1).detach(),
    lambda new: new(4, 6).logsumexp(1).detach(),
    lambda new: (new(4, 6).argmax(1), new(4, 6).argmin(1)),
    lambda new: new(4, 6).min(1).values.detach(),
    lambda new: new(4, 6).t(),
    lambda new: new(2, 3, 4).transpose(0, 1),
    lambda new: new(2, 3, 4).permute(2, 0, 1),
    lambda new: new(4, 6).unsqueeze(1),
    lambda new: new(4, 1, 6).squeeze(1),
    lambda new: new(4, 1).expand(4, 6),
    lambda new: new(4, 6).view(2, 2, 6),
    lambda new: _aten._unsafe_view(new(4, 6), [24]),  # noqa: SLF001 - how matmul calls it
    lambda new: new(4, 6)[:, 1:3],
    lambda new: new(4, 6).select(1, 2),
    lambda new: new(2, 4, 6).diagonal(dim1=1, dim2=2),
    lambda new: new(4, 6).unfold(1, 2, 2),
    lambda new: torch.split(new(4, 6), 2, 1),
    lambda new: torch.split(new(4, 6), [2, 4], 1),
    lambda new: new(4, 2).unbind(1),
    lambda new: torch.cat([new(4, 6), new(4, 2)], 1),
    lambda new: torch.stack([new(4, 6), new(4, 6)], 1),
    lambda new: new(4, 6).flip(1),
    lambda new: new(4, 6).roll(1, 1),
    lambda new: new(4, 6).repeat(1, 2),
    lambda new: new(2, 4, 6).tril(),
    lambda new: torch.slice_scatter(new(4, 6), new(4, 2), 1, 0, 2),
    lambda new: torch.select_scatter(new(4, 6), new(4), 1, 0),
    lambda new: torch.diagonal_scatter(new(2, 4, 6), new(2, 4), dim1=1, dim2=2),
    lambda new: new(4, 6).index_select(1, new.numbers(0, 2)),
    lambda new: new(4, 6).index_add(1, new.numbers(0, 2), new(4, 2)),
    lambda new: new(4, 6).index_copy(1, new.numbers(0, 2), new(4, 2)).detach(),
    lambda new: new(4, 6).index_fill(1, new.numbers(0, 2), 0.0).detach(),
    lambda new: new(4, 6)[:, new.numbers(0, 2)],
    lambda new: new(4, 6).index_put((new.numbers(0, 2),), new(2, 6)).detach(),
    lambda new: new(4, 6).detach().index_put_((new.numbers(0, 2),), new(2, 6).detach()),
    lambda new: _aten._unsafe_index(new(4, 6), [None, new.numbers(0, 2)]),  # noqa: SLF001 - how interpolation calls it
    lambda new: new(4, 6).gather(1, new(4, 2, dtype=torch.int64)),
    lambda new: new(4, 6).scatter_add(1, new(4, 2, dtype=torch.int64), new(4, 2)).detach(),
    lambda new: new(4, 6).scatter(1, new(4, 2, dtype=torch.int64), new(4, 2)).detach(),
    lambda new: new(4, 6).scatter(1, new(4, 2, dtype=torch.int64), 0.0).detach(),
    lambda new: new(4, 6).scatter_reduce(1, new(4, 2, dtype=torch.int64), new(4, 2), "amax").detach(),
    lambda new: [
        function(new(4, 6).detach(), 1, new(4, 2, dtype=torch.int64), 2.0, reduce="add")
        for function in (torch.scatter, torch.Tensor.scatter_)
    ],
    lambda new: new(4, 6).detach().scatter_reduce_(1, new(4, 2, dtype=torch.int64), new(4, 2).detach(), "amax"),
    lambda new: functional.embedding(new(4, 2, dtype=torch.int64), new(8, 6)),
    lambda new: new(4, 6).new_zeros(2, 3),
    lambda new: new(4, 6).new_empty_strided((2, 3), (3, 1)).zero_(),
    lambda new: functional.dropout(new(4, 6), 0.5),
    lambda new: new(4, 6).softmax(1),
    lambda new: new(4, 6).log_softmax(1),
    lambda new: functional.nll_loss(new(4, 6), new.numbers(0, 1, 2, 3)),
    lambda new: functional.nll_loss(new(4, 6, 2, 2), new(4, 2, 2, dtype=torch.int64)),
    _each_loss,
    lambda new: functional.layer_norm(new(4, 6), (6,), new(6), new(6)),
    lambda new: functional.group_norm(new(4, 6), 2, new(6), new(6)),
    lambda new: functional.batch_norm(new(4, 6), None, None, new(6), new(6), training=True),
    _attention,
    lambda new: functional.conv2d(new(4, 2, 5, 5), new(3, 2, 3, 3), new(3)),
)
"""Each returns a tensor, several of them, or None. Shapes are small, with dims of different sizes."""
