"""Tools for saved checkpoints, run by one process: verify, compare, inspect, reshard."""
