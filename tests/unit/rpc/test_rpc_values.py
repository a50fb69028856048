"""Values in arguments and results, and the position that errors name for those that can't be sent."""

import re

import numpy as np
import pytest
import torch

from ferrodist.errors import RpcError
from ferrodist.rpc import RpcAgent, SimulatedRpcBackend
from ferrodist.rpc.messages import ARRAY_CODEC, Call, pack_call, pack_result, unpack_call, unpack_result

CODECS = (ARRAY_CODEC,)
_PATIENCE = 60.0


@pytest.fixture
def agents():
    """Two agents with a function."""
    made = [RpcAgent(way, {"echo": echo, "Box": Box}) for way in SimulatedRpcBackend.create_group(2)]
    yield made
    for agent in made:
        agent.close()


def echo(*values, **keywords):
    """What it is given."""
    return [*values, keywords]


class Box:
    """Has a method."""

    def put(self, *values, **keywords):
        """Take anything."""


@pytest.mark.parametrize(
    ("arguments", "keywords", "position"),
    [
        ((set(),), {}, "argument [0] is of type set"),
        ((1, 2, set()), {}, "argument [2] is of type set"),
        (([1, 2, set()],), {}, "argument [0][2] is of type set"),
        ((1, [2, {"a": (3, set())}]), {}, "argument [1][1]['a'][1] is of type set"),
        (([[1, [2]], [2, [1, set()]]],), {}, "argument [0][1][1][1] is of type set"),
        ((), {"value": set()}, "keyword ['value'] is of type set"),
        ((), {"value": [1, set()]}, "keyword ['value'][1] is of type set"),
        ((1, [2]), {"value": {"b": [1, 2, set()]}}, "keyword ['value']['b'][2] is of type set"),
        ((), {"[1]": [1, [2, set()]]}, "keyword ['[1]'][1][1] is of type set"),
        (({"[2]": {"[1]": set()}},), {}, "argument [0]['[2]']['[1]'] is of type set"),
        (([{None: 1}],), {}, "argument [0][0] has the key None"),
        (
            ([{1.5: 1}],),
            {},
            "argument [0][0] has the key 1.5: keys of values that go from rank to rank are text or integers",
        ),
        ((), {"value": {None: 1}}, "keyword ['value'] has the key None"),
    ],
)
def test_positions_in_arguments(agents, arguments, keywords, position):
    """Errors name the position, at any depth, in calls of functions and methods."""
    box = agents[0].remote(1, "Box")
    for title, call in (
        ("echo", lambda: agents[0].rpc_sync(1, "echo", *arguments, **keywords)),
        ("echo", lambda: agents[0].rpc_async(1, "echo", *arguments, **keywords)),
        ("create", lambda: agents[0].remote(1, "Box", *arguments, **keywords)),
        ("RRef.put", lambda: box.rpc_sync().put(*arguments, **keywords)),
        ("RRef.put", lambda: box.remote().put(*arguments, **keywords)),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(f'the call of {title!r}: {position}')}"):
            call()


def test_positions_in_results(agents):
    """The caller's error names the position."""
    agents[1].register("give", lambda: {"a": [1, set()]})
    with pytest.raises(RpcError, match=re.escape("the result['a'][1] is of type set")):
        agents[0].rpc_sync(1, "give")


def passed(value):
    """A value as an argument, a keyword, and a result, after its way."""
    call = unpack_call(pack_call(Call("echo", (value,), {"key": value}), CODECS), 1, CODECS)
    return [call.arguments[0], call.keywords["key"], unpack_result(pack_result(value, CODECS), 1, CODECS)]


