"""A model's eyes: its tower with weights, and pictures laid out in prompts."""

from typing import Any

from tokenwright.backends.device import Device
from tokenwright.backends.kv_sizing import refuse_weights
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.runner import dense_tower
from tokenwright.backends.towers.tower_runner import TowerRunner
from tokenwright.checkpoints.packing.packer import pack_checkpoint
from tokenwright.checkpoints.towers.open_vision import Vision
from tokenwright.formats import DTYPE_BYTES, DType, WeightFormat


def open_tower(vision: Vision, dtype: DType, device: Device, native: NativeKernels | None) -> TowerRunner:
    """A tower with weights in `dtype`. Raises CheckpointError for damaged tensors, CapacityError without the memory."""
    tower, colours = vision.sight.tower, (vision.processor.mean, vision.processor.deviation)
    refuse_weights(tower.parameters * DTYPE_BYTES[dtype], device, dtype)
    if native is not None:
        weights: dict[str, Any] = {**pack_checkpoint(vision.checkpoint, WeightFormat(dtype))}
        return TowerRunner(tower, native, weights, *colours)
    return dense_tower(tower, vision.checkpoint.tensors(dtype), colours, device)
