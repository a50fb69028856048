"""Nested values as a list of tensors and a tree spec, which travels between ranks as plain data.

in the value                                     in the spec
tensor                                           its index; a tensor that occurs twice has one
tuple, list, dict                                tuple, list, dict of specs
None, bool, int, float, str, bytes               itself
a leaf that a `LeafCodec` encodes                the spec of the encoded leaf

A value of a subclass arrives as the base class: a named tuple as a tuple. A NumPy scalar arrives as the equal bool,
int, float, str or bytes. An int has 64 bits, signed or unsigned. Values are nested at most `MAX_LEVELS` deep.

`torch.utils._pytree` is not used: a spec from another rank is checked before it is followed, and errors name the path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.arguments import python_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TreeSpec = list[Any]
"""Plain data: a tag and its content."""

MAX_LEVELS = 100
"""The maximum depth of nested tuples, lists and dicts."""

_TENSOR, _TUPLE, _LIST, _DICT, _PLAIN = "tensor", "tuple", "list", "dict", "plain"
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCodec:
    """An additional type of leaf."""

    tag: str  # the type's name in specs, the same on all ranks
    # From a leaf of a type that is not in the table to a nested value; None for other types. Raises TypeError for a
    # leaf that can't travel, with a message that follows the leaf's path: "is ...".
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]  # raises ValueError for what `encode` never returns


class _MisfitError(TypeError):
    """A value without a spec: its problem, and its path, which callers extend from the inside out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""


class _Flattening:
    """The state of one `flatten`."""

    def __init__(self, codecs: Sequence[LeafCodec], check: Callable[[torch.Tensor], None] | None) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.tags: set[str] = set()
        self._indices: dict[int, int] = {}
        self._codecs = codecs
        self._check = check

    def spec_of(self, value: Any, levels: int) -> TreeSpec:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                self._add(value)
            return [_TENSOR, self._indices[id(value)]]
        if not isinstance(value, (tuple, list, Mapping)):
            return self._leaf(value, levels)
        self._check_levels(levels)
        if isinstance(value, Mapping):
            return [_DICT, [self._pair(key, each, levels - 1) for key, each in value.items()]]
        tag = _TUPLE if isinstance(value, tuple) else _LIST
        return [tag, [self._member(index, each, levels - 1) for index, each in enumerate(value)]]

    def _add(self, tensor: torch.Tensor) -> None:
        if self._check is not None:
            try:
                self._check(tensor)
            except TypeError as error:
                raise _MisfitError(str(error)) from None
        self._indices[id(tensor)] = len(self._indices)
        self.tensors[id(tensor)] = tensor

    def _member(self, key: object, value: Any, levels: int) -> TreeSpec:
        try:
            return self.spec_of(value, levels)
        except _MisfitError as misfit:
            misfit.path = f"[{key!r}]{misfit.path}"
            raise

    def _pair(self, key: Any, value: Any, levels: int) -> list[Any]:
        key = python_value(key)
        if not isinstance(key, (str, int)):
            raise _MisfitError(f"has the key {key!r}: keys of values that go from rank to rank are text or integers")
        return [_plain(key), self._member(key, value, levels)]

    def _leaf(self, value: Any, levels: int) -> TreeSpec:
        for codec in self._codecs:
            try:
                inner = codec.encode(value)
            except TypeError as error:
                raise _MisfitError(str(error)) from None
            if inner is not None:
                self._check_levels(levels)
                self.tags.add(codec.tag)
                return [codec.tag, self.spec_of(inner, levels - 1)]
        return [_PLAIN, _plain(value)]

    def _check_levels(self, levels: int) -> None:
        if not levels:
            raise _MisfitError(f"is nested more than {MAX_LEVELS} levels deep, or in itself")


