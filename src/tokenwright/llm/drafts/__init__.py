"""The sources of an engine's drafts: its draft model, and the measured costs of steps."""
