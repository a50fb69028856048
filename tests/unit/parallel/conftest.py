"""Makes `ddp_ranks`, which tests of DDP and of LocalSGD share, importable from this folder and those below it."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device_guard():
    """Let torch 2.10 survive compiled modules in ranks that are threads: docs/torch-backend.md has the limit.

    It keeps a device guard in the memory of the first thread that makes fake tensors. This thread outlives the ranks'.
    """
    if torch.__version__.startswith("2.10."):
        torch._C._ensureCUDADeviceGuardSet()
