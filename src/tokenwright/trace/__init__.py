"""Observing a run: what a step did, by counts and by the clock; and what it must cost, by its shapes.

This file imports nothing: the schema needs no torch, and a server that waits for its model has not loaded torch yet.
"""
