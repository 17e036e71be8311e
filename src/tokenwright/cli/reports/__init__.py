"""Figures of a run as lines, charts and JSON."""
