"""Families with layers that keep a state, beside attention or alone."""
