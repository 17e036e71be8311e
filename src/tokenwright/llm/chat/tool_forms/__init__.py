"""The forms of tool calls: readers, grammars, writers, and how to find a template's form."""
