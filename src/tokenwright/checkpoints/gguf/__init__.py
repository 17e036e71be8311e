"""Reads GGUF files: headers, tensors, and the keys of a config."""
