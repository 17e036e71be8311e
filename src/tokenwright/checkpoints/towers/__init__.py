"""Reads vision towers in checkpoints: their configs, tensors and picture processors."""
