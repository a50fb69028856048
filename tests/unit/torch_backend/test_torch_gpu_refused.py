"""Tensors on a GPU in torch's groups: without the variable that lets them through, calls are refused before they run.

There is no GPU here: what is asked of a tensor is where it is. See tests/gpu/test_torch_backend_gpu.py for the rest.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend.general_calls import CheckedCall
from ferrodist.torch_backend.messages import start_receive, start_send
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

GPU = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch):
    """A group of one, without the variable."""
    monkeypatch.delenv("FERRODIST_ENABLE_GPU_FALLBACK", raising=False)
    (group,) = SimulatedBackend.create_group(1)
    process_group = FerrodistProcessGroup(group)
    yield process_group
    process_group.shutdown()


def never(*_: Any) -> None:
    """What must not run."""
    raise AssertionError("the call has run")


@pytest.mark.parametrize("is_async", [False, True])
def test_collectives_are_refused(made, is_async):
    """Whether they are waited for or not; the group goes on."""
    options = dist.AllreduceOptions()
    options.asyncOp = is_async
    op = CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=SimpleNamespace(device=GPU), timeout=0)
    call = CheckedCall(op=op, results=[], run=never)
    with pytest.raises(UnsupportedOpError, match=r"tensors on cuda:0.*FERRODIST_ENABLE_GPU_FALLBACK=1"):
        made._run(call, options)
    tensor = torch.ones(3)
    made.allreduce(tensor).wait()
    assert tensor.tolist() == [1, 1, 1]


def test_messages_are_refused(made):
    """In both directions, before their elements are looked at."""
    tensor = SimpleNamespace(device=GPU)
    for start in (start_send, start_receive):
        with pytest.raises(UnsupportedOpError, match=r"tensors on cuda:0.*FERRODIST_ENABLE_GPU_FALLBACK=1"):
            start(made.group, tensor, 0, 0, made._threads)
