"""Conformance suites for stores, backends and collectives."""
