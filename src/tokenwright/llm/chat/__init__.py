"""Conversations as a model reads and writes them: reasoning, tool calls, and answers of a given form."""
