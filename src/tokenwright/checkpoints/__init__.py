"""Reads and writes checkpoints: hub, folders, safetensors, configs, packed weights and their cache."""
