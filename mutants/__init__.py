"""Deliberate faults, each of which the tests must find."""
