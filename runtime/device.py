"""What the TensorRT engine needs of a GPU, and nothing more: cuda_device.py has it from the CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

Address = int
"""Of device memory."""
ALIGNMENT = 256
"""Of the addresses that TensorRT takes, in bytes (NvInferRuntime.h, setTensorAddress)."""
Handle = Any
"""A stream or an event of the device's library."""


class Device(Protocol):
    """Memory, streams and captured work of one GPU. Work of one stream is carried out in order."""

    def allocate(self, size: int) -> Address:
        """`size` bytes of zeros from a multiple of ALIGNMENT on, freed by `close`. Raises EngineError."""
        ...

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array that downloads fill while the host goes on (page-locked), freed by `close`."""
        ...

    def stream(self) -> Handle: ...

    def event(self) -> Handle: ...

    def upload(self, to: Address, array: NDArray[Any], stream: Handle) -> None:
        """The array may be changed as soon as this returns."""
        ...

    def copy(self, to: Address, source: Address, size: int, stream: Handle) -> None: ...

    def download(self, to: NDArray[Any], source: Address, stream: Handle) -> None:
        """Fills a `host_array`, once the stream gets there."""
        ...

    def record(self, event: Handle, stream: Handle) -> None: ...

    def wait(self, stream: Handle, event: Handle) -> None:
        """What is put on the stream from now on starts after the event."""
        ...

    def synchronise(self, event: Handle) -> None:
        """The host waits."""
        ...

    def capture(self, stream: Handle, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` puts on the stream as one graph → what launches it there."""
        ...

    def close(self) -> None:
        """Waits for what was launched; what was allocated is gone, and so are streams, events and captured work."""
        ...


class Plan(Protocol):
    """A deserialised engine."""

    @property
    def scratch(self) -> int:
        """Bytes of working memory; engines that run one after another can share it."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Outputs that are written to the memory of an input."""
        ...

    def bind(self, addresses: Mapping[str, Address], scratch: Address) -> None:
        """Where inputs and outputs lie, by name. Raises EngineError for an address that is missing or not taken."""
        ...

    def can_be_captured(self, stream: Handle) -> bool:
        """Whether `run` may be recorded once and launched again."""
        ...

    def run(self, stream: Handle) -> None:
        """Raises EngineError."""
        ...


class Library(Protocol):
    """TensorRT, TensorRT-RTX, or a test's stand-in."""

    def load(self, content: bytes, file: str) -> Plan:
        """Raises BundleError with the library's own reason."""
        ...
