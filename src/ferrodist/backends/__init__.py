"""How ranks talk: the contract of a backend (`base.py`), and one module or package a backend."""
