"""States as trees: everything comes back as it was, all else is refused by its place, and ranks' trees become one."""

import collections
import dataclasses
import enum
import itertools
import math
import struct

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrodist import DeviceMesh, DTensor, Shard
from ferrodist.checkpoint import PerRank, ShardMetadata, load_distributed, save_distributed
from ferrodist.checkpoint.format.manifest import Manifest
from ferrodist.checkpoint.format.tree import MAX_DEPTH, check_tree, referenced_keys
from ferrodist.checkpoint.load_plan import LoadPlanner
from ferrodist.checkpoint.save_plan import merge_trees
from ferrodist.checkpoint.state import Encoder, PartialSums, collect_state
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks

NUMBERS = [np.bool_, np.int8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128]

numbers = st.sampled_from(NUMBERS).flatmap(
    lambda kind: st.integers(0, 100).map(kind) if kind is not np.bool_ else st.booleans().map(np.bool_)
)
keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.floats(allow_nan=False)
)
hashables = st.recursive(
    st.one_of(keys, numbers, st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
plain = st.one_of(
    hashables,
    st.floats(),
    st.complex_numbers(),
    st.integers(-(2**70), 2**70),
    st.binary(max_size=20).map(bytearray),
    st.sampled_from([torch.float32, torch.bool, torch.float8_e5m2, torch.device("cpu"), torch.device("cuda", 3)]),
    st.lists(st.integers(-1, 2**40), max_size=4).map(torch.Size),
    st.sets(hashables, max_size=3),
)
states = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=6), inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3),
    ),
    max_leaves=12,
)


def encode(state, rank=0):
    """The tree of a state and its tensors."""
    encoder = Encoder(rank)
    return encoder.encode(collect_state(state, PartialSums())), encoder


def decode(tree):
    """A tree without tensors as a state."""
    data = msgspec.json.decode(msgspec.json.encode(tree))
    check_tree(data, ())
    manifest = Manifest(
        save_id="", created_ns=0, producer="", world_size=1, block_bytes=1, files=[], tensors={}, tree=data
    )
    return LoadPlanner(manifest, 0, 1, ShardMetadata(num_ranks=1)).decode(data)()


def bits(value):
    """A state as something that is equal only if all of it is the same: types, signs of zeros, order of dicts."""
    if isinstance(value, dict):
        return dict, [(bits(key), bits(each)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(bits, value)))
    if isinstance(value, (list, tuple)):
        return type(value), [bits(each) for each in value]
    if isinstance(value, float) and type(value) is float:
        return float, "nan" if math.isnan(value) else struct.pack("d", value)
    if type(value) is complex:
        return complex, bits(value.real), bits(value.imag)
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.shape, bits(value.tolist())
    return type(value), repr(value)


@settings(max_examples=300, deadline=None)
@given(states)
def test_everything_comes_back_as_it_was(state):
    """Any nesting of all that has no elements, in its types, with the signs of zeros, and in a dict's order."""
    tree, _ = encode(state)
    assert bits(decode(tree)) == bits(state)
    assert msgspec.json.encode(encode(decode(tree))[0]) == msgspec.json.encode(tree)
    assert merge_trees({0: tree, 1: encode(state)[0], 5: tree}) == tree


def test_a_state_of_every_kind_through_a_file(tmp_path):
    """Also tensors and arrays in lists, in dicts with keys that are numbers, and beside each other."""
    state = {
        "step": 7,
        "seen": {1, 2},
        "lr": [0.1, {"a": (torch.arange(3), None)}],
        3: {("a", 1): np.arange(6).reshape(2, 3)[:, ::-1], b"k": np.array(2.5, dtype=np.float16)},
        "arrays": [np.arange(3, dtype=">i4"), np.zeros((0, 2)), np.frombuffer(b"abcd", dtype=np.uint8)],
        "number": np.float32(0.1),
        "empty": [{}, [], (), set(), "", b"", torch.empty(0)],
        "nan": [math.nan, math.inf, -math.inf, -0.0, complex(math.nan, -0.0)],
    }
    save_distributed(state, tmp_path)
    loaded = load_distributed(tmp_path)
    state["arrays"][0] = state["arrays"][0].astype("<i4")  # numbers are of this machine's byte order
    assert bits(loaded) == bits(state)


