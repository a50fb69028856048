"""DTensor: tensors that are one to the program and lie in parts over a mesh."""
