"""Observe a run: counts and times of each step. This file imports nothing, so that the schema is light to import."""
