"""Adapters of the libraries: each makes the calls that a program tuned for speed would make.

Arrays exist before the clock starts, results go into given arrays, and constants are computed once. Each adapter
imports nothing but the library that it calls: the MPI peers' interpreters have neither torch nor ferrodist.
"""
