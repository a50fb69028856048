"""DDP where ranks are processes that can be killed."""

import os
import signal

import pytest
import torch

from ferrodist import DDP
from ferrodist.errors import PeerLostError, RankFailedError
from ferrodist.testing import run_ranks


def test_a_rank_killed_during_backward(tmp_path):
    """Survivors of a SIGKILL in the middle of backward get PeerLostError out of it, which names the rank."""

    def backward(group):
        # Small, so that torch computes in one thread: its thread pool would not survive the fork.
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        ddp = DDP(model, group, bucket_size_mb=1e-9)
        if group.rank == 1:
            ddp.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        loss = ddp(torch.ones(1, 4)).sum()
        try:
            loss.backward()
        except PeerLostError as error:
            (tmp_path / f"rank {group.rank}").write_text(f"lost {error.ranks}")

    with pytest.raises(RankFailedError, match="SIGKILL") as failure:
        run_ranks(backward, 3, backend="tcp")
    assert failure.value.ranks == (1,)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank 0": "lost (1,)",
        "rank 2": "lost (1,)",
    }
