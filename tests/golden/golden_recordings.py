"""The recordings of all subjects, kept as JSON beside this, and how they differ from what is recorded now."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from golden_support import fixed_randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = Path(__file__).with_name("data")

SUBJECTS = {
    "collectives": "golden_collectives",
    "transports": "golden_transports",
    "hosts": "golden_hosts",
    "parallel": "golden_parallel",
    "checkpoints": "golden_checkpoints",
    "rpc": "golden_rpc",
    "rendezvous": "golden_rendezvous",
}
"""By their names: the modules that record them."""

_MOST_SHOWN = 12


def _in_lines(value: Any, levels: int) -> str:
    """JSON with a line for each message."""
    if isinstance(value, dict) and value and levels:
        parts = [f"{json.dumps(name)}: {_in_lines(each, levels - 1)}" for name, each in value.items()]
        return "{\n" + ",\n".join(parts) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
    return json.dumps(value)


def record(subject: str) -> Any:
    """What ferrodist does now, as JSON has it."""
    with fixed_randomness():
        return json.loads(json.dumps(importlib.import_module(SUBJECTS[subject]).record()))


def load(subject: str) -> Any:
    """What it did when the recording was made."""
    return json.loads((_FOLDER / f"{subject}.json").read_text(encoding="utf-8"))


def save(subject: str, recording: Any) -> None:
    """Keep a recording."""
    _FOLDER.mkdir(exist_ok=True)
    (_FOLDER / f"{subject}.json").write_text(f"{_in_lines(recording, 2)}\n", encoding="utf-8")


def differences(golden: Any, found: Any, place: tuple[object, ...] = ()) -> Iterator[str]:
    """Where two recordings differ, each place in words."""
    if isinstance(golden, dict) and isinstance(found, dict):
        for name in {**golden, **found}:
            if name not in found:
                yield f"{_place(place)}: {name!r} is missing; it was {_brief(golden[name])}"
            elif name not in golden:
                yield f"{_place(place)}: {name!r} is new: {_brief(found[name])}"
            else:
                yield from differences(golden[name], found[name], (*place, name))
    elif isinstance(golden, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(golden, found, strict=False)):
            yield from differences(one, other, (*place, number))
        if len(golden) != len(found):
            yield f"{_place(place)}: {len(found)} messages, and there were {len(golden)}"
    elif golden != found:
        yield f"{_place(place)}: {_difference(str(golden), str(found))}"


def _place(place: tuple[object, ...]) -> str:
    return " / ".join(f"message {part}" if isinstance(part, int) else str(part) for part in place) or "all"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _difference(golden: str, found: str) -> str:
    pairs = zip(golden, found, strict=False)
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(golden), len(found)))
    try:
        before, after = bytes.fromhex(golden), bytes.fromhex(found)
    except ValueError:
        return f"{_around(golden, first)!r} became {_around(found, first)!r}"
    at = first // 2
    bytes_there, place = slice(at, at + 16), slice(max(0, at - 24), at + 24)
    return (
        f"byte {at} of {len(before)} (now {len(after)}): {before[bytes_there].hex()} became {after[bytes_there].hex()};"
        f" as text {before[place]!r} became {after[place]!r}"
    )


def _around(text: str, at: int) -> str:
    return text[max(0, at - 40) : at + 80]


def report(subject: str, found: Any) -> str:
    """What differs from the recording, in words; empty if nothing does."""
    lines = list(differences(load(subject), found))
    if not lines:
        return ""
    more = [f"... and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    return "\n".join([f"{len(lines)} differences from data/{subject}.json:", *lines[:_MOST_SHOWN], *more])
