"""A stand-in for a GPU and for TensorRT: host memory, and ONNX Runtime to run the graphs that TensorRT would compile.

Streams are deferred: what is put on one runs only when the host waits for an event of it, so a host that reads too
early reads what was there before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from graphspec.export.tensorrt_compile import TensorRt
from graphspec.manifest import Backend

Array = NDArray[Any]
Work = Callable[[], None]
_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def _move(to: int, source: int | bytes, size: int) -> None:
    ctypes.memmove(to, source, size)


class FakeCompiler(TensorRt):
    """Its engines are the lowered graphs themselves."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.version = "1.0.0"
        self.device_class = "rtx"
        self.compiled: list[str] = []

    def compile(self, model: ir.Model, name: str) -> bytes:
        self.compiled.append(name)
        for node in model.graph:
            node.attributes.pop("TRT_decomposable", None)
        return bytes(ir.to_proto(model).SerializeToString())


class FakeLibrary:
    """Loads the engines of FakeCompiler."""

    def __init__(self, *, in_place: bool = True) -> None:
        """`in_place`: caches are updated in place, as KVCacheUpdate does; the others are not."""
        self._in_place = in_place

    def load(self, content: bytes, file: str) -> FakePlan:
        assert file.endswith(".engine")
        return FakePlan(content, self._in_place)


class FakePlan:
    """One graph in ONNX Runtime, on memory that is given to it as addresses."""

    scratch = 64

    def __init__(self, content: bytes, in_place: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        scattered = {
            node.output[0]: node.input[0]
            for node in onnx.load_from_string(content).graph.node
            if node.op_type == "TensorScatter"
        }
        outputs = [value.name for value in self._session.get_outputs()]
        self.aliases: dict[str, str] = {name: scattered[name] for name in outputs if in_place and name in scattered}
        self._addresses: dict[str, int] = {}

    def bind(self, addresses: Mapping[str, int], scratch: int) -> None:
        assert scratch % 64 == 0
        self._addresses = dict(addresses)
        for output, source in self.aliases.items():
            assert addresses[output] == addresses[source], f"{output} is updated in place"

    def run(self, stream: FakeStream) -> None:
        addresses = dict(self._addresses)  # a later bind does not change what was launched

        def work() -> None:
            feeds = {value.name: self._view(value, addresses).copy() for value in self._session.get_inputs()}
            for value, found in zip(self._session.get_outputs(), self._session.run(None, feeds), strict=True):
                self._view(value, addresses)[...] = found

        stream.put(work)

    @staticmethod
    def _view(value: Any, addresses: Mapping[str, int]) -> Array:
        dtype = np.dtype(_TYPES[value.type])
        size = int(np.prod(value.shape)) * dtype.itemsize
        memory: Any = (ctypes.c_byte * size).from_address(addresses[value.name])
        view: Array = np.frombuffer(memory, dtype).reshape(value.shape)
        return view


class FakeStream:
    """Work in order, done when somebody waits for it."""

    def __init__(self) -> None:
        self._queue: list[Work] = []
        self.capturing: list[Work] | None = None

    def put(self, work: Work) -> None:
        (self._queue if self.capturing is None else self.capturing).append(work)

    def drain(self) -> None:
        while self._queue:
            self._queue.pop(0)()


class FakeEvent:
    """The work that has to be done for it."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None


class FakeDevice:
    """Host memory in place of a GPU's."""

    def __init__(self) -> None:
        self._memory: list[Array] = []
        self.launched = 0
        self.captured = 0
        self.closed = False

    def allocate(self, size: int) -> int:
        block = np.zeros(size + 64, np.uint8)
        self._memory.append(block)
        return int(block.ctypes.data + -block.ctypes.data % 64)

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.full(shape, -99, dtype)

    def stream(self) -> FakeStream:
        return FakeStream()

    def event(self) -> FakeEvent:
        return FakeEvent()

    def upload(self, to: int, array: Array, stream: FakeStream) -> None:
        assert stream.capturing is None, "a captured upload would repeat what the host held then"
        content = np.ascontiguousarray(array).tobytes()
        stream.put(partial(_move, to, content, len(content)))

    def copy(self, to: int, source: int, size: int, stream: FakeStream) -> None:
        stream.put(partial(_move, to, source, size))

    def download(self, to: Array, source: int, stream: FakeStream) -> None:
        stream.put(partial(_move, to.ctypes.data, source, to.nbytes))

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        event.stream = stream

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        source = event.stream
        assert source is not None, "a wait for an event that was never recorded waits for nothing"
        stream.put(source.drain)

    def synchronise(self, event: FakeEvent) -> None:
        assert event.stream is not None
        event.stream.drain()

    def capture(self, stream: FakeStream, work: Work) -> Work:
        stream.drain()
        stream.capturing = []
        work()
        recorded, stream.capturing = stream.capturing, None
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            for item in recorded:
                stream.put(item)

        return launch

    def close(self) -> None:
        self.closed = True
