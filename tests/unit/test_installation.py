"""What messages say about installing an extra, for each way an installation comes about."""

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ferrodist import installation
from ferrodist.installation import how_to_install

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "pip install '.[nccl]', in a checkout of ferrodist"),
        ({}, "pip install '.[nccl]', in a checkout of ferrodist"),
        ({"url": "{here}"}, "pip install 'ferrodist[nccl] @ {here}'"),
        ({"url": "{here}", "dir_info": {"editable": True}}, "pip install --editable '{path}[nccl]'"),
        ({"url": "file:///gone"}, "pip install '.[nccl]', in a checkout of ferrodist"),
        (
            {"url": "https://host/f.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'ferrodist[nccl] @ git+https://host/f.git@abc'",
        ),
    ],
)
def test_the_command_fits_the_installation(monkeypatch, tmp_path, origin, expected):
    """The package is on no index, so the command names where this one came from."""
    place = {"here": tmp_path.as_uri(), "path": str(tmp_path)}
    text = None if origin is None else json.dumps(origin).replace("{here}", place["here"])
    monkeypatch.setattr(
        installation.importlib.metadata, "distribution", lambda _name: SimpleNamespace(read_text=lambda _file: text)
    )
    assert how_to_install("nccl") == expected.format(**place)


def test_without_an_installation(monkeypatch):
    """Run from its source tree."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.importlib.metadata, "distribution", missing)
    assert how_to_install("mpi") == "pip install '.[mpi]', in a checkout of ferrodist"


def test_no_page_or_message_installs_from_an_index():
    """``pip install 'ferrodist[x]'`` finds nothing, or somebody else's package."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (ROOT / name).read_text() for name in files if name.endswith((".py", ".md", ".toml"))}
    wrong = re.compile(r"pip install '?ferrodist(\[\w+\])?'?(?! @)(\s|$|`)")
    assert [name for name, text in texts.items() if wrong.search(text) and not name.startswith("tests/")] == []


def test_a_build_without_a_compiler_says_how_to_do_without():
    """What pip shows last, where CMake finds no compiler."""
    assert "FERRODIST_NO_NATIVE=1 pip install ." in (ROOT / "pyproject.toml").read_text().partition("after-failure")[2]
