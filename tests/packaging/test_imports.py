"""A server needs no build library: a fresh interpreter serves a bundle without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import NAMES, Pairs

ROOT = Path(__file__).parents[2]
RUNTIME = sorted(
    ".".join(("graphspec", *path.relative_to(ROOT).with_suffix("").parts))
    for path in (ROOT / "runtime").rglob("*.py")
    if path.stem[0] != "_" and (path.stem != "cuda_device" or importlib.util.find_spec("cuda") is not None)
)
BUILD_LIBRARIES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "gguf", "huggingface_hub")

SERVE = """
import importlib, json, sys
path, names = sys.argv[1], json.loads(sys.argv[2])
for name in names:
    importlib.import_module(name)
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams
with load(path, num_threads=1) as bundle:
    greedy, drawn = bundle.generate([[5, 6, 7], "abc"], SamplingParams(max_new_tokens=8, temperature=0.7, seed=1))
assert len(greedy.token_ids) == len(drawn.token_ids) == 8
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(program: str, *arguments: str) -> set[str]:
    """Top-level names of what a fresh interpreter has imported in the end."""
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAMES[1], NAMES[7]])
def test_serving_a_bundle_imports_no_build_library(pairs: Pairs, name: str) -> None:
    found = modules_after(SERVE, str(pairs.bundle(name)), json.dumps(RUNTIME))
    assert set(RUNTIME) <= found
    assert "onnxruntime" in found
    loaded = {module for module in found if module.split(".")[0].startswith(("torch", "transformers"))}
    loaded |= {module for module in found if module.split(".")[0] in BUILD_LIBRARIES}
    loaded |= {m for m in found if m.startswith(("graphspec.export", "graphspec.architectures"))}
    assert not loaded


@pytest.mark.parametrize("module", ["graphspec", "graphspec.registry", "graphspec.resolution", "graphspec.bundle"])
def test_the_core_imports_neither_build_libraries_nor_a_backend(module: str) -> None:
    found = modules_after(f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))")
    assert not found & {*BUILD_LIBRARIES, "onnxruntime", "tensorrt"}


def test_the_registry_lists_every_architecture_without_torch() -> None:
    program = (
        "import json, sys; from graphspec.registry import registered; "
        "assert len(registered()) >= 8; print(json.dumps(sorted(sys.modules)))"
    )
    assert not modules_after(program) & set(BUILD_LIBRARIES)
