"""What a bundle can be built for: the backends, the encodings each computes in, and what each needs installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from graphspec.errors import ConfigError, UnsupportedError
from graphspec.manifest import Backend, Encoding

if TYPE_CHECKING:
    from graphspec.architecture import Capability

Device = Literal["cpu", "cuda"]
DEFAULT_BACKEND: Backend = "onnxruntime"
_NOT_ON_CUDA = {
    "int8": "ONNX Runtime has no kernel there for its products (MatMulIntegerToFloat)",
    "int4": "its rows become 8-bit integers only on a CPU (MatMulNBits, accuracy level 4)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """One backend."""

    name: Backend
    encodings: tuple[Encoding, ...]
    """The first is the default."""
    devices: tuple[Device, ...] = ("cuda",)
    """The first is the default."""
    module: str
    """The Python module that compiles for it."""
    distributions: tuple[str, ...]
    """The distributions that may have installed it; the version of one is part of a bundle's key."""
    extra: str
    """What to install: pip install 'graphspec-llm[build,EXTRA]'."""
    prefill_chunks: tuple[int, ...] = ()
    """Prompt tokens an engine reads at once: a short one for what is left, a long one for the rest. Empty: any."""

    capacity_multiple: int = 1
    """A row of any cache starts at an address that the library takes if its positions are a multiple of this."""

    lacks: frozenset[Capability] = frozenset()
    """Capabilities of an architecture that its bundles do not have."""

    @property
    def padding(self) -> int:
        """Positions beyond a row's own that a padded prompt chunk may write to."""
        return max(self.prefill_chunks, default=1) - 1

    @property
    def install(self) -> str:
        """The command that installs it, with the rest of what a build needs."""
        return f"pip install 'graphspec-llm[build,{self.extra}]'"


_ENGINE_ENCODINGS: tuple[Encoding, ...] = ("bfloat16", "float16", "fp8", "int8", "int4")
# Logits would leave the device at every step.
_NOT_ON_ENGINES: frozenset[Capability] = frozenset({"logprobs"})
BACKENDS: dict[Backend, BackendKind] = {
    kind.name: kind
    for kind in (
        BackendKind(
            name="onnxruntime",
            encodings=("int8", "int4", "float32"),
            devices=("cpu", "cuda"),
            module="onnxruntime",
            distributions=("onnxruntime", "onnxruntime-gpu"),
            extra="cpu",
        ),
        BackendKind(
            name="tensorrt",
            encodings=_ENGINE_ENCODINGS,
            module="tensorrt",
            distributions=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
            extra="gpu",
            prefill_chunks=(16, 128),
            capacity_multiple=64,  # of 4 bytes, the least a position takes: 256
            lacks=_NOT_ON_ENGINES,
        ),
        BackendKind(
            name="tensorrt-rtx",
            encodings=_ENGINE_ENCODINGS,
            module="tensorrt_rtx",
            distributions=("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
            extra="tensorrt-rtx",
            prefill_chunks=(16, 128),
            capacity_multiple=64,  # of 4 bytes, the least a position takes: 256
            lacks=_NOT_ON_ENGINES,
        ),
    )
}


def backend_kind(name: str) -> BackendKind:
    """The backend of that name. Raises ConfigError that lists them."""
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is not known; use {_either(tuple(BACKENDS))}")
    return BACKENDS[name]


def checked_device(device: str | None, backend: BackendKind) -> Device:
    """The device, or the backend's default. Raises UnsupportedError or ConfigError that lists what it has."""
    for known in backend.devices:
        if device in (None, known):
            return known
    if any(device in kind.devices for kind in BACKENDS.values()):
        raise UnsupportedError(f"backend '{backend.name}' does not run on '{device}'; use {_either(backend.devices)}")
    raise ConfigError(f"device {device!r} is not known; backend {backend.name} runs on {_either(backend.devices)}")


def checked_encoding(encoding: str | None, backend: BackendKind, device: Device = "cpu") -> Encoding:
    """The encoding, or the backend's default. Raises UnsupportedError or ConfigError that lists what it has."""
    known = backend.encodings
    if backend.name == "onnxruntime" and device == "cuda":
        known = ("float32",)
        if encoding in _NOT_ON_CUDA:
            raise UnsupportedError(
                f"encoding '{encoding}' is not available on backend 'onnxruntime' with --device cuda: "
                f"{_NOT_ON_CUDA[encoding]}; use float32"
            )
    if encoding is None:
        return known[0]
    if encoding in known:
        return encoding
    if any(encoding in kind.encodings for kind in BACKENDS.values()):
        raise UnsupportedError(
            f"encoding '{encoding}' is not available on backend '{backend.name}'; use {_either(known)}"
        )
    raise ConfigError(f"encoding {encoding!r} is not known; backend {backend.name} computes in {_either(known)}")


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
