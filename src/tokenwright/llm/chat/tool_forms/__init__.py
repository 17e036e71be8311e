"""The forms in which models write calls of tools: read, held to their schemas, written, and found from templates."""
