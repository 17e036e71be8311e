"""Convert between the engine's arrays and torch's tensors, which only this folder uses; devices and their memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenwright.arrays import BFLOAT16, DTYPES, FLOAT8_E4M3, FLOAT8_E5M2, Array
from tokenwright.backends.device import Device
from tokenwright.errors import RequestError
from tokenwright.formats import DType
from tokenwright.models.rotary import Rotation

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Torch and NumPy do not exchange these dtypes: such arrays go over as integers.
_AS_INTEGERS: Mapping[np.dtype[Any], tuple[type[Any], torch.dtype]] = {
    BFLOAT16: (np.int16, torch.bfloat16),
    FLOAT8_E4M3: (np.uint8, torch.float8_e4m3fn),
    FLOAT8_E5M2: (np.uint8, torch.float8_e5m2),
}
_INTEGERS_OF = {theirs: (kind, ours) for ours, (kind, theirs) in _AS_INTEGERS.items()}


def tensor(array: Any) -> torch.Tensor:
    """A tensor over an array's memory; a tensor itself."""
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype in _AS_INTEGERS:
        kind, dtype = _AS_INTEGERS[array.dtype]
        return torch.from_numpy(array.view(kind)).view(dtype)
    return torch.from_numpy(array)


def array(of: Any) -> Array:
    """An array over the memory of a tensor on the CPU, or of a copy there; an array itself."""
    if not isinstance(of, torch.Tensor):
        return of  # type: ignore[no-any-return]
    here = of.detach().cpu()
    if here.dtype in _INTEGERS_OF:
        kind, ours = _INTEGERS_OF[here.dtype]
        integers = torch.int16 if kind is np.int16 else torch.uint8
        return here.view(integers).numpy().view(ours)
    return here.numpy()


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return tensor(np.empty(0, dtype)).dtype


@dataclass(frozen=True, slots=True)
class TensorRotation:
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, rotation: Rotation, device: torch.device) -> "TensorRotation":
        return cls(tensor(rotation.cos).to(device), tensor(rotation.sin).to(device))


class TorchDevice:
    def __init__(self, device: Device) -> None:
        self.name = str(device)
        self._device = torch.device(self.name)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def summing(self, nbytes: int) -> tuple[Callable[[], object], int]:
        """A function that sums a buffer of about `nbytes`, and the buffer's bytes."""
        buffer = torch.ones(max(1, nbytes // 4), dtype=torch.float32, device=self._device)
        return lambda: buffer.sum().item(), buffer.nbytes

    def multiplying(self, side: int, dtype: DType) -> Callable[[], object]:
        square = torch.ones(side, side, dtype=TORCH_DTYPES[dtype], device=self._device)
        return lambda: torch.mm(square, square)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
        """Raises RuntimeError if the device's memory runs out."""
        return torch.zeros(tuple(shape), dtype=torch_dtype(dtype), device=self._device)

    def fetched(self, memory: torch.Tensor) -> Array:
        return array(memory)

    def sent(self, content: Array) -> torch.Tensor:
        return tensor(content).to(self._device)


def accelerator() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def usable_device(name: str) -> Device:
    """Raises RequestError for an unknown or unavailable device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is not known to torch; use auto or cpu", "device") from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise RequestError(f"device {name!r} is not usable with this torch on this machine; use auto or cpu", "device")
    return Device(device.type, device.index)


def weights_on(device: Device, weights: dict[str, Array]) -> dict[str, torch.Tensor]:
    """Weights as tensors on a device. Empties `weights`, so that only one at a time has a second copy."""
    return {name: tensor(weights.pop(name)).to(str(device)) for name in list(weights)}


assert TORCH_DTYPES.keys() == DTYPES.keys(), "the dtypes of a model have a form in torch and in NumPy"
