"""The page about the launcher, beside the parsers of torchrun and `ferrodist run`."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed.run

from ferrodist.cli.main import build_parser
from ferrodist.launch import options

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()


def options_of(parser) -> set[str]:
    found = {option for action in parser._actions for option in action.option_strings}
    return {option for option in found if "_" not in option} - {"-h", "--help"}


def test_every_option_of_torchrun_is_on_the_page_and_known():
    """Whatever the installed torchrun has is in the table, and `ferrodist run` takes it or refuses it with advice."""
    theirs = options_of(torch.distributed.run.get_args_parser())
    assert len(theirs) > 20
    (commands,) = [action.choices for action in build_parser()._actions if action.dest == "==SUPPRESS=="]
    ours = options_of(commands["run"])
    assert theirs <= ours
    table = PAGE.partition("## torchrun's options")[2]
    named = set(re.findall(r"`(--?[a-z-]+)`", table))
    assert {option for option in theirs if option.startswith("--")} <= named
    assert named <= ours


def test_rows_say_refused_for_what_is_refused():
    """An option is refused if and only if its row says so."""
    rows = [line for line in PAGE.partition("## torchrun's options")[2].splitlines() if line.startswith("| `-")]
    refused = {option for row in rows if "| refused: " in row for option in re.findall(r"`(--[a-z-]+)`", row)[:1]}
    assert refused == {names[0] for names in options._UNSUPPORTED}
