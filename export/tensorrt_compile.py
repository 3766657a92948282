"""Compiling a lowered graph with TensorRT or TensorRT-RTX, whose Python modules share one interface.

TensorRT-RTX compiles without a GPU or a driver; TensorRT needs the GPU it compiles for (backends.md §1.1).
Neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from graphspec.errors import BuildError, ConfigError

TensorRtBackend = Literal["tensorrt", "tensorrt-rtx"]
_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_EXTRAS = {"tensorrt": "gpu", "tensorrt-rtx": "tensorrt-rtx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A compiled graph."""

    plan: bytes
    seconds: float


class TensorRt:
    """One of the two libraries, imported."""

    def __init__(self, backend: TensorRtBackend) -> None:
        """Raises ConfigError that names the extra to install."""
        try:
            self._library = importlib.import_module(_MODULES[backend])
        except ImportError as error:
            raise ConfigError(
                f"--backend {backend} needs the Python package of that name ({error}); "
                f"install it with: pip install 'graphspec-llm[{_EXTRAS[backend]}]'"
            ) from error
        self.backend = backend
        self.version = str(self._library.__version__)

    @property
    def device_class(self) -> str:
        """What the engines run on: TensorRT compiles for the GPU at hand, TensorRT-RTX for every one it knows."""
        if self.backend == "tensorrt-rtx":
            return "rtx"
        from cuda.bindings import runtime as cuda

        status, properties = cuda.cudaGetDeviceProperties(0)
        if status != cuda.cudaError_t.cudaSuccess:
            raise ConfigError(
                f"--backend tensorrt compiles on the GPU it is for, and there is none here ({status.name})"
            )
        return f"sm{properties.major}{properties.minor}"

    def compile(self, model: ir.Model, name: str) -> Engine:
        """Parses and builds a lowered graph whose sizes are all fixed.

        Raises BuildError with the parser's or builder's message, the node and the module of ours it came from.
        """
        library = self._library
        logger = _collecting_logger(library)
        start = time.perf_counter()
        builder = library.Builder(logger)
        network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = library.OnnxParser(network, logger)
        if not parser.parse(ir.to_proto(model).SerializeToString()):
            raise BuildError(f"{self.backend} cannot parse graph {name}: {_parser_errors(parser, model)}")
        plan = builder.build_serialized_network(network, builder.create_builder_config())
        if plan is None:
            raise BuildError(f"{self.backend} cannot build graph {name}: {_last(logger.messages)}")
        return Engine(plan=bytes(plan), seconds=time.perf_counter() - start)


def _collecting_logger(library: Any) -> Any:
    """A logger of the library's own kind that keeps errors: build_serialized_network returns None, never raises."""

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                self.messages.append(" ".join(message.split()))

    return Logger()


def _parser_errors(parser: Any, model: ir.Model) -> str:
    scopes = {str(node.name): _scope(node) for node in model.graph}
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = scopes.get(error.node_name())
        found.append(f"{error.desc()} (node {error.node_name()}{f' of {where}' if where else ''})")
    return "; ".join(found) or "no reason was given"


def _scope(node: ir.Node) -> str | None:
    """The torch module a node was traced from, as torch.onnx records it: a list of names, innermost last."""
    names = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return names.strip("[]").replace("'", "").split(", ")[-2] if names and ", " in names else None


def _last(messages: Sequence[str]) -> str:
    return messages[-1] if messages else "no reason was given"
