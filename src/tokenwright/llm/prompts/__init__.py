"""Prompts as the cache sees them: where their tokens come from, and why some are computed again."""
