"""Finds checkpoints in folders and on the hub, and reads their JSON and safetensors files."""