def test_subclasses_come_back_as_their_builtin_base(tmp_path):
    """No class is looked up by a name from a file. Their contents are saved like all else."""
    point = collections.namedtuple("point", "x y")  # noqa: PYI024
    state = {"p": point(1, torch.nn.Linear(1, 1)), "o": collections.OrderedDict(a=1), "l": type("L", (list,), {})([1])}
    save_distributed(state, tmp_path)
    loaded = load_distributed(tmp_path)
    assert type(loaded["p"]) is tuple
    assert torch.equal(loaded["p"][1]["weight"], state["p"].y.weight)
    assert (type(loaded["o"]), type(loaded["l"])) == (dict, list)


class Colour(enum.Enum):
    """A value that checkpoints don't support."""

    RED = 1


class Number(enum.IntEnum):
    """A subclass of a number."""

    ONE = 1


@dataclasses.dataclass
class Record:
    """A class with fields."""

    x: int = 1


REFUSED = {
    "an object": object(),
    "a function": print,
    "a class": torch.nn.Linear,
    "an enum": Colour.RED,
    "an enum of numbers": Number.ONE,
    "a dataclass": Record(),
    "text that is no Unicode": "\ud800",
    "a memoryview": memoryview(b""),
    "a generator": (i for i in ()),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a meta tensor": torch.empty(2, device="meta"),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "a lazy parameter": torch.nn.parameter.UninitializedParameter(),
    "an array of text": np.array(["a"]),
    "an array of objects": np.array([None]),
    "an array of times": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "an array of records": np.zeros(2, dtype=[("a", "i4")]),
    "a masked array": np.ma.masked_array([1, 2], [True, False]),
    "text of NumPy": np.str_("a"),
    "bytes of NumPy": np.bytes_(b"a"),
    "a time of NumPy": np.datetime64("2026-01-01"),
    "a long float": np.longdouble(1),
    "a set of tensors": {torch.ones(1)},
    "a set of PerRank": {PerRank(1)},
    "a key that is an object": {object(): 1},
    "a key that is no Unicode": {"\udfff": 1},
    "an optimizer": torch.optim.SGD([torch.ones(1)]),
}


