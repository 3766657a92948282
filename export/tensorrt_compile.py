"""Compiling a lowered graph with TensorRT or TensorRT-RTX, whose Python modules share one interface.

TensorRT-RTX compiles without a GPU or a driver; TensorRT needs the GPU it compiles for (backends.md §1.1).
Neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphspec.backends import BACKENDS
from graphspec.errors import BuildError, ConfigError
from graphspec.manifest import Backend
from graphspec.tensorrt_log import collecting_logger, reason


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
        if not parser.parse(ir.to_proto(model).SerializeToString()):
            raise BuildError(f"{self.backend} cannot parse graph {name}: {_parser_errors(parser, model)}")
        config = builder.create_builder_config()
        timings = self._timing_cache()
        cache = None
        if timings is not None:
            cache = config.create_timing_cache(timings.read_bytes() if timings.exists() else b"")
            config.set_timing_cache(cache, ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{self.backend} cannot build graph {name}: {reason(logger)}")
        if timings is not None and cache is not None:
            _replace(timings, bytes(cache.serialize()))
        return bytes(plan)

    def _timing_cache(self) -> Path | None:
        """Which kernels were fastest here, kept between builds. TensorRT-RTX chooses on the target instead."""
        if self.backend != "tensorrt":
            return None
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphspec"
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
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


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