@pytest.mark.parametrize("number", [0, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_integers(number):
    """Of 64 bits, signed or unsigned: alone, nested and as keys."""
    for value in (number, [number], {"a": (number,)}, {number: 1}):
        assert passed(value) == [value] * 3


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_integers_that_are_too_large(number):
    """They are refused alone and nested, and the position is named."""
    for value, position in ((number, ""), ([number], "[0]"), ({"a": (number,)}, "['a'][0]")):
        with pytest.raises(TypeError, match=re.escape(f"argument [0]{position} is {number}: integers that go from")):
            pack_call(Call("echo", (value,), {}), CODECS)
        with pytest.raises(TypeError, match=re.escape(f"the result{position} is {number}: integers that go from")):
            pack_result(value, CODECS)


SCALARS = [
    np.float16(0.1),
    np.float32(0.1),
    np.float64(0.1),
    np.int64(-(2**63)),
    np.uint8(255),
    np.bool_(False),
    np.str_("text"),
    np.bytes_(b"bytes"),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_numpy_scalars(agents, value):
    """They arrive as equal Python values: in arguments and results, nested and as keys."""
    for each in (value, [value], {"a": (value,)}):
        assert passed(each) == [each] * 3
        assert agents[0].rpc_sync(1, "echo", each, key=each) == [each, {"key": each}]
        assert agents[0].rpc_sync(0, "echo", each) == [each, {}]
    assert type(passed(value)[0]) in (float, int, bool, str, bytes)


def test_numpy_scalars_as_keys():
    """An integer of numpy is as good a key as one of Python."""
    assert passed({np.int64(3): 1, np.str_("a"): 2})[0] == {3: 1, "a": 2}


@pytest.mark.parametrize("value", [np.complex64(1j), np.datetime64("2020-01-01"), np.timedelta64(1, "ns")])
def test_numpy_scalars_without_an_equal(value):
    """A time does not become a number: it is refused."""
    with pytest.raises(TypeError, match=rf"argument \[0\] is of type {type(value).__name__}"):
        pack_call(Call("echo", (value,), {}), CODECS)


class Kind(np.ndarray):
    """A user's own."""


NO_PLAIN_ARRAYS = [
    np.ma.masked_array([1, 2], mask=[True, False]),
    np.zeros(3).view(Kind),
]


@pytest.mark.parametrize("value", NO_PLAIN_ARRAYS, ids=lambda value: type(value).__name__)
def test_arrays_that_are_more_than_their_elements(value):
    """They are refused, for only the elements would arrive."""
    expected = re.escape(f"argument [1][0] is of type {type(value).__name__}, of which only the elements would arrive")
    with pytest.raises(TypeError, match=expected):
        pack_call(Call("echo", (1, [value]), {}), CODECS)


def test_memory_mapped_arrays(tmp_path):
    """They arrive as arrays."""
    array = np.memmap(tmp_path / "array", dtype=np.int32, shape=(3,), mode="w+")
    array[:] = [1, 2, 3]
    assert [type(found) for found in passed([array])[0]] == [np.ndarray]
    assert passed([array])[0][0].tolist() == [1, 2, 3]


def test_read_only_arrays(tmp_path):
    """They arrive as others do, without a warning of torch's."""
    np.arange(3).tofile(tmp_path / "array")
    array = np.memmap(tmp_path / "array", dtype=np.int64, mode="r")
    assert passed([array])[0][0].tolist() == [0, 1, 2]


NO_TENSORS = [
    np.array([{1}], dtype=object),
    np.array(["a"]),
    np.arange(3, dtype=">i4"),
    np.arange(3, dtype=np.uint16),
]


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: str(value.dtype))
def test_arrays_of_other_types(value):
    """The error names their type and position."""
    expected = re.escape(f"keyword ['value'][0] is a numpy array of {value.dtype}, which does not go")
    with pytest.raises(TypeError, match=expected):
        pack_call(Call("echo", (), {"value": [value]}), CODECS)


def test_pickled_arrays():
    """With pickles, arrays that can't be tensors arrive unchanged."""
    made = [RpcAgent(way, {"echo": echo}, allow_pickle=True) for way in SimulatedRpcBackend.create_group(2)]
    values = [NO_PLAIN_ARRAYS[0], *NO_TENSORS, np.arange(2)]
    *found, _ = made[0].rpc_sync(1, "echo", *values, timeout=_PATIENCE)
    for agent in made:
        agent.close()
    assert [(type(each), each.dtype, each.tolist()) for each in found] == [
        (type(each), each.dtype, each.tolist()) for each in values
    ]


CANT_TRAVEL = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "unsigned": lambda: torch.ones(2, dtype=torch.uint16),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "large": lambda: torch.eye(1000).to_sparse(),
}


@pytest.mark.filterwarnings("ignore")  # of torch, that these are not finished, or will go
@pytest.mark.parametrize("kind", CANT_TRAVEL)
@pytest.mark.parametrize("to", [0, 1])
def test_tensors_that_cant_be_sent(agents, kind, to):
    """Errors name function and position, in calls and results; the agents go on."""
    tensor = CANT_TRAVEL[kind]()
    agent = agents[0]
    agents[to].register("give", lambda: (1, [tensor]))
    why = "is a (nested tensor: pass|tensor that does not go from rank to rank: )"
    for call in (agent.rpc_sync, lambda *given: agent.rpc_async(*given).result(_PATIENCE)):
        with pytest.raises(TypeError, match=rf"the call of 'echo': argument \[1\]\['a'\] {why}"):
            call(to, "echo", 1, {"a": tensor})
    with pytest.raises(RpcError, match=rf"the call of 'give' on rank {to}: the result\[1\]\[0\] {why}"):
        agent.rpc_sync(to, "give", timeout=_PATIENCE)
    reference = agent.reference([tensor])
    with pytest.raises(RpcError, match=rf"the result\[0\] {why}"):
        reference.to_here(_PATIENCE)
    assert agent.rpc_sync(to, "echo", 1) == [1, {}]
    assert agent.statistics().in_flight == 0


def test_tensors_of_transforms(agents):
    """Tensors without memory are an error of the arguments."""
    seen = []

    def call(one):
        with pytest.raises(TypeError, match=r"argument \[0\] is a tensor that does not go from rank to rank") as caught:
            agents[0].rpc_sync(1, "echo", one)
        seen.append(str(caught.value))
        return one

    torch.vmap(call)(torch.ones(3, 2))
    assert len(seen) == 1