@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_nested_tensors_are_refused(tmp_path):
    """Both of torch's layouts, one of which has no shape to ask for: the error is ours."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
        with pytest.raises(TypeError, match=r"\['x'\] is a nested tensor"):
            save_distributed({"x": nested}, tmp_path / "checkpoint")


def test_unsupported_values_are_refused_with_their_path(tmp_path):
    """With TypeError on the rank that has them, and DistCheckpointError on the others, before anything is written."""

    def program(group):
        for what, value in REFUSED.items():
            with pytest.raises(TypeError if group.rank else DistCheckpointError) as failure:
                save_distributed({"a": [1, {"b": value if group.rank else 1}]}, tmp_path / "checkpoint")
            assert "['a'][1]['b']" in str(failure.value), what

    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []


class Endless:
    """A state that contains itself."""

    def state_dict(self):
        """Itself."""
        return {"again": self}

    def load_state_dict(self, state):
        """Nothing."""


def test_states_that_contain_themselves_are_refused(tmp_path):
    """A list, a dict or an object in itself is a ValueError with the path."""
    endless = [[1]]
    endless[0].append(endless)
    looped = {"a": {}}
    looped["a"]["b"] = looped
    for state in (endless, looped, Endless(), {"x": PerRank(endless)}):
        with pytest.raises(ValueError, match="holds itself"):
            save_distributed(state, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sets_that_readers_refuse_are_refused():
    """Sets and dicts of many members with one hash, which readers refuse since Python is slow with them."""
    alike = [number * (2**61 - 1) for number in range(200)]
    for value in (set(alike), frozenset(alike), dict.fromkeys(alike, 1), collections.Counter(alike)):
        with pytest.raises(ValueError, match=r"\['a'\] has more than 100 members or keys with one hash"):
            Encoder(0).encode({"a": value})


def test_deep_states_come_back(tmp_path):
    """As deep as may be, in each way of nesting; one deeper is refused."""
    for wrap in (lambda x: [x], lambda x: {"k": x}, lambda x: {1: x}, lambda x: (x,)):
        state = torch.ones(1)
        for _ in range(MAX_DEPTH):
            state = wrap(state)
        save_distributed(state, tmp_path)
        loaded = load_distributed(tmp_path)
        assert bits(loaded) == bits(state)
        load_distributed(tmp_path, state)
        with pytest.raises(ValueError, match="nested too deeply"):
            save_distributed(wrap(state), tmp_path)


def test_tied_tensors_are_saved_once():
    """The same memory with the same layout, also as an array; not memory that only begins at the same address."""
    weight = torch.arange(4.0)
    state = {
        "a": weight,
        "b": [weight, torch.nn.Parameter(weight)],
        "c": weight.detach(),
        "array": weight.numpy(),
        "half": weight[:2],
        "square": weight.view(2, 2),
        "bits": weight.view(torch.int32),
        "empty": [torch.empty(0), torch.empty(0)],
    }
    tree, encoder = encode(state)
    assert list(encoder.tensors) == ["a", "half", "square", "bits", "empty.0", "empty.1"]
    assert list(referenced_keys(tree)) == ["a", "a", "a", "a", "a", "half", "square", "bits", "empty.0", "empty.1"]


def test_conjugates_are_other_tensors():
    """Though they are the same memory."""
    value = torch.ones(2, dtype=torch.complex64)
    _, encoder = encode({"a": value, "b": value.conj(), "c": value.conj().imag, "d": value.imag})
    assert list(encoder.tensors) == ["a", "b", "c", "d"]


def test_a_tensor_in_perrank_is_saved_by_itself(tmp_path):
    """Also if another place has it: it is another one on other ranks, whichever comes first."""

    def program(group):
        common = torch.ones(2)
        save_distributed({"own": PerRank([common, common]), "all": common, "more": PerRank(common)}, tmp_path)
        loaded = load_distributed(tmp_path)
        assert bits(loaded) == bits({"own": [common, common], "all": common, "more": common})
        assert loaded["own"][0] is loaded["own"][1]

    run_ranks(program, 3)


def test_names_that_collide():
    """Two tensors of one name in the files are refused, with both places."""
    for state in ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, {1: torch.ones(1), "1": torch.ones(1)}):
        with pytest.raises(ValueError, match=r"rename one"):
            encode(state)
    with pytest.raises(ValueError, match=r"\['a'\]\['b'\].*\['a\.b'\]"):
        encode({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(ValueError, match="safetensors"):
        encode({"__metadata__": torch.ones(1)})
    shared = torch.ones(1)
    encode({"a": {"b": shared}, "a.b": shared})


def test_names_that_collide_between_ranks(tmp_path):
    """If ranks have different paths with one name, neither is lost."""

    def program(group):
        state = {"a.b": torch.ones(2)} if group.rank else {"a": {"b": torch.ones(2)}}
        with pytest.raises(DistCheckpointError, match=r"\['a'\]\['b'\] on rank 0.*\['a\.b'\] on rank 1.*rename"):
            save_distributed(state, tmp_path)

    run_ranks(program, 2)


def test_a_name_like_that_of_a_part(tmp_path):
    """A part of a tensor is called ``a[0:1]`` in files: a whole one of that name is refused or has its own file."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        divided = DTensor.from_local(torch.full((1,), float(group.rank)), mesh, [Shard(0)])
        state = {"a": divided, "a[0:1]": torch.full((1,), 7.0), "a[1:2]": torch.full((1,), 8.0)}
        with pytest.raises(DistCheckpointError, match=r"'a\[0:1\]'.*rename"):
            save_distributed(state, tmp_path)

    run_ranks(program, 2)


def merged(*states):
    """The state of several ranks."""
    trees = {rank: encode(state, rank)[0] for rank, state in enumerate(states)}
    return merge_trees(trees)


def test_other_keys_on_other_ranks():
    """Dicts are joined at any depth, in the order in which ranks have their keys, whatever the keys are."""
    assert decode(merged({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}, {})) == {"a": {"x": 1, "y": 2}, "b": 3}
    assert decode(merged([{0: "a"}], [{1: "b", 0: "a"}], [{}])) == [{0: "a", 1: "b"}]
    assert decode(merged({"l": ({"x": 1}, 2)}, {"l": ({"y": 1}, 2)})) == {"l": ({"x": 1, "y": 1}, 2)}
    assert decode(merged({1: {"x": 1}, "t": 0}, {"t": 0, 1: {"y": 1}, (2, "k"): 5})) == {
        1: {"x": 1, "y": 1},
        "t": 0,
        (2, "k"): 5,
    }
    assert list(decode(merged({"a": 1, "b": 1}, {"b": 1, "a": 1, "c": 1}))) == ["a", "b", "c"]


