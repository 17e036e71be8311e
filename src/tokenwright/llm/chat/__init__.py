"""Conversations as a model reads and writes them: thoughts, tools, and answers of a form."""
