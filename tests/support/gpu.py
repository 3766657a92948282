"""Whether engines can be built and run on a GPU here, and why not. Imports nothing that needs one."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from graphspec.backends import BACKENDS
from graphspec.manifest import Backend


def gpu_backend() -> Backend | None:
    """TensorRT if it is installed, else TensorRT-RTX, else None."""
    names: tuple[Backend, ...] = ("tensorrt", "tensorrt-rtx")
    return next((name for name in names if importlib.util.find_spec(BACKENDS[name].module) is not None), None)


@cache
def why_no_gpu() -> str:
    """The reason, in one line; empty where there is a GPU with what it needs."""
    if gpu_backend() is None:
        return "neither tensorrt nor tensorrt_rtx is installed"
    try:
        cuda = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        return f"cuda-python is not installed ({error})"
    status, count = cuda.cudaGetDeviceCount()
    if status != cuda.cudaError_t.cudaSuccess or not count:
        return f"no NVIDIA GPU can be used ({status.name})"
    return ""
