"""Engines of collectives: what moves the bytes, chosen by a group for each device."""
