"""Where checkpoints lie, and how their files are read and written: folders, the hub, JSON, safetensors."""
