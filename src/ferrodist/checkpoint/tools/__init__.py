"""Tools over saved checkpoints: inspect, verify, compare and reshard."""
