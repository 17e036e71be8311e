"""The model families: from config.json to a graph of ops, and from our tensor names to the checkpoint's."""
