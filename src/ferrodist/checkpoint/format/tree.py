"""The state tree: nested state as JSON nodes in a manifest, and back.

    in the state                                       in the manifest
    None, bool, str, int of 64 bits, finite float      itself
    list                                               a list
    dict with str keys                                 {"dict": {key: node}}
    dict with other keys                               {"pairs": [[key, node], ...]}
    tuple, set, frozenset                              {"tuple": [...]}, {"set": [...]}, {"frozenset": [...]}
    tensor, NumPy array                                {"tensor": key}, {"array": key}
    larger int, other float, complex                   {"int": text}, {"float": text}, {"complex": [float, float]}
    bytes, bytearray                                   {"bytes": base64}, {"bytearray": base64}
    NumPy number                                       {"number": [name of its dtype, node]}
    collections.Counter                                {"counter": [[key, number], ...]}
    torch.dtype, torch.device, torch.Size              {"dtype": name}, {"device": text}, {"size": [...]}
    PerRank                                            {"per_rank": {rank: node}}

Other subclasses of dict, list and tuple come back as dict, list and tuple. All else is refused: no class is ever looked
up by a name in a file. A tree from a file is checked by `check_tree` before it is used.

Leaves are encoded and decoded here, containers and tensors by `state.Encoder` and `load_plan.LoadPlanner`.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ferrodist.checkpoint.format.safetensors import dtype_from_name, dtype_name
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

Node = Any
"""A JSON value, or a dict with one mark as its key."""

_INT_BITS = 63
MAX_DEPTH = 100
"""The deepest nesting of a state; a few calls per level stay below Python's recursion limit."""

_MAX_SAME_HASH = 100
"""The most members of a set with one hash; honest values rarely share one."""

_NUMPY_SCALAR_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
_NUMPY_SCALARS = {name: np.dtype(name).type for name in _NUMPY_SCALAR_NAMES.split()}


class PerRank:
    """Marks a value that each rank has its own of, such as the state of a random generator; all are saved.

    Args:
        value: This rank's value; any state.
        resize: ``resize(values, rank, world_size)`` makes this rank's value from the saved ones, by rank, when another
            number of ranks loads them. Without it that is an error.
    """

    def __init__(self, value: Any, *, resize: Callable[[list[Any], int, int], Any] | None = None) -> None:
        self.value = value
        self.resize = resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def path_text(path: Sequence[object]) -> str:
    """Format a path in a state, for messages."""
    return "".join(f"[{part!r}]" for part in path) or "the state itself"


def tensor_key(path: Sequence[object]) -> str:
    """Return the name in files of the tensor at a path."""
    return ".".join(str(part) for part in path) or "tensor"


def check_depth(path: Sequence[object]) -> None:
    """Raise ValueError for a path so deep that the state probably contains itself."""
    if len(path) > MAX_DEPTH:
        raise ValueError(f"the state is nested too deeply, or holds itself, at {path_text(path[:5])}...")


def encode_key(key: object, path: tuple[object, ...]) -> Node:
    """Encode a key of a dict."""
    try:
        return encode_leaf(key, path)
    except TypeError as error:
        raise TypeError(
            f"{path_text(path)} has {with_article(type(key).__name__)} as a key, {str(key)[:50]!r}: save text, numbers"
            " or tuples of these"
        ) from error


def encode_leaf(value: Any, path: tuple[object, ...]) -> Node:
    """Encode a value that has no tensors in it."""
    kind = type(value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return {"tuple": [encode_leaf(each, path) for each in value]}
    if isinstance(value, (set, frozenset)):
        # Sorted, since the iteration order of sets differs between ranks.
        found = check_collisions(value, path_text(path))
        members = sorted((encode_leaf(each, path) for each in found), key=msgspec.json.encode)
        return {"set" if isinstance(value, set) else "frozenset": members}
    if isinstance(value, Counter):
        check_collisions(value, path_text(path))
        return {"counter": [[encode_key(key, path), encode_leaf(count, path)] for key, count in value.items()]}
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY_SCALARS:
        return {"number": [value.dtype.name, encode_leaf(value.item(), path)]}
    if kind not in _ENCODERS:
        raise TypeError(
            f"{path_text(path)} is {with_article(kind.__name__)}, which checkpoints don't carry: save its contents as"
            " numbers, text, tensors, lists and dicts, or give it state_dict() and load_state_dict()"
        )
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"{path_text(path)} is text that is not Unicode: save bytes") from error
    return _ENCODERS[kind](value)


def _encode_float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": repr(value)}


_ENCODERS: dict[type, Callable[[Any], Node]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: lambda value: value if -(1 << _INT_BITS) <= value < 1 << _INT_BITS else {"int": hex(value)},
    float: _encode_float,
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"bytearray": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"dtype": dtype_name(value)},
    torch.device: lambda value: {"device": str(value)},
}


def is_leaf_node(node: Node) -> bool:
    """Return whether a node is a leaf: neither a container nor a tensor."""
    return not isinstance(node, list) and not (isinstance(node, dict) and set(node) & _BRANCHES)


_BRANCHES = frozenset({"dict", "pairs", "tuple", "set", "frozenset", "size", "tensor", "array", "per_rank"})


def decode_leaf(node: Node, depth: int = 0) -> Any:
    """Return the value of a leaf node."""
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"a node with {len(node)} marks")
    if depth > MAX_DEPTH:
        raise ValueError("a value that is nested too deeply")
    ((mark, content),) = node.items()
    try:
        return _DECODERS[mark](content, depth + 1)
    except Exception as error:  # the content may be anything, and decoders raise different errors
        raise ValueError(f"no value is written as {str(node)[:100]}") from error