ALIKE = [1, True, 1.0, np.int64(1), "1", (1,), [1], {1}, {1: 1}, None, -0.0, 0.0, 0, b"1", b"", bytearray()]


def test_values_that_differ_between_ranks():
    """Also if Python takes them for equal: the error names the place and the first two ranks that differ."""
    expected = r"\['a'\]\[0\] differs.* rank 0 has.* rank 2 has.*PerRank"
    for one, other in itertools.permutations(ALIKE, 2):
        with pytest.raises(DistCheckpointError, match=expected) as failure:
            merged({"a": [one]}, {"a": [one]}, {"a": [other]}, {"a": [one]})
        assert failure.value.ranks == (0, 2)


def test_differences_deep_inside():
    """The place is where they differ, not what it is in; nothing of other ranks is compared with keys they lack."""
    for one, other, place in [
        ({"x": {"y": (0, [1, 2])}}, {"x": {"y": (0, [1, 3])}}, r"\['x'\]\['y'\]\[1\]\[1\]"),
        ({4: {"y": 1}}, {4: {"y": 2}}, r"\[4\]\['y'\]"),
        ([1, 2], [1], "the state itself"),
        ({"x": torch.ones(1)}, {"x": np.ones(1)}, r"\['x'\]"),
        ({"x": {1, 2}}, {"x": {1, 3}}, r"\['x'\]"),
    ]:
        with pytest.raises(DistCheckpointError, match=f"^{place} differs"):
            merged(one, other)


def test_per_rank_values(tmp_path):
    """All ranks' values are saved, at any depth, with tensors; also if not all ranks have one."""

    def program(group):
        own = {"seed": group.rank, "noise": torch.full((group.rank,), 1.0 * group.rank)}
        state = {"own": PerRank(own), "few": {}, "same": 1}
        if group.rank:
            state["few"]["x"] = PerRank(group.rank)
        save_distributed(state, tmp_path)
        into = {"own": PerRank(None), "few": {"x": PerRank(None)} if group.rank else {}}
        loaded = load_distributed(tmp_path, into)
        assert bits(loaded["own"]) == bits(own)
        assert loaded["few"] == {"x": group.rank or None}

    run_ranks(program, 3)


def test_per_rank_values_on_another_number_of_ranks(tmp_path):
    """Loading them is refused, unless ``resize`` makes a rank's value from all."""

    def saving(group):
        save_distributed({"own": PerRank([group.rank, torch.tensor(group.rank)]), "x": torch.ones(2)}, tmp_path)

    def loading(group):
        with pytest.raises(DistCheckpointError, match=r"\['own'\] was saved by 3 ranks.*resize"):
            load_distributed(tmp_path, {"own": PerRank(None)})
        assert load_distributed(tmp_path, {"x": None})["x"].sum() == 2
        into = {"own": PerRank(None, resize=lambda values, rank, size: (values, rank, size))}
        values, rank, size = load_distributed(tmp_path, into)["own"]
        assert bits(values) == bits([[0, torch.tensor(0)], [1, torch.tensor(1)], [2, torch.tensor(2)]])
        assert (rank, size) == (group.rank, 2)

    run_ranks(saving, 3)
    run_ranks(loading, 2)


def test_a_per_rank_value_that_a_rank_lacks(tmp_path):
    """A rank that wants a value that it has not saved gets an error."""

    def program(group):
        save_distributed({"own": PerRank(1)} if group.rank else {}, tmp_path)
        with pytest.raises(DistCheckpointError, match=r"\['own'\], which rank 0 wants"):
            load_distributed(tmp_path, {"own": PerRank(None)})
        assert load_distributed(tmp_path, {"own": PerRank(5)}, strict=False) == {"own": 1 if group.rank else 5}

    run_ranks(program, 2)


def test_refusals_leave_the_group_usable(tmp_path):
    """After a state that can't be saved the ranks continue."""

    def program(group):
        with pytest.raises((TypeError, DistCheckpointError)):
            save_distributed({"a": object()} if group.rank == 1 else {"a": 1}, tmp_path)
        save_distributed({"a": 2}, tmp_path)
        return load_distributed(tmp_path)

    assert run_ranks(program, 3) == [{"a": 2}] * 3
