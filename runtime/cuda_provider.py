"""ONNX Runtime's CUDA provider: a bundle for it runs on it or is refused; never on a CPU in its place.

Not run on a GPU yet. ONNX Runtime itself places single operators that have no CUDA kernel, and sizes, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphspec.errors import BundleError
from graphspec.manifest import Manifest

from .caches import Bound, Placed, lengths_of, zeros

CUDA = "cuda"
"""The device class of bundles built with --device cuda."""
_PROVIDER = "CUDAExecutionProvider"
_VISIBLE_STEP = 32
"""Visible positions are rounded up to a multiple: fewer distinct shapes for the memory planner."""
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


class CudaCaches:
    """States of full capacity in the memory of a GPU, where they stay; the graph looks at the part that is needed."""

    def __init__(self, manifest: Manifest, num_slots: int, memory: str) -> None:
        self._capacity = manifest.capacity
        self._states = [
            (state, onnxruntime.OrtValue.ortvalue_from_numpy(zeros(state, num_slots, manifest.capacity), memory, 0))
            for state in manifest.states
        ]

    def place(self, slots: Sequence[int], held: NDArray[np.int64], ahead: int, *, alone: bool) -> Placed:  # noqa: ARG002
        """The range of slots that holds the rows."""
        computed = range(min(slots), max(slots) + 1)
        lengths = lengths_of(computed, slots, held, self._capacity - ahead)
        visible = min(-(-(int(lengths.max()) + ahead) // _VISIBLE_STEP) * _VISIBLE_STEP, self._capacity)
        return Placed(
            slots=computed,
            lengths=lengths,
            visible=visible,
            memory=(CUDA, 0),
            states=lambda: tuple(self._bound(computed)),
        )

    def copy(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError  # the engine says that it has no places

    def _bound(self, slots: range) -> list[Bound]:
        bound = []
        for state, memory in self._states:
            row = zeros(state, 1, self._capacity)
            bound.append(
                Bound(
                    input=state.input,
                    output=state.output,
                    dtype=row.dtype.type,
                    shape=(len(slots), *row.shape[1:]),
                    address=memory.data_ptr() + slots.start * row.nbytes,
                )
            )
        return bound
