"""Observing a run: each step by counts and by the clock. This file imports nothing, so the schema is light."""
