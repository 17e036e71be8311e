"""Figures of a run or a model that only the page shows. They need NumPy, and are loaded with the model."""
