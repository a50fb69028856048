"""Manifests: what isn't one in every byte is refused with `DistCheckpointError`, and nothing in one is believed."""

import contextlib
import copy
import itertools
import resource
import time

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrodist import DeviceMesh, DTensor, Shard
from ferrodist.checkpoint import OptimizerState, PerRank, load_distributed, save_distributed
from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    covers_once,
    decode_manifest,
    encode_manifest,
    hash_bytes,
)
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks


def make_model():
    """A model with a step of its optimizer behind it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, OptimizerState(model, optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of two ranks with one of each kind of thing."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"

    def program(group):
        model, optimizer = make_model()
        divided = DTensor.from_local(
            torch.arange(6.0).reshape(2, 3)[group.rank :][:1], DeviceMesh(group, (2,)), [Shard(0)]
        )
        state = {
            "model": model,
            "optimizer": optimizer,
            "divided": divided,
            "own": PerRank((group.rank, torch.ones(1))),
            "more": [1.5, {3: b"x"}, torch.Size([1]), {1, 2}, torch.float16],
        }
        save_distributed(state, path)

    run_ranks(program, 2)
    return path


@pytest.fixture(scope="module")
def body(folder):
    """The manifest as JSON, without its head."""
    return msgspec.json.decode((folder / MANIFEST_NAME).read_bytes())["checkpoint"]


def with_hash(body):
    """A manifest's file, right in all but what the body says."""
    data = msgspec.json.encode(body)
    return b'{"format":"ferrodist-checkpoint","version":1,"hash":"%s","checkpoint":%s}\n' % (
        hash_bytes(data).encode(),
        data,
    )


def assert_refused(data):
    """Check that the bytes are refused with a message that names the file."""
    with pytest.raises(DistCheckpointError, match="the file"):
        decode_manifest(data, "the file")


def test_round_trip(folder):
    """The same manifest, in the same bytes."""
    data = (folder / MANIFEST_NAME).read_bytes()
    manifest = decode_manifest(data, "it")
    assert encode_manifest(manifest) == data
    assert decode_manifest(encode_manifest(manifest), "it") == manifest


