"""Plugins of the whole test tree."""

from __future__ import annotations

from importlib.metadata import entry_points

pytest_plugins = ["pytester"]
if not any(entry.name == "ferrodist" for entry in entry_points(group="pytest11")):
    # The tree is tested where it lies; an installed ferrodist has registered its plugin by itself.
    pytest_plugins.append("ferrodist.testing.pytest_plugin")
