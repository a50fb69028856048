"""Nested values, taken apart and put together: how deep, and what else may be in them."""

import msgspec
import pytest
import torch

from ferrodist.collectives.pytree import MAX_LEVELS, LeafCodec, check_spec, flatten, unflatten
from ferrodist.collectives.serialization import PackedValue, UnreadableError, decode_value, encode_value


def nest(levels, value=None):
    """A value in so many lists, tuples and dicts."""
    for level in range(levels):
        value = ([value], (value,), {"a": value})[level % 3]
    return value


def test_maximum_depth():
    """Values of the maximum depth come back; deeper ones, and those that contain themselves, are refused."""
    value = nest(MAX_LEVELS, 3)
    encoded, apart = encode_value(PackedValue.of(value, "it"), "it")
    assert apart == []
    assert decode_value(memoryview(encoded))[0].open() == value
    endless = []
    endless.append(endless)
    for wrong in (nest(MAX_LEVELS + 1, 3), endless):
        with pytest.raises(TypeError, match=rf"^it\[.*\] is nested more than {MAX_LEVELS} levels deep, or in itself"):
            PackedValue.of(wrong, "it")


def test_a_spec_that_is_too_deep():
    """A spec from another rank is checked before it is followed."""
    spec = ["plain", 3]
    for _ in range(MAX_LEVELS + 1):
        spec = ["list", [spec]]
    check_spec(spec[1][0], 0)
    with pytest.raises(ValueError, match="nested too deeply"):
        check_spec(spec, 0)


def test_errors_name_the_path():
    """The path to a leaf that has no spec is in the error."""
    with pytest.raises(TypeError, match=r"^it\[0\]\['key'\]\[2\] is of type object: tensors, numbers"):
        flatten([{"key": (1, 2, object())}], "it")


def test_leaf_codecs():
    """A codec adds a type of leaf; an unknown tag is refused."""
    ranges = LeafCodec(
        tag="range",
        encode=lambda value: [value.start, value.stop] if isinstance(value, range) else None,
        decode=lambda ends: range(*ends),
    )
    value = {"here": range(3, 5), "tensor": torch.ones(2)}
    encoded, _ = encode_value(PackedValue.of(value, "it", [ranges]), "it")
    found = decode_value(memoryview(encoded), ["range"])[0].open([ranges])
    assert found["here"] == range(3, 5)
    assert torch.equal(found["tensor"], torch.ones(2))
    with pytest.raises(ValueError, match="the tag 'range'"):
        decode_value(memoryview(encoded))
    with pytest.raises(TypeError, match=r"it\['here'\] is of type range"):
        PackedValue.of(value, "it")


def test_every_leaf_is_decoded_though_one_fails():
    """A codec decodes each leaf once, before and after one that raises, in tuples, lists and dicts."""
    seen = []

    def decode(number):
        seen.append(number)
        if number in (2, 4):
            raise ValueError(f"{number} is wrong")
        return number

    def encode(value):
        return int(value.real) if isinstance(value, complex) else None

    made = LeafCodec(tag="own", encode=encode, decode=decode)
    spec, _ = flatten([1 + 0j, (2 + 0j, {"a": 3 + 0j}, [4 + 0j]), 5 + 0j], "it", [made])
    with pytest.raises(ValueError, match="2 is wrong"):
        unflatten(spec, [], [made])
    assert seen == [1, 2, 3, 4, 5]


def test_impossible_tensors_are_refused():
    """Sizes and numbers of dtypes below 0, of which Python and torch would make others."""
    memory, _ = encode_value(PackedValue.of(torch.zeros(3), "it"), "it")
    header = msgspec.msgpack.encode([["tensor", 0], [[1, [3], False, False, 0]]])
    at = memory.index(header)
    for entry in ([1, [-1], False, False, 0], [-1, [3], False, False, 0]):
        changed = msgspec.msgpack.encode([["tensor", 0], [entry]])
        assert len(changed) == len(header)
        with pytest.raises(UnreadableError):
            decode_value(memoryview(memory[:at] + changed + memory[at + len(header) :]))
