"""Opens an engine's draft model and proposer, with the measured costs of steps."""
