"""Which elements share memory, compared with the addresses of all of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from ferrodist.collectives.arguments import elements_overlap


def _addresses(tensor: torch.Tensor) -> list[int]:
    """The address of every byte of every element."""
    item = tensor.element_size()
    places = itertools.product(*(range(size) for size in tensor.shape))
    offsets = [sum(i * stride for i, stride in zip(place, tensor.stride(), strict=True)) for place in places]
    return [tensor.data_ptr() + offset * item + byte for offset in offsets for byte in range(item)]


def _overlap(*tensors: torch.Tensor) -> bool:
    addresses = [address for tensor in tensors for address in _addresses(tensor)]
    return len(set(addresses)) < len(addresses)


def test_strides_of_one_tensor() -> None:
    """Every shape of up to three small dims with every stride up to 7: dims in any order, nested or not."""
    memory = torch.zeros(64, dtype=torch.int16)
    outcomes = []
    for shape in itertools.product(range(4), (1, 3), (2, 4)):
        for strides in itertools.product(range(0, 8, 1), (0, 1, 2, 5), (0, 1, 3, 6)):
            tensor = memory.as_strided(shape, strides, 3)
            assert elements_overlap(tensor) == _overlap(tensor), (shape, strides)
            outcomes.append(elements_overlap(tensor))
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_several_tensors(dtype: torch.dtype) -> None:
    """Interleaved columns share no memory though their spans do; neighbours and shifted ones are told apart."""
    matrix, other = torch.zeros(6, 4, dtype=dtype), torch.zeros(5, dtype=dtype)
    cases = [
        matrix.unbind(1),
        matrix.unbind(0),
        (matrix[:, :2], matrix[:, 2:]),
        (matrix[:, :3], matrix[:, 2:]),
        (matrix, matrix[0]),
        (matrix[3], other, matrix[:3]),
        (matrix[3], other, matrix[:4]),
        (matrix[0], matrix[0, :0], matrix[1]),
        (other, other),
        (),
    ]
    assert [elements_overlap(*case) for case in cases] == [_overlap(*case) for case in cases]
    assert [elements_overlap(*case) for case in cases] == [False] * 3 + [True, True, False, True, False, True, False]


def test_bytes_of_other_types() -> None:
    """What counts is memory, not elements: half of a number shares memory with the whole."""
    memory = torch.zeros(16, dtype=torch.uint8)
    whole, halves = memory.view(torch.float64), memory.view(torch.float32)
    assert elements_overlap(whole[:1], halves[1:2])
    assert not elements_overlap(whole[:1], halves[2:])


def test_large_tensors_cost_nothing() -> None:
    """What slicing and transposing make is judged by strides alone, and so is what was expanded."""
    large = torch.empty(1 << 40, device="meta")
    assert not elements_overlap(large.view(1 << 20, -1).t()[::2, 3:])
    assert elements_overlap(large[:1].expand(1 << 50))
