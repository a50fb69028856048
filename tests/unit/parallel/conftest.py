"""Makes `ddp_ranks`, which tests of DDP and of LocalSGD share, importable from this folder and those below it."""
