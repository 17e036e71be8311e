"""A page's WebGPU behind as much of wgpu's interface as `backends/wgpu` uses.

What the browser promises is waited for in place, which needs JavaScript Promise Integration: only code that was called
by `callPromising` may wait.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import js
from pyodide.ffi import JsException, JsProxy, create_proxy, run_sync, to_js

__version__ = "of a page"

BufferUsage = SimpleNamespace(MAP_READ=1, COPY_SRC=4, COPY_DST=8, UNIFORM=64, STORAGE=128)
MapMode = SimpleNamespace(READ=1)
ShaderStage = SimpleNamespace(COMPUTE=4)
BufferBindingType = SimpleNamespace(uniform="uniform", storage="storage", read_only_storage="read-only-storage")


class GPUError(Exception):
    """What the browser says of a call."""


class GPUOutOfMemoryError(GPUError):
    """The memory of the device is exhausted."""


_ERRORS = {"validation": GPUError, "internal": GPUError, "out-of-memory": GPUOutOfMemoryError}


def _camel(name: str) -> str:
    first, *others = name.replace("-", "_").split("_")
    return first + "".join(one.title() for one in others)


def _given(value: Any) -> Any:
    """A descriptor as the browser reads it: names in its case, handles instead of what holds them."""
    if isinstance(value, Mapping):
        return js.Object.fromEntries(
            to_js([[_camel(key), _given(one)] for key, one in value.items() if one is not None])
        )
    if isinstance(value, list | tuple):
        return to_js([_given(one) for one in value])
    return getattr(value, "handle", value)


class _Handle:
    def __init__(self, handle: JsProxy) -> None:
        self.handle = handle


class GPUBuffer(_Handle):
    def __init__(self, handle: JsProxy, device: "GPUDevice") -> None:
        super().__init__(handle)
        self._device = device
        self.size: int = handle.size

    def __del__(self) -> None:
        self.handle.destroy()

    def map_sync(self, *, mode: int, offset: int, size: int) -> None:
        try:
            _wait(self.handle.mapAsync(mode, offset, size))
        except GPUError as error:  # browsers word a loss differently
            raise GPUError(self._device.lost or str(error)) from error
        self._mapped = offset, size

    def read_mapped(self, *, copy: bool) -> bytes:  # noqa: ARG002  a view would be JavaScript's
        offset, size = self._mapped
        found: bytes = js.Uint8Array.new(self.handle.getMappedRange(offset, size)).to_bytes()
        return found

    def unmap(self) -> None:
        self.handle.unmap()


class GPUComputePass(_Handle):
    def set_pipeline(self, pipeline: _Handle) -> None:
        self.handle.setPipeline(pipeline.handle)

    def set_bind_group(self, index: int, group: _Handle) -> None:
        self.handle.setBindGroup(index, group.handle)

    def dispatch_workgroups(self, x: int, y: int, z: int) -> None:
        self.handle.dispatchWorkgroups(x, y, z)

    def end(self) -> None:
        self.handle.end()


class GPUCommandEncoder(_Handle):
    def begin_compute_pass(self) -> GPUComputePass:
        return GPUComputePass(self.handle.beginComputePass())

    def copy_buffer_to_buffer(self, source: GPUBuffer, first: int, target: GPUBuffer, to: int, size: int) -> None:
        self.handle.copyBufferToBuffer(source.handle, first, target.handle, to, size)

    def finish(self) -> _Handle:
        return _Handle(self.handle.finish())


class GPUQueue(_Handle):
    def __init__(self, device: "GPUDevice") -> None:
        super().__init__(device.handle.queue)
        self._device = device

    def write_buffer(self, buffer: GPUBuffer, offset: int, data: Any) -> None:
        self.handle.writeBuffer(buffer.handle, offset, to_js(memoryview(data)))

    def read_buffer(self, buffer: GPUBuffer, offset: int, size: int) -> bytes:
        between = self._device.create_buffer(size=size, usage=BufferUsage.MAP_READ | BufferUsage.COPY_DST)
        encoder = self._device.create_command_encoder()
        encoder.copy_buffer_to_buffer(buffer, offset, between, 0, size)
        self.submit([encoder.finish()])
        between.map_sync(mode=MapMode.READ, offset=0, size=size)
        return between.read_mapped(copy=True)

    def submit(self, buffers: Sequence[_Handle]) -> None:
        self.handle.submit(_given(buffers))


class GPUDevice(_Handle):
    def __init__(self, handle: JsProxy) -> None:
        super().__init__(handle)
        self.limits = _Limits(handle.limits)
        self.lost = ""
        self._hear = create_proxy(self._say)
        handle.lost.then(self._hear)

    def _say(self, told: JsProxy) -> None:
        self.lost = f"the device is lost: {told.message or told.reason}"

    @cached_property
    def queue(self) -> GPUQueue:
        return GPUQueue(self)

    def _made(self, how: str, filters: Sequence[str], **given: Any) -> JsProxy:
        """What a method of the device makes. Raises GPUError for what the browser says of it."""
        for one in filters:
            self.handle.pushErrorScope(one)
        made = getattr(self.handle, how)(_given(given))
        said = [(one, _wait(self.handle.popErrorScope())) for one in reversed(filters)]
        for kind, error in said:
            if error is not None:
                raise _ERRORS[kind](f"error: {error.message}")
        if self.lost:
            raise GPUError(self.lost)
        return made

    def create_buffer(self, **given: Any) -> GPUBuffer:
        return GPUBuffer(self._made("createBuffer", ("validation", "out-of-memory"), **given), self)

    def create_shader_module(self, **given: Any) -> _Handle:
        return _Handle(self._made("createShaderModule", ("validation",), **given))

    def create_compute_pipeline(self, **given: Any) -> _Handle:
        return _Handle(self._made("createComputePipeline", ("validation", "internal"), **given))

    def create_pipeline_layout(self, **given: Any) -> _Handle:
        return _Handle(self._made("createPipelineLayout", (), **given))

    def create_bind_group_layout(self, **given: Any) -> _Handle:
        return _Handle(self._made("createBindGroupLayout", ("validation",), **given))

    def create_bind_group(self, **given: Any) -> _Handle:
        return _Handle(self._made("createBindGroup", (), **given))

    def create_command_encoder(self) -> GPUCommandEncoder:
        return GPUCommandEncoder(self.handle.createCommandEncoder())

    def destroy(self) -> None:
        self.handle.destroy()


class _Limits:
    """By the names with hyphens that wgpu has."""

    def __init__(self, handle: JsProxy) -> None:
        self._handle = handle

    def __getitem__(self, name: str) -> int:
        found: int = getattr(self._handle, _camel(name))
        return found


class GPUAdapter(_Handle):
    def __init__(self, handle: JsProxy) -> None:
        super().__init__(handle)
        told = handle.info
        device = told.description or " ".join(filter(None, (told.vendor, told.architecture))) or "a GPU"
        self.info = {"device": device, "backend_type": "WebGPU", "description": "this browser"}
        self.limits = _Limits(handle.limits)

    def request_device_sync(self, *, required_limits: Mapping[str, int]) -> GPUDevice:
        return GPUDevice(_wait(self.handle.requestDevice(_given({"required_limits": required_limits}))))


class _Gpu:
    def request_adapter_sync(self, *, power_preference: str) -> GPUAdapter:
        there = getattr(js.navigator, "gpu", None)
        found = None if there is None else _wait(there.requestAdapter(_given({"power_preference": power_preference})))
        if found is None:
            raise GPUError("this browser has no WebGPU here")
        return GPUAdapter(found)


gpu = _Gpu()


def _wait(promise: JsProxy) -> Any:
    try:
        return run_sync(promise)
    except JsException as error:
        raise GPUError(str(error)) from error
