"""The families of models, the ways to distribute them, and the comparison of each pair with one process."""
