"""Reading and writing checkpoints: hub, folders, safetensors, configs, packed weights and their cache."""
