"""The model families map config.json to a graph of ops, and our tensor names to the checkpoint's."""
