"""TensorRT and TensorRT-RTX at run time. Nothing here has run on a GPU yet.

An engine is executable code: it is deserialised only after its hash, which bundle.py checks, and its header.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from graphspec.backends import BACKENDS
from graphspec.errors import BundleError, ConfigError, EngineError
from graphspec.manifest import Backend
from graphspec.tensorrt_log import collecting_logger, reason

from .device import Address, Handle

_RTX_MAGIC = b"vtrt"


class TensorRtLibrary:
    """One of the two modules; they share an interface (backends.md §3.1)."""

    def __init__(self, backend: Backend) -> None:
        """Raises ConfigError that names the extra to install."""
        kind = BACKENDS[backend]
        try:
            self._module: ModuleType = importlib.import_module(kind.module)
        except ImportError as error:
            raise ConfigError(
                f"the bundle is for {backend}, and the Python module {kind.module} is not here ({error}); "
                f"install it with: pip install 'graphspec-llm[{kind.extra}]'"
            ) from error
        self._backend = backend
        self.version = str(self._module.__version__)
        self._logger = collecting_logger(self._module)
        self._runtime: Any = None
        """Made for the first engine: without a GPU it may be an empty shell that crashes (backends.md §1)."""

    def load(self, content: bytes, file: str) -> TensorRtPlan:
        """Raises BundleError: a header of another release, or the library's own reason."""
        if self._backend == "tensorrt-rtx":
            check_rtx_header(content, file, self.version)
        if self._runtime is None:
            self._runtime = self._module.Runtime(self._logger)
        self._logger.messages.clear()
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:  # it never raises
            raise BundleError(f"{self._backend} {self.version} cannot load {file}: {reason(self._logger)}")
        return TensorRtPlan(engine, self._module, self._logger, file)


class TensorRtPlan:
    """An engine with one execution context."""

    def __init__(self, engine: Any, module: ModuleType, logger: Any, file: str) -> None:
        """`file`: of the bundle, for messages."""
        self._engine, self._logger, self._file = engine, logger, file
        strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = engine.create_execution_context(strategy)
        self.scratch = int(engine.device_memory_size_v2)
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        outputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.OUTPUT]
        aliased = {name: engine.get_aliased_input_tensor(name) for name in outputs}
        self.aliases: Mapping[str, str] = {name: source for name, source in aliased.items() if source}
        self._names = names

    def bind(self, addresses: Mapping[str, Address], scratch: Address) -> None:
        for name in self._names:
            if name not in addresses:
                raise EngineError(f"{self._file} uses {name}, which the bundle does not have; rebuild it")
            if not self._context.set_tensor_address(name, addresses[name]):  # it never raises
                raise EngineError(f"{self._file} does not take an address for {name}: {reason(self._logger)}")
        self._context.set_device_memory(scratch, self.scratch)

    def can_be_captured(self, stream: Handle) -> bool:
        """TensorRT-RTX is asked; what TensorRT launches can be (backends.md §3.4)."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(int(stream)))

    def run(self, stream: Handle) -> None:
        if not self._context.execute_async_v3(int(stream)):
            raise EngineError(f"{self._file} was not launched: {reason(self._logger)}")


def check_rtx_header(content: bytes, file: str, version: str) -> None:
    """A TensorRT-RTX engine runs on exactly the release that built it (backends.md §3.5).

    Bytes 0-3 are "vtrt", 16-23 the length, 24-27 major, minor, patch and build. Raises BundleError.
    """
    if content[:4] != _RTX_MAGIC or int.from_bytes(content[16:24], "little") != len(content):
        raise BundleError(f"{file} is not a whole TensorRT-RTX engine; copy the bundle again, or rebuild it")
    built = tuple(content[24:28])
    if built != tuple(int(part) for part in version.split(".")[:4]):
        raise BundleError(
            f"{file} was built by TensorRT-RTX {'.'.join(map(str, built))} and this is {version}; an engine runs on "
            "exactly the release that built it: install that one, or rebuild the bundle"
        )
