"""An adapter and its device: buffers, kernels and submissions. It turns the driver's errors into sentences."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import wgpu

from tokenwright.arrays import Array, as_bytes, padded
from tokenwright.cache.codec import LEVELS
from tokenwright.errors import CapacityError, EngineError, RequestError, WorkerError
from tokenwright.formats import TABLES
from tokenwright.units import binary

Buffer = Any

FACTS = 1024  # bytes of a dispatch's facts
TABLE = 10  # the number of the first format of `TABLES`
HELP = "use device cpu"
SHADERS = Path(__file__).parent / "shaders"
_LIMITS = ("max-buffer-size", "max-storage-buffer-binding-size")
_GRANTED = {  # by every WebGPU device, a browser's too
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
}
_USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC

# The bindings of each kernel behind `step` and `facts`: read, or written; at most 7, for WebGPU grants 8 buffers.
KERNELS: Mapping[str, str] = {
    "embed": "rrrrw", "norm": "rrrw", "quantise": "rw", "linear": "rrrrrrw", "heads": "rrrww", "attention": "rrrrrrw",
    "activate": "rw", "route": "rrrww", "mix": "rrrw", "summary": "ww", "top": "rw",
}  # fmt: skip


class Kernel:
    def __init__(self, gpu: "Gpu", name: str, constants: Mapping[str, int | bool]) -> None:
        tile, form = constants.get("TILE"), constants.get("FORMAT")
        parts = ["common", *([] if form is None else ["packed"]), name, *([] if tile is None else [f"rows_{tile}"])]
        each = {key: str(one).lower() if isinstance(one, bool) else f"{one}u" for key, one in constants.items()}
        head = [f"const {key} = {value};" for key, value in each.items() if key != "TILE"]
        if name in ("heads", "attention"):
            head.append(f"const LEVELS = array<f32, 16>({', '.join(f'{one}.0' for one in LEVELS)});")
        if form is not None:
            table = list(TABLES.values())[max(0, form - TABLE)]
            head.append(f"const TABLE = array<u32, 16>({', '.join(f'{one & 255}u' for one in table)});")
        text = "\n".join((*head, *((SHADERS / f"{one}.wgsl").read_text() for one in parts)))
        self.name, self.layout = name, gpu.layout(KERNELS[name])
        self.key = name, *constants.items()
        try:
            with gpu.guarded():
                module = gpu.device.create_shader_module(label=name, code=gpu.altered(name, text))
                layout = gpu.device.create_pipeline_layout(bind_group_layouts=[self.layout])
                compute = {"module": module, "entry_point": "main"}
                self.pipeline = gpu.device.create_compute_pipeline(layout=layout, compute=compute)
        except EngineError as error:
            told = f"the driver of {gpu.name} cannot compile the kernel {name}: {error}; {HELP}"
            raise RequestError(told, "device") from error


class Gpu:
    def __init__(self, adapter: Any) -> None:
        info = adapter.info
        self.name = f"{info['device']} ({info['backend_type']}, {info['description']})"
        limits = _GRANTED | {name: adapter.limits[name] for name in _LIMITS}
        self.device = adapter.request_device_sync(required_limits=limits)
        self.most_bytes = min(self.device.limits[name] for name in _LIMITS)
        self.submissions = self.read_bytes = 0
        self.draws = False  # whether a row of the last step was drawn by top-k: the next one's are, too
        self.proved: dict[Any, bool] = {}  # by kernel: whether wide tiles gave the bits of single rows
        self.proving = Lock()
        self._kernels: dict[Any, Kernel] = {}
        self.nothing = self.buffer(256)

    def altered(self, name: str, text: str) -> str:  # noqa: ARG002  tests plant faults here
        return text

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raises CapacityError if memory is exhausted, WorkerError if the device is lost, else EngineError."""
        try:
            yield
        except (wgpu.GPUError, RuntimeError) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            if isinstance(error, MemoryError) or "not enough memory" in str(error).lower():  # wgpu's validation error
                told = f"the memory of {self.name} is exhausted; lower kv_memory or token_budget, give it fewer layers"
                raise CapacityError(f"{told} (gpu_layers), or {HELP}", "kv_memory", "token_budget") from error
            if "lost" in str(error).lower():
                open_gpu.cache_clear()
                raise WorkerError(f"the GPU {self.name} was lost; open the model again, or {HELP}") from error
            first = next((line for line in said if "error" in line and line != "Validation Error"), said[-1])
            raise EngineError(f"{self.name} failed: {first}") from error

    def layout(self, accesses: str) -> Any:
        """The layout of `step` and `facts`, which are read, and then `accesses`."""
        types = wgpu.BufferBindingType
        kinds = {"r": types.read_only_storage, "u": types.uniform, "w": types.storage}
        each = [{"visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kinds[one]}} for one in "ru" + accesses]
        return self.device.create_bind_group_layout(entries=[{"binding": i, **one} for i, one in enumerate(each)])

    def kernel(self, name: str, **constants: int | bool) -> Kernel:
        key = name, *constants.items()
        if key not in self._kernels:
            self._kernels[key] = Kernel(self, name, constants)
        return self._kernels[key]

    def buffer(self, nbytes: int) -> Buffer:
        """A buffer of zeros. Raises CapacityError."""
        size = max(16, -(-nbytes // 4) * 4)
        if size > self.most_bytes:
            told = f"{self.name} binds at most {binary(self.most_bytes)} to a kernel, and {binary(size)} are needed"
            raise CapacityError(f"{told}; lower token_budget or kv_memory", "token_budget", "kv_memory")
        with self.guarded():
            return self.device.create_buffer(size=size, usage=_USAGE)

    def uploaded(self, content: Array) -> Buffer:
        found = self.buffer(content.nbytes)
        self.write(found, 0, content)
        return found

    def write(self, buffer: Buffer, offset: int, content: Array) -> None:
        data = as_bytes(np.ascontiguousarray(content))
        if not len(data):  # which wgpu refuses: learned positions have no rotations
            return
        with self.guarded():
            self.device.queue.write_buffer(buffer, offset, padded(data, -(-len(data) // 4) * 4))

    def readback(self, nbytes: int) -> Buffer:
        with self.guarded():
            usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
            return self.device.create_buffer(size=max(16, nbytes), usage=usage)

    def fetched(self, buffer: Buffer, nbytes: int) -> Array:
        """The first bytes of a `readback` buffer, uint8, once the device has computed them."""
        with self.guarded():
            buffer.map_sync(mode=wgpu.MapMode.READ, offset=0, size=max(16, -(-nbytes // 8) * 8))
            found = np.frombuffer(buffer.read_mapped(copy=True), np.uint8)[:nbytes]
            buffer.unmap()
        self.read_bytes += nbytes
        return found

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> Array:
        """Bytes of any buffer, uint8. offset: a multiple of 4."""
        if not nbytes:
            return np.zeros(0, np.uint8)
        with self.guarded():
            found = self.device.queue.read_buffer(buffer, offset, -(-nbytes // 4) * 4)
        self.read_bytes += nbytes
        return np.frombuffer(found, np.uint8)[:nbytes]

    def submit(self, encoder: Any) -> None:
        with self.guarded():
            self.device.queue.submit([encoder.finish()])
        self.submissions += 1

    def group(self, kernel: Kernel, buffers: Sequence[Buffer], facts: Buffer, offset: int) -> Any:
        first, *others = ({"buffer": one, "offset": 0, "size": one.size} for one in buffers)
        each = (first, {"buffer": facts, "offset": offset, "size": FACTS}, *others)
        entries = [{"binding": i, "resource": one} for i, one in enumerate(each)]
        with self.guarded():
            return self.device.create_bind_group(layout=kernel.layout, entries=entries)


@cache
def open_gpu(index: int | None) -> Gpu:
    """The device of an adapter by number; None: the fastest. Raises RequestError if there is none."""
    silenced = os.environ.setdefault("XDG_RUNTIME_DIR", os.devnull) == os.devnull  # else Mesa writes to stderr
    try:
        if index is None:
            return Gpu(wgpu.gpu.request_adapter_sync(power_preference="high-performance"))
        there = [one for one in wgpu.gpu.enumerate_adapters_sync() if one.info["backend_type"] != "OpenGL"]
        return Gpu(there[index])
    except (wgpu.GPUError, RuntimeError, OSError, IndexError, AttributeError) as error:
        name = "gpu" if index is None else f"gpu:{index}"
        advice = f"install its Vulkan driver (on Debian mesa-vulkan-drivers), or {HELP}"
        raise RequestError(f"device {name!r}: no such GPU adapter was found; {advice}", "device") from error
    finally:
        if silenced:
            os.environ.pop("XDG_RUNTIME_DIR", None)
