"""FSDP where ranks are processes that can be killed."""

import os
import signal
import time

import pytest
import torch

from ferrodist import FSDP
from ferrodist.errors import PeerLostError, RankFailedError
from ferrodist.parallel.fsdp import flat_layout
from ferrodist.testing import run_ranks


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["tcp", "native", "joined"])
def test_a_rank_killed_in_the_middle(backend, stage, tmp_path, monkeypatch):
    """Survivors of a SIGKILL get PeerLostError, which says what is lost, and still have their shards."""
    if backend == "joined":
        monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)

    def program(group):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        fsdp = FSDP(model, group, wrap=torch.nn.Linear)
        expected = fsdp.sharded_state_dict()["parameters"]
        if group.rank == 1 and stage == "forward":
            fsdp.module[1].register_forward_hook(die)
        start = time.monotonic()
        try:
            output = fsdp(torch.ones(1, 4))
            if group.rank == 1:
                output.register_hook(die)
            output.sum().backward()
        except PeerLostError as error:
            raised = error
        assert time.monotonic() - start < 5
        assert "gradients of this step are lost" in str(raised)
        now = fsdp.sharded_state_dict()["parameters"]
        assert all(torch.equal(now[name]["piece"], expected[name]["piece"]) for name in expected)
        (tmp_path / f"rank {group.rank}").write_text(f"lost {raised.ranks}")

    with pytest.raises(RankFailedError, match="SIGKILL") as failure:
        run_ranks(program, 3, backend="native" if backend == "joined" else backend)
    assert failure.value.ranks == (1,)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank 0": "lost (1,)",
        "rank 2": "lost (1,)",
    }
