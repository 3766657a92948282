"""A bundle's engine, on the backend that the bundle was built for."""

from __future__ import annotations

from pathlib import Path

from graphspec.bundle import Bundle, Host, open_bundle, read_manifest
from graphspec.errors import ConfigError, EngineError
from graphspec.manifest import Backend, Manifest
from graphspec.signing import Signer

from .engine import Engine


def open_engine(
    path: Path,
    *,
    num_slots: int | None = None,
    num_threads: int | None = None,
    verify: bool = True,
    signer: Signer | None = None,
) -> tuple[Bundle, Engine]:
    """Signature, hashes, backend and device are checked before a byte reaches the backend. Raises BundleError, and
    ConfigError for settings that the bundle or this machine cannot honour."""
    backend = read_manifest(path, signer=signer).backend
    if backend.name == "onnxruntime":
        return _on_onnxruntime(path, backend.device_class, num_slots, num_threads, verify, signer)
    return _on_gpu(path, backend.name, num_slots, num_threads, verify, signer)


def _on_onnxruntime(
    path: Path, device_class: str, num_slots: int | None, num_threads: int | None, verify: bool, signer: Signer | None
) -> tuple[Bundle, Engine]:
    from .cuda_provider import check_available
    from .onnxruntime_engine import OnnxRuntimeEngine, host, most_threads

    check_available(device_class, path)
    opened = open_bundle(path, verify=verify, host=host(), signer=signer)
    _check_slots(opened.manifest, num_slots)
    most = most_threads(opened.manifest)
    if num_threads is not None and not 1 <= num_threads <= most:
        raise ConfigError(
            f"{num_threads} threads: 1 to {most} are possible, the fewer of this machine's cores and the target's "
            "key/value heads; with more, a row's result would depend on the step it is in"
        )
    return opened, OnnxRuntimeEngine(opened, num_slots=num_slots, num_threads=num_threads)


def _on_gpu(
    path: Path, backend: Backend, num_slots: int | None, num_threads: int | None, verify: bool, signer: Signer | None
) -> tuple[Bundle, Engine]:
    from .tensorrt_engine import TensorRtEngine
    from .tensorrt_library import TensorRtLibrary

    if num_threads is not None:
        raise ConfigError(f"{num_threads} threads: threads are for CPUs, and the bundle is for {backend}")
    library = TensorRtLibrary(backend)
    try:
        from .cuda_device import CudaDevice
    except ImportError as error:
        raise ConfigError(
            f"the bundle is for {backend}, which needs cuda-python ({error}); install it with: pip install cuda-python"
        ) from error
    try:
        device = CudaDevice()
    except EngineError as error:
        raise ConfigError(
            f"the bundle is for {backend}, and no GPU can be used here ({error}): run it where an NVIDIA GPU and its "
            "driver are, or build for onnxruntime"
        ) from error
    classes = frozenset({"rtx" if backend == "tensorrt-rtx" else device.compute_capability})
    opened = open_bundle(
        path,
        verify=verify,
        host=Host(backend=backend, version=library.version, device_classes=classes),
        signer=signer,
    )
    _check_slots(opened.manifest, num_slots)
    try:
        return opened, TensorRtEngine(opened, library, device, num_slots=num_slots)
    except BaseException:
        device.close()  # its memory would stay taken for as long as the process lives
        raise


def _check_slots(manifest: Manifest, num_slots: int | None) -> None:
    limit = manifest.max_batch_size
    if num_slots is not None and not 1 <= num_slots <= limit:
        raise ConfigError(f"{num_slots} requests in a step: the bundle was built for 1 to {limit}")
