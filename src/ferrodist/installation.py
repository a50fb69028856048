"""The version and origin of this installation, and the command that adds an extra to it: it is on no index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping


def installed_version() -> str | None:
    """Return ferrodist's version; None if it runs from its source tree."""
    try:
        return importlib.metadata.version("ferrodist")
    except importlib.metadata.PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of ferrodist, for messages about missing packages."""
    origin = _direct_url()
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        info = origin["vcs_info"]
        return f"pip install 'ferrodist[{extra}] @ {info['vcs']}+{url}@{info['commit_id']}'"
    path = Path(unquote(urlsplit(url).path))
    if not url.startswith("file:") or not path.exists():
        return f"pip install '.[{extra}]', in a checkout of ferrodist"
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install --editable '{path}[{extra}]'"
    return f"pip install 'ferrodist[{extra}] @ {url}'"


def describe_missing(what: str, extra: str, packages: Mapping[str, str]) -> str:
    """A line about those of an extra's packages, by module, that are not installed; "" if none is missing."""
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    return f"ferrodist: {what} needs {', '.join(missing)}, which is not installed here: {how_to_install(extra)}\n"


def _direct_url() -> dict[str, Any]:
    """Return pip's record of the installation's origin (PEP 610); empty without one."""
    try:
        text = importlib.metadata.distribution("ferrodist").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
