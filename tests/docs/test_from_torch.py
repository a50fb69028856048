"""The page for users of torch.distributed agrees with both, and with the errors that lead to it."""

import contextlib
import importlib
import io
import re

import pytest
import torch
import torch.distributed as dist
from page_tables import FENCES, Page, exists

import ferrodist as fd
from ferrodist.testing import run_ranks

PAGE = Page("from-torch.md", "torch")
ROWS = [
    (module, theirs.strip("`"), ours, note)
    for module, table in PAGE.sections().values()
    for theirs, ours, note in table
]
NEWER = {"all_gather_single", "reduce_scatter_single", "gather_single", "scatter_single"}
"""Names that torch has under another name before 2.14."""

NOT_FOR_PROGRAMS = {
    *("BackendConfig", "GroupName", "PrefixStore", "Store", "DebugLevel", "get_debug_level", "record_comm"),
    *("get_backend_config", "get_default_backend_for_device", "get_pg_count", "get_node_local_rank"),
    *("is_backend_available", "is_torchelastic_launched", "is_xccl_available", "supports_complex", "Backend"),
    *("is_gloo_available", "is_mpi_available", "is_nccl_available", "is_ucc_available"),
}
"""Public names of torch without a row: its own settings, and those that are the same here."""


@pytest.mark.parametrize("module", ["torch", "torch.distributed", "torch.distributed.rpc"])
def test_the_tables_are_read(module):
    """Each kind of table is found, so that the tests below are of something."""
    assert any(row[0] == module for row in ROWS)


@pytest.mark.parametrize("name", PAGE.present_names())
def test_present_name_exists(name):
    """A name that the page says is there is there."""
    assert exists(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_torchs_name_exists(row):
    """The names beside ours are torch's, of the table's package."""
    module, theirs, ours, _ = row
    assert ours == "none" or re.fullmatch(r"`fd\.[^`]+`(, `fd\.[^`]+`)*", ours), row
    whole = theirs if theirs.startswith("torch.") else f"{module}.{theirs}"
    owner, _, name = whole.rpartition(".")
    assert hasattr(importlib.import_module(owner), name)


@pytest.mark.parametrize("row", [row for row in ROWS if row[2] != "none"], ids=lambda row: row[1])
def test_torchs_name_leads_to_ours(row):
    """Who writes torch's name behind `fd.` learns which name the page gives; the others are the same here."""
    _, theirs, ours, _ = row
    name = theirs.rpartition(".")[2]
    if hasattr(fd, name):
        return
    with pytest.raises(AttributeError) as caught:
        getattr(fd, name)
    hinted = re.findall(r"ferrodist\.([\w.]+\w)", str(caught.value))
    assert all(exists(each) for each in hinted), caught.value
    firsts = re.findall(r"`fd\.([\w.]+)", ours)
    assert any(each in hinted or each.split(".")[-1] in str(caught.value) for each in firsts), caught.value


def test_every_function_of_torch_distributed_has_a_row():
    """A name of torch's that programs use is on the page."""
    names = {theirs for _, theirs, _, _ in ROWS}
    public = set(dist.distributed_c10d.__all__) - NOT_FOR_PROGRAMS - NEWER
    missing = {name for name in public - names if not name.endswith("Options") and not name.startswith("ProcessGroup")}
    assert not missing


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"])
def test_collectives_say_that_they_return_their_result(name):
    """Who looks for torch's name would otherwise drop the result of ours."""
    with pytest.raises(AttributeError, match=r"return(s)? (its|their) result"):
        getattr(fd, name)


def test_other_names_get_no_hint():
    """A misspelt name of ours is no name of torch's."""
    with pytest.raises(AttributeError, match=r"has no attribute 'allreduced'$"):
        _ = fd.allreduced


def test_packages_give_hints_too():
    """``fd.checkpoint.save`` and ``fd.rpc.rpc_sync`` are torch's names in packages of the same purpose."""
    with pytest.raises(AttributeError, match=r"'save': use ferrodist.checkpoint.save_distributed"):
        _ = fd.checkpoint.save
    with pytest.raises(AttributeError, match=r"'load': use ferrodist.checkpoint.load_distributed"):
        _ = fd.checkpoint.load
    with pytest.raises(AttributeError, match=r"'rpc_sync': use ferrodist.rpc.RpcAgent.rpc_sync"):
        _ = fd.rpc.rpc_sync


def test_collectives_leave_their_input_as_the_page_says():
    """Results are returned; `out=tensor` is torch's effect, and two functions fill their first argument."""

    def program(group):
        tensor = torch.full((2,), float(group.rank))
        assert fd.allreduce(tensor).tolist() == [1, 1]
        assert tensor.tolist() == [group.rank] * 2
        assert fd.broadcast(tensor, 1).tolist() == [1, 1]
        assert tensor.tolist() == [group.rank] * 2
        assert fd.allreduce(tensor, out=tensor) is tensor
        assert tensor.tolist() == [1, 1]
        part = torch.empty(1)
        fd.reduce_scatter_tensor(part, tensor)
        assert part.tolist() == [2]
        if group.rank:
            assert fd.recv_into(part, 0) == 0
            assert part.tolist() == [7]
        else:
            fd.send(torch.tensor([7.0]), 1)

    run_ranks(program, 2)


def test_the_program_on_the_page_runs(monkeypatch):
    """What newcomers copy works as it stands."""
    (code,) = [text for language, text in FENCES.findall(PAGE.text) if language == "python"]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert "tensor([1., 1., 1.])" in printed.getvalue()
