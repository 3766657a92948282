"""A GPU through cuda-python. Not run on a GPU yet: there was none where this was written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import runtime as cuda
from numpy.typing import NDArray

from graphspec.errors import EngineError

from .device import Address, Handle

_TO_DEVICE = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
_TO_HOST = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
_ON_DEVICE = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice


class CudaDevice:
    """One GPU, by its number."""

    def __init__(self, number: int = 0) -> None:
        """Raises EngineError where there is no such GPU."""
        _checked(cuda.cudaSetDevice(number))
        properties = _checked(cuda.cudaGetDeviceProperties(number))
        self.compute_capability = f"sm{properties.major}{properties.minor}"
        self._owned: list[tuple[Callable[[Any], object], Any]] = []
        """What frees each thing that was made, in order."""

    def allocate(self, size: int) -> Address:
        status, address = cuda.cudaMalloc(max(size, 1))
        if status == cuda.cudaError_t.cudaErrorMemoryAllocation:
            raise EngineError(
                f"the GPU has no {size / 1e6:,.0f} MB left for the bundle: end what else uses it, load with a smaller "
                "--max-batch-size, or build with a smaller --max-length"
            )
        _checked((status,))
        self._own(cuda.cudaFree, int(address))
        _checked(cuda.cudaMemset(address, 0, max(size, 1)))
        # It runs on the default stream, which ours do not wait for: it could come after a first upload.
        _checked(cuda.cudaStreamSynchronize(0))
        return int(address)

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(_checked(cuda.cudaMallocHost(size)))
        self._own(cuda.cudaFreeHost, address)
        memory = (ctypes.c_byte * size).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def stream(self) -> Handle:
        # Non-blocking: the legacy default stream would order both of ours.
        return self._own(cuda.cudaStreamDestroy, _checked(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking)))

    def event(self) -> Handle:
        return self._own(cuda.cudaEventDestroy, _checked(cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming)))

    def upload(self, to: Address, array: NDArray[Any], stream: Handle) -> None:
        # From pageable memory the call returns once the array has been read.
        source = np.ascontiguousarray(array)
        _checked(cuda.cudaMemcpyAsync(to, source.ctypes.data, source.nbytes, _TO_DEVICE, stream))

    def copy(self, to: Address, source: Address, size: int, stream: Handle) -> None:
        _checked(cuda.cudaMemcpyAsync(to, source, size, _ON_DEVICE, stream))

    def download(self, to: NDArray[Any], source: Address, stream: Handle) -> None:
        _checked(cuda.cudaMemcpyAsync(to.ctypes.data, source, to.nbytes, _TO_HOST, stream))

    def record(self, event: Handle, stream: Handle) -> None:
        _checked(cuda.cudaEventRecord(event, stream))

    def wait(self, stream: Handle, event: Handle) -> None:
        _checked(cuda.cudaStreamWaitEvent(stream, event, 0))

    def synchronise(self, event: Handle) -> None:
        _checked(cuda.cudaEventSynchronize(event))

    def capture(self, stream: Handle, work: Callable[[], None]) -> Callable[[], None]:
        _checked(cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        try:
            work()
        finally:
            # Ends it also when the work failed: a stream left capturing takes nothing else.
            ended = cuda.cudaStreamEndCapture(stream)
        graph = _checked(ended)
        executable = self._own(cuda.cudaGraphExecDestroy, _checked(cuda.cudaGraphInstantiate(graph, 0)))
        cuda.cudaGraphDestroy(graph)
        return lambda: _checked(cuda.cudaGraphLaunch(executable, stream))

    def close(self) -> None:
        cuda.cudaDeviceSynchronize()
        while self._owned:
            free, thing = self._owned.pop()
            free(thing)

    def _own(self, free: Callable[[Any], object], thing: Any) -> Any:
        self._owned.append((free, thing))
        return thing


def _checked(answer: tuple[Any, ...]) -> Any:
    """A call's result. Raises EngineError with CUDA's own words."""
    status, *results = answer
    if status != cuda.cudaError_t.cudaSuccess:
        _, name = cuda.cudaGetErrorName(status)
        _, text = cuda.cudaGetErrorString(status)
        raise EngineError(f"CUDA: {_text(text)} ({_text(name)})")
    return results[0] if results else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
