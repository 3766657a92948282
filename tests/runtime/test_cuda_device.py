"""cuda_device.py on a stand-in for the CUDA runtime whose streams run as late as they may; no GPU is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graphspec.errors import EngineError

cuda_device = pytest.importorskip("graphspec.runtime.cuda_device", reason="cuda-python is not installed")
REAL = cuda_device.cuda
OK = REAL.cudaError_t.cudaSuccess
DEFAULT_STREAM = 0


class LateCuda:
    """Host memory for a GPU's. A stream's work is done when the host waits for it: the default stream's last of all,
    as it may be, since streams that do not block take no notice of it."""

    def __init__(self) -> None:
        self.late: dict[int, list[Callable[[], object]]] = {DEFAULT_STREAM: []}
        self.alive: dict[int, Any] = {}
        self.full = False
        self._next = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def _made(self, thing: Any) -> tuple[Any, int]:
        handle, self._next = self._next, self._next + 1
        self.alive[handle] = thing
        return OK, handle

    def _gone(self, handle: int) -> tuple[Any]:
        del self.alive[handle]  # a second time is a KeyError
        return (OK,)

    def cudaSetDevice(self, _: int) -> tuple[Any]:  # noqa: N802
        return (OK,)

    def cudaGetDeviceProperties(self, _: int) -> tuple[Any, Any]:  # noqa: N802
        return OK, SimpleNamespace(major=9, minor=0)

    def cudaMalloc(self, size: int) -> tuple[Any, int | None]:  # noqa: N802
        if self.full:
            return REAL.cudaError_t.cudaErrorMemoryAllocation, None
        block = np.full(size, 0xCD, np.uint8)
        address = int(block.ctypes.data)
        self.alive[address] = block
        return OK, address

    cudaMallocHost = cudaMalloc  # noqa: N815
    cudaFree = cudaFreeHost = cudaStreamDestroy = cudaEventDestroy = cudaGraphExecDestroy = cudaGraphDestroy = _gone  # noqa: N815

    def cudaMemset(self, address: int, value: int, size: int) -> tuple[Any]:  # noqa: N802
        self.late[DEFAULT_STREAM].append(lambda: ctypes.memset(address, value, size))
        return (OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, int]:  # noqa: N802
        assert flags == REAL.cudaStreamNonBlocking
        status, handle = self._made("stream")
        self.late[handle] = []
        return status, handle

    def cudaEventCreateWithFlags(self, _: int) -> tuple[Any, int]:  # noqa: N802
        return self._made("event")

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: Any, stream: int) -> tuple[Any]:  # noqa: N802
        content = ctypes.string_at(source, size) if kind == REAL.cudaMemcpyKind.cudaMemcpyHostToDevice else None
        self.late[stream].append(lambda: ctypes.memmove(to, content or source, size))
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any]:  # noqa: N802
        while self.late[stream]:
            self.late[stream].pop(0)()
        return (OK,)

    def cudaDeviceSynchronize(self) -> tuple[Any]:  # noqa: N802
        for stream in sorted(self.late, reverse=True):
            self.cudaStreamSynchronize(stream)
        return (OK,)

    def cudaStreamBeginCapture(self, _: int, mode: Any) -> tuple[Any]:  # noqa: N802
        assert mode == REAL.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        return (OK,)

    def cudaStreamEndCapture(self, _: int) -> tuple[Any, int]:  # noqa: N802
        return self._made("graph")

    def cudaGraphInstantiate(self, _: int, flags: int) -> tuple[Any, int]:  # noqa: N802
        assert flags == 0
        return self._made("executable")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    late = LateCuda()
    monkeypatch.setattr(cuda_device, "cuda", late)
    return late


def test_the_zeros_of_an_allocation_never_come_after_what_is_uploaded_to_it(cuda: LateCuda) -> None:
    device = cuda_device.CudaDevice()
    stream = device.stream()
    address = device.allocate(16)
    assert ctypes.string_at(address, 16) == bytes(16)
    device.upload(address, np.arange(16, dtype=np.uint8), stream)
    cuda.cudaDeviceSynchronize()
    assert ctypes.string_at(address, 16) == bytes(range(16))


def test_closing_waits_and_then_frees_all_that_was_made_once(cuda: LateCuda) -> None:
    device = cuda_device.CudaDevice()
    stream = device.stream()
    device.event()
    source, host = device.allocate(8), device.host_array((1,), np.int64)
    device.upload(source, np.array([7]), stream)
    device.download(host, source, stream)
    device.capture(stream, lambda: None)
    kept = cuda.alive[host.ctypes.data]
    device.close()
    assert kept.view(np.int64)[0] == 7
    assert cuda.alive == {}
    device.close()


def test_a_failed_capture_is_ended(cuda: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[int]()

    def end(stream: int) -> tuple[Any, int]:
        ended.append(stream)
        return OK, 0

    monkeypatch.setattr(cuda, "cudaStreamEndCapture", end)
    device = cuda_device.CudaDevice()

    def fail() -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match=r"^no$"):
        device.capture(5, fail)
    assert ended == [5]


def test_a_full_gpu_says_what_to_do(cuda: LateCuda) -> None:
    cuda.full = True
    with pytest.raises(EngineError, match=r"the GPU has no 3 MB left for the bundle: .*--max-batch-size"):
        cuda_device.CudaDevice().allocate(3_000_000)


@pytest.mark.skipif(REAL.cudaGetDeviceCount()[0] == OK, reason="there is a GPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.allocate(8),
        lambda device: device.host_array((2,), np.int64),
        lambda device: device.upload(256, np.zeros(2), 0),
        lambda device: device.copy(256, 512, 8, 0),
        lambda device: device.download(np.zeros(2), 256, 0),
        lambda device: device.stream(),
        lambda device: device.event(),
        lambda device: device.capture(0, lambda: None),
    ],
)
def test_every_call_is_one_that_cuda_python_takes(call: Callable[[Any], object]) -> None:
    """Where there is no driver each of them gets as far as CUDA's own refusal."""
    device = object.__new__(cuda_device.CudaDevice)
    device._owned = []
    with pytest.raises(EngineError, match=r"CUDA: .*\(cudaErrorInsufficientDriver\)"):
        call(device)
