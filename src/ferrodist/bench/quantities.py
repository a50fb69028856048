"""Sizes and times, as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes of "8", "16K", "1MiB".

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text.strip()!r} is no size; write bytes, or a number with K, M or G, such as 64K")
    return int(found[1]) * _UNITS[found[2]]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of a list such as "8,16K,1M"; "8..1K" stands for the powers of two from 8 to 1024. Sorted, each once.

    Raises:
        ValueError: A part is no size, or a range ends before it begins.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size, end = parse_bytes(first), parse_bytes(last if dots else first)
        if end < size:
            raise ValueError(f"{part.strip()!r} ends before it begins")
        while size <= end:
            sizes.add(size)
            size *= 2
    return tuple(sorted(sizes))


def format_bytes(size: int) -> str:
    """Return "16 KiB", for 16384."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{_digits(size / factor)} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Return "12.3 us", for 1.23e-5."""
    # Just below a unit's end, rounding to three digits would reach the next one.
    for unit, factor in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds)} s"


def format_ratio(ratio: float | None) -> str:
    """Return "0.0012", "1.23", "45.6", "789" or "-"."""
    if ratio is None:
        return "-"
    return f"{ratio:.2g}" if 0 < ratio < 0.095 else _digits(ratio, always=True)


def _digits(value: float, *, always: bool = False) -> str:
    """Three of them before and behind the point, or those it takes to say a whole number."""
    if value == int(value) and not always:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
