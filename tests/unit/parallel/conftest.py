"""Makes `ddp_ranks`, which tests of DDP and of LocalSGD share, importable from this folder and those below it."""

import pytest
import torch


@pytest.fixture
def compiles_in_threads():
    """Skip a test that compiles in ranks that are threads where torch does not survive it."""
    is_without_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
    if torch.__version__.startswith("2.10.") and is_without_gpu:
        pytest.skip("torch 2.10 for CUDA without a GPU crashes after a thread that compiled has ended")
