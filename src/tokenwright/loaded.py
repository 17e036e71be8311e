"""From a checkpoint to a decoder: weights in the form that was asked for, on the kernels that are there."""

import torch

from tokenwright.backends import Kernels, ReferenceKernels
from tokenwright.backends.layout import weight_bytes
from tokenwright.backends.memory import refuse_weights
from tokenwright.backends.native.compile import compiles
from tokenwright.backends.native.kernels import NativeKernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.torch.decoder import Decoder
from tokenwright.backends.torch.ops import lacking
from tokenwright.cache import TORCH_DTYPES
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packing import load_packed
from tokenwright.checkpoints.weight_cache import WeightCache
from tokenwright.config import DTYPE_BYTES, DType, WeightFormat
from tokenwright.errors import CheckpointError, RequestError


def make_decoder(
    checkpoint: Checkpoint,
    form: WeightFormat,
    dtype: DType,
    device: torch.device,
    native: NativeKernels | None = None,
    counted: Kernels | None = None,
    report: Report | None = None,
) -> Decoder:
    """The decoder of a checkpoint, its weights in `form` (native: in `dtype`); on the reference without `native`.

    counted: what stands before the kernels and counts their calls. Raises CheckpointError for a model with an op that
    nothing runs, CapacityError where the memory does not suffice, RequestError for a form that the device has no
    kernels for.
    """
    if missing := lacking(checkpoint.graph):
        raise CheckpointError(
            f"{checkpoint.graph.architecture} needs {', '.join(missing)}, which this Tokenwright does not have; "
            "use a newer one"
        )
    graph, kernels = checkpoint.graph, counted or native or ReferenceKernels()
    kept = (checkpoint.packed or form).resolved(dtype)
    if native is None and not kept.quantised:
        refuse_weights(graph.parameters * DTYPE_BYTES[dtype], device, dtype)
        return Decoder(graph, kernels, {**checkpoint.tensors(TORCH_DTYPES[dtype], device, report)})
    if device.type != "cpu":
        raise RequestError(f"{kept} weights are computed on the CPU alone; use device cpu, or native weights")
    refuse_weights(weight_bytes(graph, kept), device, dtype)
    weights = load_packed(checkpoint, form, dtype, report, WeightCache.default() if kept.quantised else None)
    if native is None or not compiles(graph):
        return Decoder(graph, kernels, weights)
    return NativeDecoder(graph, kernels, native, weights)
