"""The forms of tool calls: read, held to schemas, written, and found from templates."""
