"""Packs weights in the kernels' layout, writes them to files, and caches them on disk."""
