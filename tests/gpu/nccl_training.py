"""The trainings of test_fallback_training.py as one rank of a group over NCCL: started by test_nccl_training.py."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import test_fallback_training as training
import torch

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable


def main(meeting: str, backend: str, folder: str) -> None:
    """Run all trainings on this rank."""
    torch.cuda.set_device(0)
    group = fd.init_process_group(backend, init_method=meeting, timeout=60)

    def run_here(program: Callable[..., Any], _num_ranks: int, *arguments: Any, **_: Any) -> None:
        program(group, *arguments)

    training.run_ranks = run_here  # the ranks are there already
    parts = {name: partial(training.test_training, name) for name in training._WRAPS}
    for schedule in (fd.PipelineSchedule.GPIPE, fd.PipelineSchedule.ZERO_BUBBLE_H1):
        for batch in (16, 2048):
            parts[f"{schedule.name} of {batch}"] = partial(training.test_pipeline, schedule, batch)
    parts["mixed precision"] = training.test_mixed_precision_and_scaler
    parts["meta device"] = training.test_models_from_the_meta_device
    parts["batch norm"] = training.test_sync_batch_norm
    parts["local SGD"] = training.test_local_sgd
    parts["checkpoints"] = partial(training.test_checkpoints, Path(folder))
    for name, part in parts.items():
        began = time.monotonic()
        part()
        group.synchronize()
        print(f"rank {group.rank}: {name} passed in {time.monotonic() - began:.2f} s", flush=True)
    fd.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
