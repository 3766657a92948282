"""A stand-in for a GPU and for TensorRT: host memory, and ONNX Runtime to run the graphs that TensorRT would compile.

Streams are as late as a GPU's may be: what is put on one runs only when the host, or another stream that is asked to
run, waits for an event recorded after it. A host that reads too early reads what was there before.
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
from graphspec.runtime.device import ALIGNMENT

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
    capturable = True

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
        read = {value.name for value in (*self._session.get_inputs(), *self._session.get_outputs())}
        assert scratch % ALIGNMENT == 0
        assert not [name for name in read if addresses[name] % ALIGNMENT], "TensorRT takes no such address"
        self._addresses = {name: addresses[name] for name in read}
        for output, source in self.aliases.items():
            assert addresses[output] == addresses[source], f"{output} is updated in place"

    def can_be_captured(self, stream: FakeStream) -> bool:  # noqa: ARG002
        return self.capturable

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
    """Work in order, done when somebody waits for it, and no more of it than that."""

    def __init__(self) -> None:
        self._queue: list[Work] = []
        self.capturing: list[Work] | None = None
        self.put_so_far = 0
        self._done = 0

    def put(self, work: Work) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
            return
        self._queue.append(work)
        self.put_so_far += 1

    def run_to(self, mark: int) -> None:
        while self._done < mark:
            self._done += 1
            self._queue.pop(0)()


class FakeEvent:
    """The work that has to be done for it: what its stream had been given when it was last recorded."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.mark = 0


class FakeDevice:
    """Host memory in place of a GPU's."""

    def __init__(self) -> None:
        self._memory: list[Array] = []
        self._host: list[Array] = []
        self._streams: list[FakeStream] = []
        self.launched = 0
        self.captured = 0
        self.closed = False

    def allocate(self, size: int) -> int:
        block = np.zeros(size + ALIGNMENT, np.uint8)
        self._memory.append(block)
        return int(block.ctypes.data + -block.ctypes.data % ALIGNMENT)

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._host.append(np.full(shape, -99, dtype))
        return self._host[-1]

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream())
        return self._streams[-1]

    def event(self) -> FakeEvent:
        return FakeEvent()

    def upload(self, to: int, array: Array, stream: FakeStream) -> None:
        assert stream.capturing is None, "a captured upload would repeat what the host held then"
        content = np.ascontiguousarray(array).tobytes()
        stream.put(partial(_move, to, content, len(content)))

    def copy(self, to: int, source: int, size: int, stream: FakeStream) -> None:
        stream.put(partial(_move, to, source, size))

    def download(self, to: Array, source: int, stream: FakeStream) -> None:
        assert any(np.may_share_memory(to, known) for known in self._host), "only page-locked memory is filled late"
        stream.put(partial(_move, to.ctypes.data, source, to.nbytes))

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        assert stream.capturing is None
        event.stream, event.mark = stream, stream.put_so_far

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        source = event.stream
        assert source is not None, "a wait for an event that was never recorded waits for nothing"
        stream.put(partial(source.run_to, event.mark))

    def synchronise(self, event: FakeEvent) -> None:
        assert event.stream is not None
        assert not self.closed, "an event that is gone"
        event.stream.run_to(event.mark)

    def capture(self, stream: FakeStream, work: Work) -> Work:
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
        for stream in self._streams:
            stream.run_to(stream.put_so_far)
        for block in (*self._memory, *self._host):
            block.view(np.uint8).fill(0xAB)
        self.closed = True
