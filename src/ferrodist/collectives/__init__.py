"""Collectives and point-to-point operations: what users call, and the engines that run it."""
