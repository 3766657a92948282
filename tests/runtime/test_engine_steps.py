"""The ONNX Runtime engine's own: caches in place, and the machine it is on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from answers import PROMPTS
from driving import PARAMS, admit
from pairs import FORCED, NAMES, K, Pairs
from restaging import restage

from graphspec.bundle import open_bundle, read_manifest
from graphspec.errors import BundleError, ConfigError, EngineError
from graphspec.export.device import multiplies_uint8_by_int8_exactly, probe_model
from graphspec.runtime.engine import Chunk
from graphspec.runtime.generate import load
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine, host

pytestmark = pytest.mark.slow

WIDTHS_IN_TURN = (3, 3, 0, 2, 1, 3, 0, 0, 1, 1, 2, 3, 3, 2, 3, 3)


def opened(path: Path, *, num_slots: int = 4) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(path, host=host()), num_slots=num_slots, num_threads=1)


@pytest.fixture
def engine(pairs: Pairs) -> Iterator[OnnxRuntimeEngine]:
    made = opened(pairs.bundle(NAMES[0]))
    yield made
    made.close()


def test_what_a_step_raises_is_raised_where_it_is_read(engine: OnnxRuntimeEngine) -> None:
    admit(engine, 0, PROMPTS[3], PARAMS[0]).result()
    broken = engine.prefill(Chunk(slot=0, tokens=(1,) * (engine.capacity + 1)))
    with pytest.raises(RuntimeError):
        broken.result()
    assert admit(engine, 1, PROMPTS[3], PARAMS[0]).result().slots == (1,)


class Talkative(onnxruntime.SessionOptions):  # type: ignore[misc]
    """Session options that keep ONNX Runtime's default level, warnings and up."""

    log_severity_level = 2


@pytest.mark.parametrize("name", [NAMES[1], NAMES[6], NAMES[7]])
def test_caches_are_updated_in_place(
    pairs: Pairs, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime warns where it copies a cache instead; a step not bound in place shows that we would see it."""
    path = pairs.bundle(name)  # before: a build runs steps of its own
    monkeypatch.setattr(onnxruntime, "SessionOptions", Talkative)
    engine = opened(path)
    admit(engine, 0, PROMPTS[5], PARAMS[0])
    admit(engine, 3, PROMPTS[2], PARAMS[1])
    for slots in ((0,), (0, 3), (3,)):
        engine.step(slots, K).result()
    assert "in-place" not in capfd.readouterr().err
    session = engine._session
    session.run(None, {spec.name: zeros(spec) for spec in session.get_inputs()})
    assert "in-place optimization not activated" in capfd.readouterr().err
    engine.close()


def zeros(spec: Any) -> np.ndarray[Any, Any]:
    if spec.name in ("verify_offsets", "key_positions"):
        return np.arange(40 if spec.name == "key_positions" else 1)
    sizes = {"batch": 1, "tokens": 1, "capacity": 40}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    return np.ones(shape, np.float32 if "float" in spec.type else np.int64)


def test_a_bundle_for_cpus_with_vnni_loads_where_products_are_exact(pairs: Pairs, tmp_path: Path) -> None:
    path = for_vnni(pairs, tmp_path / "bundle", probe_model())
    if multiplies_uint8_by_int8_exactly():
        load(path).close()
    else:
        with pytest.raises(BundleError, match="was built for CPUs with VNNI"):
            load(path)


def test_a_bundle_for_cpus_with_vnni_is_refused_where_products_saturate(pairs: Pairs, tmp_path: Path) -> None:
    """A probe of other weights gives the wrong product on every machine."""
    weights = b"\x7f" * 64 * 16
    assert weights in probe_model()
    path = for_vnni(pairs, tmp_path / "bundle", probe_model().replace(weights, b"\x7e" * 64 * 16))
    with pytest.raises(BundleError, match=r"was built for CPUs with VNNI .*; rebuild it here with: graphspec build "):
        load(path)


def for_vnni(pairs: Pairs, out: Path, probe: bytes) -> Path:
    source = pairs.bundle(NAMES[0])
    backend = read_manifest(source).backend.model_dump()
    backend["device_class"] = f"{os.uname().machine}-vnni"
    return restage(source, out, {"graphs/int8_probe.onnx": probe}, backend=backend)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_class": "riscv64"}, "built for device class riscv64"),
        ({"min_version": "99.0"}, "built for onnxruntime 99.0 or newer"),
    ],
)
def test_a_bundle_for_another_machine_is_refused(
    pairs: Pairs, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    source = pairs.bundle(FORCED)
    backend = read_manifest(source).backend.model_dump() | change
    with pytest.raises(BundleError, match=said):
        load(restage(source, tmp_path / "bundle", backend=backend))


def test_a_bundle_for_a_gpu_says_what_to_install(pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pairs.bundle(FORCED)
    backend = read_manifest(source).backend.model_dump() | {"name": "tensorrt"}
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ConfigError, match=r"the bundle is for tensorrt, .*pip install 'graphspec-llm\[gpu\]'"):
        load(restage(source, tmp_path / "bundle", backend=backend))


def test_without_a_gpu_an_engine_is_refused_in_cudas_words(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pytest.importorskip("graphspec.runtime.cuda_device", reason="cuda-python is not installed")

    def refuse(_: int) -> Any:
        raise EngineError("CUDA: no CUDA-capable device is detected (cudaErrorNoDevice)")

    monkeypatch.setattr(device.CudaDevice, "__init__", refuse)
    monkeypatch.setattr("graphspec.runtime.tensorrt_library.TensorRtLibrary", lambda _: None)
    source = pairs.bundle(FORCED)
    backend = read_manifest(source).backend.model_dump() | {"name": "tensorrt-rtx"}
    with pytest.raises(ConfigError, match=r"no GPU can be used here \(CUDA: no CUDA-capable device is detected"):
        load(restage(source, tmp_path / "bundle", backend=backend))


@pytest.mark.parametrize("file", ["weights/model.safetensors", "graphs/any.onnx", "tokenizer/tokenizer.json"])
def test_a_changed_file_is_refused_before_the_backend_sees_a_byte(
    pairs: Pairs, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = restage(pairs.bundle(FORCED), tmp_path / "bundle")
    with (path / file).open("r+b") as changed:
        changed.seek(-100, os.SEEK_END)
        byte = changed.read(1)
        changed.seek(-1, os.SEEK_CUR)
        changed.write(bytes([byte[0] ^ 1]))
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(BundleError, match=rf"is damaged: {file} has sha256 "):
        load(path)
