"""Groups: the contract of a backend (`base.py`), and one module or package for each backend."""