def leaf_text(node: Node) -> str:
    """Return the repr of a leaf node's value."""
    value = decode_leaf(node)
    try:
        return repr(value)
    except ValueError:  # Python writes no int of more than some thousand digits
        return str(node)


def _decode_complex(parts: list[Node], depth: int) -> complex:
    real, imaginary = (float(decode_leaf(part, depth)) for part in parts)
    return complex(real, imaginary)


def _decode_number(pair: list[Node], depth: int) -> Any:
    name, node = pair
    value = decode_leaf(node, depth)
    if not isinstance(value, (bool, int, float, complex)):
        raise TypeError(f"a number of {type(value).__name__}")
    with np.errstate(all="ignore"):
        return _NUMPY_SCALARS[name](value)


def _decode_counter(pairs: list[list[Node]], depth: int) -> Counter[Any]:
    keys = check_collisions(decode_leaf(key, depth) for key, _ in pairs)
    return Counter(dict(zip(keys, (decode_leaf(count, depth) for _, count in pairs), strict=True)))


def check_collisions(values: Iterable[Any], where: str = "it") -> list[Any]:
    """Return hashable values as a list; ``where`` is for messages."""
    found = list(values)
    if max(Counter(map(hash, found)).values(), default=0) > _MAX_SAME_HASH:
        raise ValueError(f"{where} has more than {_MAX_SAME_HASH} members or keys with one hash")
    return found


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda text, _: int(text, 16),
    "float": lambda text, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "complex": _decode_complex,
    "bytes": lambda text, _: base64.b64decode(text, validate=True),
    "bytearray": lambda text, _: bytearray(base64.b64decode(text, validate=True)),
    "number": _decode_number,
    "counter": _decode_counter,
    "dtype": lambda name, _: dtype_from_name(name),
    "device": lambda text, _: torch.device(str.__str__(text)),  # a number would be a device of this machine
    "tuple": lambda members, depth: tuple(decode_leaf(each, depth) for each in members),
    "frozenset": lambda members, depth: frozenset(check_collisions(decode_leaf(each, depth) for each in members)),
}


def split_node(node: Node) -> tuple[str, Any]:
    """Return a node's mark and content; the mark is ``list`` or ``leaf`` for nodes without one."""
    if is_leaf_node(node):
        return "leaf", node
    return ("list", node) if isinstance(node, list) else next(iter(node.items()))


def child_nodes(node: Node) -> list[tuple[Any, Node]]:
    """Return a node's children with their keys: strings, indices, ranks, or the nodes of other keys."""
    mark, content = split_node(node)
    if mark in ("leaf", "tensor", "array"):
        return []
    if mark == "pairs":
        return [(key, each) for key, each in content]
    return list(content.items() if isinstance(content, dict) else enumerate(content))


def map_children(node: Node, function: Callable[[Any, Node], Node]) -> Node:
    """Return a node with each child replaced by the function's result for its key and itself."""
    mark = split_node(node)[0]
    changed = [(key, function(key, each)) for key, each in child_nodes(node)]
    if mark in ("dict", "per_rank"):
        return {mark: dict(changed)}
    if mark == "pairs":
        return {mark: [list(pair) for pair in changed]}
    members = [each for _, each in changed]
    return members if mark == "list" else {mark: members} if mark in ("tuple", "set", "frozenset") else node


def referenced_keys(node: Node) -> Iterator[str]:
    """Yield the keys of the tensors in a tree."""
    mark, content = split_node(node)
    if mark in ("tensor", "array"):
        yield content
    for _, each in child_nodes(node):
        yield from referenced_keys(each)


def check_tree(node: Node, keys: Collection[str], depth: int = 0) -> None:
    """Check that a tree is as `Encoder` and `merge_trees` make it."""
    if depth > MAX_DEPTH:
        raise ValueError("a state that is nested too deeply")
    if isinstance(node, dict) and len(node) != 1:
        raise ValueError(f"a node with {len(node)} marks")
    if is_leaf_node(node):
        decode_leaf(node)
        return
    mark, content = split_node(node)
    kind = str if mark in ("tensor", "array") else dict if mark in ("dict", "per_rank") else list
    if not isinstance(content, kind):
        raise ValueError(f"a {mark} of {str(content)[:100]}")  # noqa: TRY004 - it is no argument
    if kind is str and content not in keys:
        raise ValueError(f"a state with tensor {content!r}, of which nothing else is said")
    _check_content(mark, content)
    if mark not in ("size", "set", "frozenset"):  # of leaves, which are checked
        for _, each in child_nodes(node):
            check_tree(each, keys, depth + 1)


def _check_content(mark: str, content: Any) -> None:
    if mark == "per_rank" and not all(rank.isdecimal() and str(int(rank[:10])) == rank for rank in content):
        raise ValueError(f"ranks {list(content)[:10]}")
    if mark == "size" and not all(type(size) is int and -(1 << 63) <= size < 1 << 63 for size in content):
        raise ValueError(f"a torch.Size of {content[:10]}")
    if mark == "pairs" and not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise ValueError("invalid pairs of a key and a node")
    if mark in ("pairs", "set", "frozenset"):
        hashed = [key for key, _ in content] if mark == "pairs" else content
        try:
            hash(decode_leaf({"frozenset": hashed}))
        except TypeError as error:
            raise ValueError(f"an unhashable value: {str(hashed)[:100]}") from error
