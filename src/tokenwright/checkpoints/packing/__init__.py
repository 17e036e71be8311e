"""Weights in the kernels' layout: how they are packed, written to files, and kept in a cache on disk."""
