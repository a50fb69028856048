"""The page docs/support.md agrees with the code: it is generated from it, and each of its cells is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support_table import OPERATIONS, YES, main, render

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def _tables() -> list[list[dict[str, str]]]:
    """The tables of the page, as rows of cells by column."""
    tables = []
    for block in _PAGE.read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            tables.append([dict(zip(head, row, strict=True)) for row in rows])
    return tables


def _reasons() -> dict[str, str]:
    """The numbered reasons of the page."""
    lines = [line.partition(". ") for line in _PAGE.read_text(encoding="utf-8").splitlines() if line[:1].isdigit()]
    return {number: reason.removesuffix(".") for number, _, reason in lines}


def test_the_page_is_what_the_code_generates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """If this fails, run make support."""
    assert render() == _PAGE.read_text(encoding="utf-8")
    main([])
    assert capsys.readouterr().out == render()
    main(["--write", str(tmp_path / "support.md")])
    assert (tmp_path / "support.md").read_bytes() == _PAGE.read_bytes()


def test_the_page_is_made_by_a_command() -> None:
    """The command on the page's first lines works."""
    made = subprocess.run(
        [sys.executable, "-W", "error", str(_PAGE.parents[1] / "tools" / "docs" / "support_table.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == _PAGE.read_text(encoding="utf-8")
    assert not made.stderr


def test_every_cell_of_reductions_is_true() -> None:
    """A two-rank allreduce works where the page says so, and elsewhere raises TypeError with the page's reason."""
    table, reasons = _tables()[0], _reasons()
    assert [row[""] for row in table] == [str(dtype)[6:] for dtype in DTYPES]
    assert list(table[0])[1:] == list(OPERATIONS)
    expected = {
        "SUM": 2,
        "MEAN": 1,
        "MIN": 1,
        "MAX": 1,
        "PRODUCT": 1,
        "BAND": 1,
        "BOR": 1,
        "BXOR": 0,
        "premultiplied_sum": 1,
    }

    def on_rank(group: Backend) -> int:
        num_tried = 0
        for row in table:
            ones = torch.ones(3, dtype=getattr(torch, row[""]))
            for name, op in OPERATIONS.items():
                if row[name] == YES:
                    wanted = torch.full((3,), expected[name]).to(ones.dtype)
                    assert torch.equal(fd.allreduce(ones, op).to(torch.complex128), wanted.to(torch.complex128)), (
                        row,
                        op,
                    )
                else:
                    with pytest.raises(TypeError) as caught:
                        fd.allreduce(ones, op)
                    assert str(caught.value).endswith(f"is not defined: {reasons[row[name]]}")
                num_tried += 1
        return num_tried

    assert run_ranks(on_rank, 2) == [len(DTYPES) * len(OPERATIONS)] * 2


def test_every_collective_has_a_row() -> None:
    """No public collective is left out, and nothing on the page has gone."""
    messages = {"send", "recv", "recv_into", "sendrecv", "batch", "send_object", "recv_object", "coalesce"}
    # Forms of barrier, allreduce and broadcast.
    same = {"monitored_barrier", "gpu_allreduce", "gpu_broadcast", "allreduce_add_rms_norm"}
    values = {
        "PendingCollective",
        "PreparedCollective",
        "ReduceOp",
        "premultiplied_sum",
        "compute_shard_sizes",
        "empty_symmetric",
        "Send",
        "Recv",
    }
    public = {name for name, home in fd._MODULE_OF.items() if home.startswith("collectives.")}
    started = {name for name in public if name.startswith("async_")}
    prepared = {name for name in public if name.startswith("prepare_")}
    rows = {row[""].strip("`"): row for row in _tables()[1]}
    assert public - messages - same - values - started - prepared == rows.keys()
    assert {name.removeprefix("prepare_") for name in prepared} <= rows.keys()
    assert {name.removeprefix("async_") for name in started} == {
        name for name, row in rows.items() if row["async"] == YES
    }
