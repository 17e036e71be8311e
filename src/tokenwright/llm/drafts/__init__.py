"""What an engine drafts with: its draft model, and the measured costs of steps."""
