"""Compiling a lowered graph with TensorRT or TensorRT-RTX, whose Python modules share one interface.

TensorRT-RTX compiles without a GPU or a driver; TensorRT needs the GPU it compiles for (backends.md §1.1).
Neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphspec.backends import BACKENDS
from graphspec.errors import BuildError, ConfigError
from graphspec.manifest import Backend
from graphspec.tensorrt_log import collecting_logger, reason

_LARGEST_GRAPH = 2_000_000_000
"""Bytes of weights in one: protobuf ends at 2 GiB."""


class TensorRt:
    """One of the two libraries, imported."""

    def __init__(self, backend: Backend) -> None:
        """Raises ConfigError that names the extra to install, or says that there is no GPU to compile for."""
        kind = BACKENDS[backend]
        try:
            self._library = importlib.import_module(kind.module)
        except ImportError as error:
            raise ConfigError(
                f"--backend {backend} needs the Python module {kind.module} ({error}); install it with: {kind.install}"
            ) from error
        self.backend: Backend = backend
        self.version = str(self._library.__version__)
        self.device_class = device_class(backend)

    def compile(self, model: ir.Model, name: str) -> bytes:
        """Parses and builds a lowered graph whose sizes are all fixed.

        Raises BuildError with the parser's or builder's message, the node and the module of ours it came from.
        """
        library = self._library
        logger = collecting_logger(library)
        builder = library.Builder(logger)
        network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = library.OnnxParser(network, logger)
        if not parser.parse(_serialised(model, name)):
            raise BuildError(f"{self.backend} cannot parse graph {name}: {_parser_errors(parser, model)}")
        config = builder.create_builder_config()
        timings = self._attach_timings(config)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{self.backend} cannot build graph {name}: {reason(logger)}")
        if timings is not None:
            with suppress(OSError):  # no place to keep them is no reason to lose an engine
                _replace(self._timing_file(), bytes(timings.serialize()))
        return bytes(plan)

    def _attach_timings(self, config: Any) -> Any:
        """Which kernels were fastest here, kept between builds, if there is a file of it that TensorRT takes.
        TensorRT-RTX chooses on the target instead: None."""
        if self.backend != "tensorrt":
            return None
        contents = [b""]
        with suppress(OSError):
            contents.insert(0, self._timing_file().read_bytes())
        for content in contents:
            timings = config.create_timing_cache(content)
            if timings is not None and config.set_timing_cache(timings, ignore_mismatch=False):
                return timings
        return None

    def _timing_file(self) -> Path:
        root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "graphspec"
        return root / f"tensorrt-{self.version}-{self.device_class}.timings"


def device_class(backend: Backend) -> str:
    """What the engines run on: TensorRT compiles for the GPU at hand, TensorRT-RTX for every one it knows.

    Raises ConfigError where there is no GPU for TensorRT to compile for.
    """
    if backend == "tensorrt-rtx":
        return "rtx"
    try:
        cuda = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(
            f"--backend {backend} needs cuda-python ({error}); install it with: {BACKENDS[backend].install}"
        ) from error
    status, properties = cuda.cudaGetDeviceProperties(0)
    if status != cuda.cudaError_t.cudaSuccess:
        raise ConfigError(
            f"--backend {backend} compiles on the GPU it is for, and there is none here ({status.name}); "
            "tensorrt-rtx compiles anywhere"
        )
    return f"sm{properties.major}{properties.minor}"


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _serialised(model: ir.Model, name: str) -> bytes:
    inside = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    if inside > _LARGEST_GRAPH:
        raise BuildError(
            f"graph {name} with its weights has {inside / 1e9:.1f} GB, and an ONNX file at most 2: build without "
            "--bake-weights, or in fewer bits"
        )
    return bytes(ir.to_proto(model).SerializeToString())


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
