"""Noise as a part of a model: a module per framework."""