def flatten(
    value: Any,
    what: str,
    codecs: Sequence[LeafCodec] = (),
    check: Callable[[torch.Tensor], None] | None = None,
    tags: set[str] | None = None,
) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Flatten a nested value; returns the spec, and the tensors in order of their indices.

    Raises TypeError for a leaf that is not in the table, with its path after ``what``. ``check`` is called with each
    tensor, and raises as `LeafCodec.encode` does. The tags of the codecs that were used are added to ``tags``.
    """
    flattening = _Flattening(codecs, check)
    try:
        spec = flattening.spec_of(value, MAX_LEVELS)
    except _MisfitError as misfit:
        raise TypeError(f"{what}{misfit.path} {misfit.problem}") from None
    if tags is not None:
        tags |= flattening.tags
    return spec, list(flattening.tensors.values())


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    match python_value(value):
        case None | bool() as value:
            return value
        case int() as value:
            if not _LEAST_INT <= value <= _MOST_INT:
                raise _MisfitError(
                    f"is {value}: integers that go from rank to rank are -2**63 to 2**64 - 1, which have 64 bits"
                )
            return int.__int__(value)
        case float() as value:
            return float.__float__(value)
        case str() as value:
            if not is_encodable(value):
                raise _MisfitError(f"is {value!r}, which holds half of a surrogate pair: pass it as bytes")
            return str.__str__(value)
        case bytes() as value:
            return bytes(memoryview(value))
    raise _MisfitError(
        f"is of type {type(value).__name__}: tensors, numbers, text, bytes and None go from rank to rank, in tuples,"
        " lists and dicts"
    )


def check_spec(spec: Any, num_tensors: int, tags: Sequence[str] = (), *, levels: int = MAX_LEVELS) -> None:
    """Raise ValueError unless `unflatten` can follow a spec from another rank, with these codecs' tags."""
    if not (isinstance(spec, list) and len(spec) == 2 and levels >= 0):
        raise ValueError("a tree spec has no two parts, or is nested too deeply")
    tag, content = spec
    if tag == _PLAIN and (content is None or isinstance(content, (bool, int, float, str, bytes))):
        return
    if tag == _TENSOR and isinstance(content, int) and 0 <= content < num_tensors:
        return
    if tag in (_TUPLE, _LIST) and isinstance(content, list):
        for each in content:
            check_spec(each, num_tensors, tags, levels=levels - 1)
    elif tag == _DICT and isinstance(content, list):
        for pair in content:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int))):
                raise ValueError("a tree spec has an entry of a dict that is not a key and a value")
            check_spec(pair[1], num_tensors, tags, levels=levels - 1)
    elif isinstance(tag, str) and tag in tags:
        check_spec(content, num_tensors, tags, levels=levels - 1)
    else:
        raise ValueError(f"a tree spec has the tag {tag!r}, or content that does not belong to it")


def unflatten(spec: TreeSpec, tensors: Sequence[Any], codecs: Sequence[LeafCodec] = ()) -> Any:
    """Rebuild a value from its spec, with ``tensors[i]`` in the place of tensor i; a codec may raise ValueError.

    Each encoded leaf is decoded once, also after another has raised: decoding may count references.
    """
    tag, content = spec
    match tag:
        case "tensor":
            return tensors[content]
        case "plain":
            return content
        case "tuple":
            return tuple(_unflatten_all(content, tensors, codecs))
        case "list":
            return _unflatten_all(content, tensors, codecs)
        case "dict":
            values = _unflatten_all([each for _, each in content], tensors, codecs)
            return {key: value for (key, _), value in zip(content, values, strict=True)}
    codec = next(each for each in codecs if each.tag == tag)
    return codec.decode(unflatten(content, tensors, codecs))


def _unflatten_all(specs: Sequence[TreeSpec], tensors: Sequence[Any], codecs: Sequence[LeafCodec]) -> list[Any]:
    values: list[Any] = []
    try:
        for spec in specs:
            values.append(unflatten(spec, tensors, codecs))  # noqa: PERF401 - the number of values so far is needed
    except Exception:
        for spec in specs[len(values) + 1 :]:
            with contextlib.suppress(Exception):
                unflatten(spec, tensors, codecs)
        raise
    return values
