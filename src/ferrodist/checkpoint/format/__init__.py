"""The format of a checkpoint: its manifest, tree of values, and data files (docs/formats.md)."""
