"""English grammar for messages: articles and plurals."""

from __future__ import annotations

import re

# Letters whose names begin with a vowel sound, for abbreviations: an LSTM, an FSDP.
_SPELLED_WITH_AN = frozenset("AEFHILMNORSX")
_SPOKEN_YOU = re.compile(r"u(ni[^nm]|int|se|til|tf|ri|uid)|eu|one", re.IGNORECASE)
_PLURALS = {"axis": "axes", "batch": "batches", "child": "children", "microbatch": "microbatches", "prefix": "prefixes"}


def with_article(name: str) -> str:
    """Return a name with "a" or "an" as it is pronounced: "an Embedding", "an LSTM", "a Linear", "a UUID"."""
    if len(name) > 1 and name[:2].isupper():
        has_an = name[0] in _SPELLED_WITH_AN
    else:
        has_an = name[:1].lower() in "aeiou" and not _SPOKEN_YOU.match(name)
    return f"{'an' if has_an and name else 'a'} {name}"


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"
