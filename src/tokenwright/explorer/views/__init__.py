"""Figures of a run or a model that only the page shows."""
