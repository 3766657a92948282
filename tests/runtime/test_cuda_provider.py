"""A bundle for ONNX Runtime on CUDA runs there or is refused. No GPU is needed: what ONNX Runtime says is faked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from answers import PROMPTS
from pairs import NAMES, Pairs

from graphspec.building import build
from graphspec.bundle import read_manifest
from graphspec.errors import BundleError, UnsupportedError
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

NAME = NAMES[1]
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
PARAMS = [
    SamplingParams(max_new_tokens=24),
    SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_new_tokens=24, temperature=1.2, seed=5),
]


class OnCpu(onnxruntime.InferenceSession):  # type: ignore[misc]
    """Runs on the CPU, whatever it is asked for, and says so."""

    def __init__(self, model: bytes, options: Any, providers: list[str]) -> None:
        super().__init__(model, options, providers=[CPU])
        self.asked = providers


class SaysCuda(OnCpu):
    """Says that it runs where it was asked to."""

    def get_providers(self) -> list[str]:
        return [*self.asked, CPU]


@pytest.fixture
def cuda_bundle(pairs: Pairs) -> Path:
    return pairs.bundle(NAME, "float32", "cuda")


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    return monkeypatch


def test_the_manifest_says_cuda_and_claims_no_equal_bits(pairs: Pairs, cuda_bundle: Path) -> None:
    manifest = read_manifest(cuda_bundle)
    assert (manifest.backend.device_class, manifest.encoding, manifest.row_invariant) == ("cuda", "float32", None)
    assert "--device cuda" in manifest.build_command
    on_cpu = read_manifest(pairs.bundle(NAME))
    assert "--device" not in on_cpu.build_command
    assert manifest.key != on_cpu.key


def test_without_the_provider_it_says_what_to_install(cuda_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["AzureExecutionProvider", CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(BundleError) as caught:
        load(cuda_bundle)
    said = str(caught.value)
    version = onnxruntime.__version__
    assert said.startswith(f"{cuda_bundle} was built for CUDA, and onnxruntime {version} here has no {CUDA}")
    assert "onnxruntime-gpu" in said
    assert "pip install 'graphspec-llm[gpu]'" in said


def test_a_session_that_fell_back_to_the_cpu_is_refused(cuda_bundle: Path, available: pytest.MonkeyPatch) -> None:
    """As ONNX Runtime does where CUDA's libraries or driver are not there."""
    available.setattr(onnxruntime, "InferenceSession", OnCpu)
    with pytest.raises(BundleError, match=rf"built for CUDA, and ONNX Runtime fell back to {CPU}; .*onnxruntime-gpu"):
        load(cuda_bundle)


def test_its_graph_run_where_the_faked_provider_is_gives_the_same_tokens(
    pairs: Pairs, cuda_bundle: Path, available: pytest.MonkeyPatch
) -> None:
    """With this machine's memory for the GPU's."""
    expected = [answer.token_ids for answer in pairs.loaded(NAME).generate(PROMPTS[2:5], PARAMS)]
    available.setattr(onnxruntime, "InferenceSession", SaysCuda)
    available.setattr("graphspec.runtime.onnxruntime_engine.memory_of", lambda _: "cpu")
    with load(cuda_bundle, num_threads=1) as loaded:
        assert [answer.token_ids for answer in loaded.generate(PROMPTS[2:5], PARAMS)] == expected


def test_int8_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'int8' is not .* --device cuda.*MatMulIntegerToFloat.*float32"):
        build(model=tmp_path / "absent", out=tmp_path / "out", device="cuda", encoding="int8")


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        ("tensorrt", "cpu", "backend 'tensorrt' does not run on 'cpu'; use cuda"),
        ("onnxruntime", "tpu", "device 'tpu' is not known; backend onnxruntime runs on cpu or cuda"),
    ],
)
def test_a_device_that_the_backend_has_not_is_refused(tmp_path: Path, backend: str, device: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        build(model=tmp_path / "absent", out=tmp_path / "out", backend=backend, device=device)
