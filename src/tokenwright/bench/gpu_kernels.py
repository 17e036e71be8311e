"""A GPU's kernels beside the CPU's, on the model that ships inside: what `verify --device gpu` prints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenwright.backends.device import Device, accelerator_of
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.formats import WeightFormat

if TYPE_CHECKING:
    from tokenwright.backends.wgpu.proof import Finding

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")  # of the weights


def findings(device: Device) -> tuple[str, Mapping[str, "Sequence[Finding]"], bool]:
    """The adapter, the findings by the weights' format, and whether rows have the same bits in any batch."""
    from tokenwright.backends.wgpu.gpu import open_gpu
    from tokenwright.backends.wgpu.proof import proof

    gpu, checkpoint = open_gpu(device.index), Checkpoint.open("stories")
    found, wide = {}, True
    with gpu.proving:
        for form in FORMATS:
            gpu.proved.clear()  # what was found before is found again
            weights = load_packed(checkpoint, WeightFormat.parse(form), "float32")
            found[form], alike = proof(gpu, checkpoint.graph, weights, "float32")
            wide = wide and alike
    return accelerator_of(device).name, found, wide
