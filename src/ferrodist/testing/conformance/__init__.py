"""Conformance suites: the specification of stores, backends and collectives, as checks."""
