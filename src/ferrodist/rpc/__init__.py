"""Calls of registered functions on other ranks, and references to what they have there."""
