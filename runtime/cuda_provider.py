"""ONNX Runtime's CUDA provider: a bundle for it runs on it or is refused; never on a CPU in its place.

Not run on a GPU yet. ONNX Runtime itself places single operators that have no CUDA kernel, and sizes, on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

from graphspec.errors import BundleError

CUDA = "cuda"
"""The device class of bundles built with --device cuda."""
_PROVIDER = "CUDAExecutionProvider"
_INSTALL = (
    "it needs an NVIDIA GPU, CUDA and cuDNN, and the package onnxruntime-gpu in the place of onnxruntime (pip "
    "uninstall onnxruntime, then pip install 'graphspec-llm[gpu]'); or build it with --device cpu"
)


def provider_of(device_class: str) -> str:
    """ONNX Runtime's name of what runs bundles of that class."""
    return _PROVIDER if device_class == CUDA else "CPUExecutionProvider"


def memory_of(device_class: str) -> str:
    """ONNX Runtime's name of the memory that states lie in."""
    return "cuda" if device_class == CUDA else "cpu"


def is_available() -> bool:
    """Whether the ONNX Runtime that is installed was built with the provider; a session tells whether it works."""
    return _PROVIDER in onnxruntime.get_available_providers()


def check_available(device_class: str, name: Path) -> None:
    """Raises BundleError for a bundle that this ONNX Runtime has no provider for."""
    if device_class == CUDA and not is_available():
        raise BundleError(
            f"{name} was built for CUDA, and onnxruntime {onnxruntime.__version__} here has no {_PROVIDER} (it has "
            f"{', '.join(onnxruntime.get_available_providers())}): {_INSTALL}"
        )


def check_used(session: Any, device_class: str, name: Path) -> None:
    """Raises BundleError if ONNX Runtime took another provider first, which it does where CUDA does not load."""
    used = session.get_providers()
    if used[:1] != [provider_of(device_class)]:
        raise BundleError(
            f"{name} was built for {'CUDA' if device_class == CUDA else 'CPUs'}, and ONNX Runtime fell back to "
            f"{', '.join(used) or 'nothing'}; it says why on stderr: {_INSTALL}"
        )
