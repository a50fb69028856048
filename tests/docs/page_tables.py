"""Tables of names on pages for users of other libraries, and a check that the names exist."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import ferrodist as fd

__all__ = ["FENCES", "Page", "exists"]

FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Page:
    """A page of docs/ with tables whose columns are the other library's name, ours, and a note."""

    def __init__(self, name, other):
        self.text = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
        self.prose = FENCES.sub("", self.text)
        self._other = other

    def sections(self):
        """Map each heading with a table to its rows: (other library's name, ours, note)."""
        found = {}
        heading = ""
        for line in self.prose.splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            elif line.startswith("|"):
                found.setdefault(heading, []).append(tuple(cell.strip() for cell in line.strip("|").split("|")))
        for table in found.values():
            assert table[0][0].startswith(self._other), table[0]
            assert table[0][1:] == ("ferrodist", "note")
            assert table[1] == ("---",) * 3
        return {heading: (table[0][0], table[2:]) for heading, table in found.items()}

    def present_names(self):
        """What the page says is there, without ``fd.``: in prose, in tables and in Python examples."""
        names = set(re.findall(r"`fd\.([^`]+)`", self.prose))
        for language, code in FENCES.findall(self.text):
            if language == "python":
                names.update(re.findall(r"\bfd\.([\w.]+)", code))
        return sorted(name for name in names if not re.search(r"\((?!\)|\w+=\)|$)", name))


def exists(name, package=fd):
    """Whether a dotted name is in the package, and takes the keywords written in its parentheses, if any."""
    path, _, arguments = name.partition("(")
    *owners, last = path.split(".")
    for owner in owners:
        if not hasattr(package, owner):
            return False
        package = getattr(package, owner)
    if not _holds(package, last):
        return False
    keywords = re.findall(r"(\w+)=", arguments)
    return not keywords or set(keywords) <= set(inspect.signature(getattr(package, last)).parameters)


def _holds(owner, name):
    """Whether ``owner`` has an attribute; for a class, also one that its instances get."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(name in inspect.get_annotations(kind) or name in _assigned_on_self(kind) for kind in owner.__mro__)


def _assigned_on_self(kind):
    """Attributes that the class's own code sets on its instances."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
