"""Remembers answered prompts, and explains why tokens of a prompt were computed again."""
