"""Private names of torch are read in `ferrodist.torch_private` alone, so that a torch without one costs one feature."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils import _python_dispatch

import ferrodist
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.c10d import keep_torchcomms_out, leave_flight_recorder_out

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(ferrodist.__file__).parent
EXEMPT = ("torch_private", "testing")

NOT_TORCH_S = {
    "_current_frames": "sys",
    "_getframe": "sys",
    "_exit": "os",
    "_SubParsersAction": "argparse",
    "_option_string_actions": "argparse",
    "_fields": "named tuples",
    "_strip_protocol": "fsspec",
    "_get_kwargs_from_urls": "fsspec",
    "_rm_file": "fsspec",
    "_condition": "concurrent.futures",
    "_done_callbacks": "concurrent.futures",
    "_init_weights": "transformers",
    "_attn_implementation": "transformers",
}
"""Private names that are other libraries', by whose."""

TORCH_S = {"_parameters", "_buffers", "_modules", "_version", "_base", "_op", "_functions", "_local_scalar_dense"}
"""Private names of torch's that are also defined here, so that reading them off anything but ``self`` is torch's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def own_names() -> frozenset[str]:
    """What is defined in ferrodist's own source."""
    found: set[str] = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Assign) and any(ast.unparse(target) == "__slots__" for target in node.targets):
            found |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return frozenset(found)


def unread(tree: ast.Module) -> Iterator[ast.AST]:
    """What is there for type checkers: annotations, and imports for them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def is_torch_s(name: str, owner: str) -> bool:
    if not is_private(name) or name in NOT_TORCH_S:
        return False
    return owner not in ("self", "cls") if name in TORCH_S else name not in own_names()


def reads(tree: ast.Module) -> Iterator[str]:
    """Return the places where private names of torch are read."""
    skipped = {id(inner) for node in unread(tree) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Attribute) and is_torch_s(node.attr, ast.unparse(node.value)):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            if any(is_private(name) for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif (
            isinstance(node, ast.Import)
            and any(
                each.name.startswith("torch.") and any(map(is_private, each.name.split("."))) for each in node.names
            )
        ) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr")
            and isinstance(node.args[1], ast.Constant)
            and is_torch_s(str(node.args[1].value), ast.unparse(node.args[0]))
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_names_of_torch_are_read_in_one_place():
    """A read elsewhere would make an import, or an unrelated call, fail with a torch that has the name no more."""
    found = [
        f"{path.relative_to(SOURCE)}:{read}"
        for path, tree in trees().items()
        if path.relative_to(SOURCE).parts[0] not in EXEMPT
        for read in reads(tree)
    ]
    assert not found, "read these in ferrodist/torch_private:\n" + "\n".join(found)


def test_the_search_finds_them():
    """Each way to read one is found, and what is for type checkers is not."""
    source = """
from torch._C import _dynamo
import torch._ops
def read(tensor: torch._ops.OpOverload, module) -> torch._C.Node:
    return torch._C._increment_version(tensor), module._parameters, getattr(tensor, "_use_count"), self._parameters
"""
    found = list(reads(ast.parse(source)))
    assert [read.partition(": ")[0] for read in found] == ["2", "3", "5", "5", "5", "5"]


def load_anew(name):
    """One of the modules, as it is loaded with a torch that lacks what has been taken away."""
    spec = importlib.util.find_spec(f"ferrodist.torch_private.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_name_is_an_error_of_its_feature_alone(monkeypatch):
    """The module loads, the feature says what is missing in which torch, and the rest works."""
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_increment_version")
    autograd = load_anew("autograd")
    version = re.escape(torch.__version__)
    words = f"torch {version} has no .*_current_graph_task_id, without which .* FSDP.*: this torch is"
    with pytest.raises(UnsupportedOpError, match=words):
        autograd.current_graph_task()
    assert autograd.increment_version is torch.autograd.graph.increment_version
    assert autograd.version_of(torch.ones(1)) == 0


def test_the_class_of_leaves_is_found_without_its_name(monkeypatch):
    """Pipelines know the nodes of a graph that end it."""
    known = load_anew("autograd").accumulate_grad_type
    monkeypatch.delattr(torch._C._functions, "AccumulateGrad")
    assert load_anew("autograd").accumulate_grad_type is known


def test_modes_that_are_not_seen(monkeypatch):
    """Without the names calls run as if there were none."""
    for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack"):
        monkeypatch.delattr(torch._C, name)
    monkeypatch.delattr(_python_dispatch, "is_in_torch_dispatch_mode")
    monkeypatch.delattr(_python_dispatch, "_disable_current_modes")
    modes = load_anew("modes")
    with modes.no_modes():
        assert modes.num_dispatch_modes() == modes.num_function_modes() == modes.is_in_torch_dispatch_mode() == 0


def test_profiles_that_are_seen_otherwise(monkeypatch):
    """Calls go on being recorded without the name that is quickest to look at."""
    with monkeypatch.context() as lacking:
        lacking.delattr(torch.autograd.profiler, "_is_profiler_enabled")
        profiling = load_anew("profiling")
    assert not profiling.is_profiling()
    with torch.profiler.profile(acc_events=True):  # torch 2.10 warns without
        assert profiling.is_profiling()


def test_memory_whose_holders_are_not_told(monkeypatch):
    """Counts as held by others, too: it is copied, and no gradient changes behind somebody's back."""
    assert load_anew("tensors").is_held_once(torch.ones(1))
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not load_anew("tensors").is_held_once(torch.ones(1))


def test_an_operator_that_is_not_there(monkeypatch):
    """A rule for it is a rule for nothing; a name that is not in the list is a mistake."""
    operators = load_anew("operators")
    monkeypatch.setattr(operators, "_NAMES", frozenset({"gone"}))
    gone = operators.private_aten.gone.default
    assert {gone: 1}.get(torch.ops.aten._softmax.default) is None
    assert gone.__name__ == "aten._gone.default"
    with pytest.raises(AttributeError, match="listed here"):
        _ = operators.private_aten.softmax


def test_compiling_without_what_is_quick(monkeypatch):
    """Methods stay out of compiled programs in torch's usual way."""
    disabled = []
    monkeypatch.setattr(torch.compiler, "disable", lambda method: disabled.append(method.__name__) or method)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    compilers = load_anew("compilers")

    @compilers.not_compiled
    class Kind:
        def method(self):
            return 1

    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert Kind().method() == 1
    assert disabled == ["method"]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert Kind().method() == 1
    assert disabled == ["method"]


def test_torch_s_groups_with_and_without_what_2_15_attaches():
    """Another torch is left as it is; in 2.15's the recorder goes to the groups of others alone."""
    empty = SimpleNamespace()
    leave_flight_recorder_out(empty, "ferrodist")
    keep_torchcomms_out(empty, "ferrodist")
    assert not vars(empty)
    attached = []
    c10d = SimpleNamespace(_FR_SELF_RECORDING_BACKENDS=set(), _maybe_attach_flight_recorder=attached.append)
    leave_flight_recorder_out(c10d, "ferrodist")
    other = SimpleNamespace()
    for group in (SimpleNamespace(is_written_in_python=True), other):
        c10d._maybe_attach_flight_recorder(group)
    assert attached == [other]
    assert {"ferrodist"} == c10d._FR_SELF_RECORDING_BACKENDS
