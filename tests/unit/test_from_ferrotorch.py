"""The page for users of the crate agrees with the package."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import ferrodist as fd

PAGE = (Path(__file__).parents[2] / "docs" / "from-ferrotorch.md").read_text(encoding="utf-8")
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE = FENCES.sub("", PAGE)


def sections():
    """Map each heading with a table to its (crate, ferrodist, note) rows."""
    found = {}
    heading = ""
    for line in PROSE.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|"):
            found.setdefault(heading, []).append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    assert all(table[:2] == [("crate", "ferrodist", "note"), ("---",) * 3] for table in found.values())
    return {heading: table[2:] for heading, table in found.items()}


def present_names():
    """What the page says is there, without ``fd.``: in prose, in tables and in the Python example."""
    names = set(re.findall(r"`fd\.([^`]+)`", PROSE))
    for language, code in FENCES.findall(PAGE):
        if language == "python":
            names.update(re.findall(r"\bfd\.([\w.]+)", code))
    return sorted(names)


def holds(owner, name):
    """Whether ``owner`` has an attribute; for a class, also one that its instances get."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(name in inspect.get_annotations(kind) or name in assigned_on_self(kind) for kind in owner.__mro__)


def assigned_on_self(kind):
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


def exists(name, package=fd):
    """Whether a dotted name is in the package, and takes the keywords written in its parentheses, if any."""
    path, _, arguments = name.partition("(")
    *owners, last = path.split(".")
    for owner in owners:
        if not hasattr(package, owner):
            return False
        package = getattr(package, owner)
    if not holds(package, last):
        return False
    keywords = re.findall(r"(\w+)=", arguments)
    return not keywords or set(keywords) <= set(inspect.signature(getattr(package, last)).parameters)


def test_every_row_says_where_the_name_is():
    """Each row names one crate item, once a module, and says what it is here, or none."""
    for heading, table in sections().items():
        crate_names = [row[0] for row in table]
        assert len(set(crate_names)) == len(crate_names), heading
        for row in table:
            assert len(row) == 3, row
            crate, ours, _ = row
            assert re.fullmatch(r"`[^`]+`", crate), row
            assert ours == "none" or re.fullmatch(r"`fd\.[^`]+`(, `fd\.[^`]+`)*", ours), row


@pytest.mark.parametrize("name", present_names())
def test_present_name_exists(name):
    """A name that the page says is there is there."""
    assert exists(name)
