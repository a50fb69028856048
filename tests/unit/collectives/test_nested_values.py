"""Nested values, taken apart and put together: how deep, and what else may be in them."""

import pytest
import torch

from ferrodist.collectives.pytree import MAX_LEVELS, LeafCodec, check_plan, flatten, unflatten
from ferrodist.collectives.serialization import PackedValue, decode_value, encode_value


def nest(levels, value=None):
    """A value in so many lists, tuples and dicts."""
    for level in range(levels):
        value = ([value], (value,), {"a": value})[level % 3]
    return value


def test_depth():
    """As deep as may be, values come back; deeper ones, and those that hold themselves, are refused."""
    value = nest(MAX_LEVELS, 3)
    letter, apart = encode_value(PackedValue.of(value, "it"), "it")
    assert apart == []
    assert decode_value(letter)[0].open() == value
    endless = []
    endless.append(endless)
    for wrong in (nest(MAX_LEVELS + 1, 3), endless):
        with pytest.raises(TypeError, match=rf"^it\[.*\] is nested more than {MAX_LEVELS} levels deep, or in itself"):
            PackedValue.of(wrong, "it")


def test_a_plan_that_is_too_deep():
    """What another rank sends is refused before it is followed."""
    plan = ["plain", 3]
    for _ in range(MAX_LEVELS + 1):
        plan = ["list", [plan]]
    check_plan(plan[1][0], 0)
    with pytest.raises(ValueError, match="nested too deeply"):
        check_plan(plan, 0)


def test_places_are_named():
    """The way to what does not fit is in the error."""
    with pytest.raises(TypeError, match=r"^it\[0\]\['key'\]\[2\] is of type object: tensors, numbers"):
        flatten([{"key": (1, 2, object())}], "it")


def test_extensions():
    """One knows one more kind, by what stands for it; a mark that nobody knows is refused."""
    ranges = LeafCodec(
        mark="range",
        take_apart=lambda value: [value.start, value.stop] if isinstance(value, range) else None,
        put_together=lambda ends: range(*ends),
    )
    value = {"here": range(3, 5), "tensor": torch.ones(2)}
    letter, _ = encode_value(PackedValue.of(value, "it", [ranges]), "it")
    found = decode_value(letter, ["range"])[0].open([ranges])
    assert found["here"] == range(3, 5)
    assert torch.equal(found["tensor"], torch.ones(2))
    with pytest.raises(ValueError, match="the mark 'range'"):
        decode_value(letter)
    with pytest.raises(TypeError, match=r"it\['here'\] is of type range"):
        PackedValue.of(value, "it")


def test_all_is_put_together_though_something_fails():
    """An extension is given each of its parts once, before and behind, in tuples, lists and dicts."""
    seen = []

    def put_together(number):
        seen.append(number)
        if number in (2, 4):
            raise ValueError(f"{number} is wrong")
        return number

    def take_apart(value):
        return int(value.real) if isinstance(value, complex) else None

    made = LeafCodec(mark="own", take_apart=take_apart, put_together=put_together)
    plan, _ = flatten([1 + 0j, (2 + 0j, {"a": 3 + 0j}, [4 + 0j]), 5 + 0j], "it", [made])
    with pytest.raises(ValueError, match="2 is wrong"):
        unflatten(plan, [], [made])
    assert seen == [1, 2, 3, 4, 5]
