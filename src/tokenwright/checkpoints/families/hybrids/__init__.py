"""Families with layers that keep a state, most of them beside attention."""
