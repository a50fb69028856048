"""File formats: the manifest, its state tree, and safetensors headers."""