def test_each_byte_counts(folder):
    """Any byte changed, left out or put in is noticed, wherever it is."""
    data = (folder / MANIFEST_NAME).read_bytes()
    for place in range(len(data)):
        old = data[place]
        for new in {old ^ 1, old ^ 32, old ^ 128, 0, 0x20, 0x30} - {old}:
            assert_refused(data[:place] + bytes([new]) + data[place + 1 :])
        assert_refused(data[:place] + data[place + 1 :])
        assert_refused(data[:place])
        for new in (b" ", b"0", b'"'):
            assert_refused(data[:place] + new + data[place:])
    assert_refused(data + b"\n")
    assert_refused(data + data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"format":"ferrodist-checkpoint","version":1,"x":' + b"[" * 100_000)
@example(b'{"format":"ferrodist-checkpoint","version":1e999}')
@example(b'{"format":"ferrodist-checkpoint","version":"1"}')
@example(b'{"format":"\xff","version":1}')
@example(b'{"format":"ferrodist-checkpoint","version":1,"hash":"')
def test_any_bytes(data):
    """Bytes that are not a manifest at all."""
    assert_refused(data)


def test_other_files_are_recognized():
    """The error names other formats and later versions."""
    for data, message in [
        (b'{"format":"other","version":1}', "of format 'other'"),
        (b'{"format":"ferrodist-checkpoint","version":2,"hash":""}', "version 2.*newer"),
        (b'{"metadata":{}}', "no manifest"),
        (b"", "damaged"),
    ]:
        with pytest.raises(DistCheckpointError, match=message):
            decode_manifest(data, "it")


def test_damage_through_a_load(folder, tmp_path):
    """All ranks get the same error, and can go on."""
    data = (folder / MANIFEST_NAME).read_bytes()

    def program(group):
        texts = []
        for place in range(0, len(data), 97):
            if group.rank == 0:
                changed = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                (tmp_path / MANIFEST_NAME).write_bytes(changed)
            with pytest.raises(DistCheckpointError, match=MANIFEST_NAME) as failure:
                load_distributed(tmp_path)
            texts.append(failure.value.message)
        return texts

    one, other = run_ranks(program, 2)
    assert one == other


def paths_of(value, path=()):
    """Return all paths in a JSON value."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in members:
        yield from paths_of(each, (*path, key))


def changed(body, path, change):
    """A copy where something has become something else."""
    made = {"": copy.deepcopy(body)}
    at, key = made, ""
    for each in path:
        at, key = at[key], each
    at[key] = change(at[key])
    return made[""]


HOSTILE = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
    10**30,
    -(2**63),
    0.5,
    1e308,
    "",
    "x",
    "/etc/passwd",
    "../other",
    "model.0.weight",
    "float64",
    "complex128",
    [],
    [0],
    [[]],
    [-1, 5],
    [2**62, 2**62],
    [0] * 70,
    {},
    {"tensor": "none"},
    {"tensor": "divided"},
    {"tensor": 3},
    {"dict": []},
    {"dict": {"a": {"x": 1}}},
    {"list": []},
    {"pairs": [[[], 1]]},
    {"pairs": [1]},
    {"per_rank": {"x": 1}},
    {"per_rank": {"00": 1}},
    {"per_rank": {"9" * 10_000: 1}},
    {"per_rank": {"\u00b2": 1}},
    {"set": [[1]]},
    {"set": [{"bytearray": ""}]},
    {"size": ["a"]},
    {"size": [2**70]},
    {"int": "x"},
    {"int": 5},
    {"float": "1e5"},
    {"complex": [1]},
    {"complex": [{"complex": [1, 2]}, {"dtype": "bool"}]},
    {"bytes": "a"},
    {"bytes": "\u00e9"},
    {"number": ["V", 10**11]},
    {"number": ["int8", 1000]},
    {"number": ["U", 2**40]},
    {"number": []},
    {"dtype": "none"},
    {"dtype": 1},
    {"device": "nowhere"},
    {"device": []},
    {"tuple": 1},
    {"tuple": [1], "dict": {}},
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_wrong_manifests_with_right_hashes(folder, body, tmp_path_factory, data):
    """Anything in the place of anything: an error of checkpoints, or a load, and neither long nor large."""
    path = data.draw(st.sampled_from(list(paths_of(body))))
    value = data.draw(st.one_of(st.sampled_from(HOSTILE), st.integers(-10, 1000)))
    wrong = changed(body, path, lambda _: value)
    check_load(folder, wrong, tmp_path_factory.getbasetemp() / "wrong")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_inconsistent_numbers_are_refused(folder, body, tmp_path_factory, data):
    """Several offsets, sizes and positions of shards changed consistently, as by an attacker."""
    numbers = [
        path for path in paths_of(body) if path[:1] in (("tensors",), ("files",)) and isinstance(at(body, path), int)
    ]
    wrong = body
    for path in data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=4)):
        step = data.draw(st.sampled_from([-8, -4, -1, 1, 2, 4, 8, 100]))
        wrong = changed(wrong, path, lambda old, step=step: old + step)
    check_load(folder, wrong, tmp_path_factory.getbasetemp() / "wrong")


def at(value, path):
    """Return the value at a path of a JSON value."""
    for key in path:
        value = value[key]
    return value


def check_load(folder, wrong, place):
    """Load a wrong manifest with the right files, whole and into a program's objects."""
    place.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name not in (MANIFEST_NAME, INDEX_NAME) and not (place / file.name).exists():
            (place / file.name).hardlink_to(file)
    (place / MANIFEST_NAME).write_bytes(with_hash(wrong))
    begin, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, optimizer = make_model()
    resize = lambda values, rank, size: values  # noqa: E731
    into = {"model": model, "optimizer": optimizer, "divided": torch.zeros(2, 3), "own": PerRank(None, resize=resize)}
    for target in (None, {"divided": None, "model": None}, into):
        with contextlib.suppress(DistCheckpointError):
            load_distributed(place, target)
    assert time.monotonic() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 << 10  # KiB


def entry(body, key="divided"):
    """The manifest's entry of a tensor."""
    return body["tensors"][key]


def shard(body, place, key="divided"):
    """A shard of it."""
    return entry(body, key)["shards"][place]


WRONG = {
    "a gap": (lambda b: shard(b, 1).update(offsets=[0, 0]), "overlap"),
    "shards missing": (lambda b: entry(b).update(shards=[]), "not all of it"),
    "a shard twice": (lambda b: entry(b)["shards"].append(shard(b, 0)), "overlap"),
    "shards outside": (lambda b: shard(b, 1).update(offsets=[2, 0]), "outside"),
    "negative offsets": (lambda b: shard(b, 0).update(offsets=[-1, 0]), "outside"),
    "negative sizes": (lambda b: shard(b, 0).update(shape=[-1, 3]), "outside"),
    "a negative shape": (lambda b: entry(b).update(shape=[-2, -3]), "shape"),
    "a shape beyond memory": (lambda b: entry(b).update(shape=[2**62, 2**62, 0], shards=[]), "memory"),
    "65 dims": (lambda b: entry(b).update(shape=[1] * 65, shards=[]), "shape"),
    "other dims": (lambda b: shard(b, 0).update(offsets=[0], shape=[3]), "dims"),
    "no such file": (lambda b: shard(b, 0).update(file=2), "file number 2"),
    "a file before the first": (lambda b: shard(b, 0).update(file=-1), "file number -1"),
    "bytes of the header": (lambda b: shard(b, 0).update(start=0, stop=12), "at bytes 0 to 12"),
    "bytes beyond the file": (lambda b: shard(b, 0).update(start=10**6, stop=10**6 + 12), "at bytes"),
    "another length": (lambda b: shard(b, 0).update(stop=shard(b, 0)["start"] + 8), "in 8 bytes"),
    "hashes missing": (lambda b: shard(b, 0).update(hashes=[]), "0 hashes"),
    "hashes that are numbers": (lambda b: shard(b, 0).update(hashes=[1]), "hashes"),
    "no dtype": (lambda b: entry(b).update(dtype="float3"), "no dtype 'float3'"),
    "another dtype": (lambda b: entry(b).update(dtype="float64"), "in 12 bytes"),
    "a field more": (lambda b: b.update(more=1), "more"),
    "a field less": (lambda b: b.pop("world_size"), "world_size"),
    "no ranks": (lambda b: b.update(world_size=0), "below 1"),
    "blocks of nothing": (lambda b: b.update(block_bytes=0), "below 1"),
    "a file twice": (lambda b: b["files"].append(b["files"][0]), "twice"),
    "a file elsewhere": (lambda b: b["files"][0].update(name="../x"), "named '../x'"),
    "a file from the root": (lambda b: b["files"][0].update(name="/etc/passwd"), "named '/etc/passwd'"),
    "the manifest as a file": (lambda b: b["files"][0].update(name=MANIFEST_NAME), "named 'metadata.json'"),
    "a header beyond the file": (lambda b: b["files"][0].update(header_bytes=10**9), "header of"),
    "a tensor of nothing": (lambda b: b.update(tree={"tensor": "none"}), "'none', of which nothing"),
    "two marks": (lambda b: b.update(tree={"tuple": [], "set": []}), "2 marks"),
    "an unknown mark": (lambda b: b.update(tree={"pickle": "x"}), "no value is written"),
    "a dict that is a list": (lambda b: b.update(tree={"dict": []}), "a dict of"),
    "a large void of NumPy": (lambda b: b.update(tree={"number": ["V", 10**12]}), "no value is written"),
}


def test_each_check_of_a_manifest(body):
    """A manifest with one fault is refused with the reason."""
    for what, (change, message) in WRONG.items():
        wrong = copy.deepcopy(body)
        change(wrong)
        with pytest.raises(DistCheckpointError) as failure:
            decode_manifest(with_hash(wrong), "it")
        assert message in failure.value.message, what


def test_a_gap_as_large_as_an_overlap(body):
    """Shards with as many elements as the tensor, but not each once: nothing would fill some elements."""
    wrong = copy.deepcopy(body)
    first = shard(wrong, 0)
    hashes = first["hashes"]
    pieces = [([0, 0], [1, 2]), ([0, 1], [1, 2]), ([1, 1], [1, 2])]  # (0, 1) twice, (1, 0) never
    at = first["start"]
    entry(wrong)["shards"] = [
        {"offsets": offsets, "shape": size, "file": 0, "start": at, "stop": at + 8, "hashes": hashes}
        for offsets, size in pieces
    ]
    with pytest.raises(DistCheckpointError, match="overlap"):
        decode_manifest(with_hash(wrong), "it")


@pytest.mark.parametrize("depth", [150, 400, 3000, 100_000])
def test_deep_trees(body, depth):
    """Deep trees are refused before they exceed the recursion limit of their readers."""
    for opening, closing in ((b"[", b"]"), (b'{"dict":{"a":', b"}}"), (b'{"tuple":[', b"]}"), (b'{"set":[', b"]}")):
        tree = msgspec.Raw(opening * depth + b"1" + closing * depth)
        assert_refused(with_hash({**body, "tree": tree}))


def test_many_shards_are_looked_at_in_a_moment(body):
    """A manifest of 120 by 120 shards of a tensor takes seconds at most, also if it is wrong."""
    number = 120
    shards = [
        {"offsets": [row, column], "shape": [1, 1], "file": 0, "start": 5000, "stop": 5004, "hashes": ["x"]}
        for row, column in itertools.product(range(number), repeat=2)
    ]
    wrong = copy.deepcopy(body)
    wrong["files"][0]["size_bytes"] = 10**6
    wrong["tensors"]["divided"] = {"shape": [number, number], "dtype": "float32", "placement": "", "shards": shards}
    begin = time.monotonic()
    decode_manifest(with_hash(wrong), "it")
    shards[-1]["offsets"] = [0, 0]
    assert_refused(with_hash(wrong))
    assert time.monotonic() - begin < 10


_ALIKE = [{"int": hex(number * (2**61 - 1))} for number in range(30_000)]
"""Python gives them one hash."""


@pytest.mark.parametrize(
    "tree",
    [
        {"set": _ALIKE},
        {"frozenset": _ALIKE},
        {"pairs": [[each, 1] for each in _ALIKE]},
        {"counter": [[each, 1] for each in _ALIKE]},
        {"set": [{"complex": [-1000003.0 * number, float(number)]} for number in range(30_000)]},
    ],
    ids="".join,
)
def test_many_members_with_one_hash(body, tree):
    """Such sets are refused at once: they would keep a reader busy for minutes."""
    begin = time.monotonic()
    with pytest.raises(DistCheckpointError):
        decode_manifest(with_hash({**body, "tree": tree}), "it")
    assert time.monotonic() - begin < 5


@st.composite
def divisions(draw):
    """A shape cut into boxes by cuts of cuts, of which some may then be moved."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not box:
            boxes.append(box)
            break
        dim = draw(st.integers(0, len(box) - 1))
        begin, end = box[dim]
        middle = draw(st.integers(begin, end))
        boxes += [(*box[:dim], side, *box[dim + 1 :]) for side in ((begin, middle), (middle, end))]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(boxes) - 1))
        sides = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        boxes[place] = tuple(map(tuple, sides))
    return shape, boxes


@settings(max_examples=400, deadline=None)
@given(divisions(), st.booleans())
def test_boxes_that_cover_a_tensor(case, is_far):
    """Compared with counting each element; also with more dims than corners could be counted for."""
    shape, boxes = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        part = counts
        for dim, (begin, end) in enumerate(box):
            part = part.narrow(dim, begin, end - begin)
        part += 1
    given_boxes = [([a for a, _ in box], [b - a for a, b in box]) for box in boxes]
    if is_far and given_boxes:
        # Nine dims more, of which the first box is cut off a single element in each.
        offsets, sizes = given_boxes[0]
        rest = [([*offsets, *[0] * at, 1, *[0] * (8 - at)], [*sizes, *[1] * at, 1, *[2] * (8 - at)]) for at in range(9)]
        first = ([*offsets, *[0] * 9], [*sizes, *[1] * 9])
        others = [([*a, *[0] * 9], [*n, *[2] * 9]) for a, n in given_boxes[1:]]
        given_boxes, shape = [first, *rest, *others], (*shape, *[2] * 9)
    assert covers_once(given_boxes, shape) == bool((counts == 1).all())


def test_boxes_along_many_dims():
    """Thousands of boxes along any number of dims are checked in a moment, and an overlap of two is found."""
    corners = list(itertools.product((0, 1), repeat=13))
    for change in (0, 1):
        boxes = [(at, (1,) * 13) for at in corners]
        boxes[change * 77] = boxes[77]
        begin = time.process_time()
        assert covers_once(boxes, (2,) * 13) == (change == 1)
        assert time.process_time() - begin < 2
    assert covers_once([((at,) * 60, (1,) * 60) for at in range(1)], (1,) * 60)
