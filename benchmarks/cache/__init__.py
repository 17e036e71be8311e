"""Benchmarks of the prefix cache: its tier on a disk, and recorded agents."""
