"""The rules of operators, by family."""
