"""The explorer: what the page asks of the engine, panel by panel, and its answers."""
