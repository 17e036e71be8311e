"""Stands in for a module of Unix that a page lacks: limits of a process, which a page does not have."""
