"""Each peer's virtual environment, and the one model in the form that it reads; made once, under a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
MADE = "made.json"
"""In a folder that is finished: what it was made by."""


class UnavailableError(Exception):
    """A peer that cannot be had here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Packages from the package index: the arguments of one `pip install` after the other."""

    installs: Sequence[Sequence[str]]
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables that pip sees, where this process has none of the name."""

    @property
    def variables(self) -> dict[str, str]:
        """Those that it sees."""
        return {name: os.environ.get(name, value) for name, value in self.defaults.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A command of an environment that makes a model out of another one; {source} and {out} are paths."""

    environment: str
    source: str
    command: Sequence[str]
    """After the environment's python."""


# First and pinned, as everywhere in this project: the CPU build.
_TORCH = ("torch==2.13.0",)
ENVIRONMENTS = {
    # Compiled here, for this processor, without what reads pictures.
    "llama.cpp": Environment(
        installs=[("llama-cpp-python==0.3.36",)], defaults={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
    ),
    "onnxruntime-genai": Environment(
        installs=[
            _TORCH,
            ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "transformers==5.24.0", "onnx", "onnx-ir"),
        ]
    ),
    "openvino-genai": Environment(installs=[("openvino-genai==2026.4.1.0",)]),
    # Converts for OpenVINO. It asks for torchvision, which would replace torch by the CUDA build and is not needed.
    "optimum-intel": Environment(
        installs=[
            _TORCH,
            ("--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"),
            ("transformers==5.5.4", "nncf==3.4.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"),
            ("requests", "setuptools", "packaging", "numpy"),
        ]
    ),
    "transformers": Environment(installs=[_TORCH, ("transformers==5.24.0", "accelerate", "gguf", "numpy")]),
}
_BUILDER = ("-m", "onnxruntime_genai.models.builder", "-i", "{source}", "-o", "{out}", "-e", "cpu")
MODELS = {
    "checkpoint": Conversion(
        environment="transformers",
        source="gguf",
        command=(str(HERE / "prepare" / "checkpoint.py"), "{source}", "{out}"),
    ),
    "onnxruntime-genai int4": Conversion(
        environment="onnxruntime-genai", source="checkpoint", command=(*_BUILDER, "-p", "int4")
    ),
    "openvino int8": Conversion(
        environment="optimum-intel",
        source="checkpoint",
        command=(
            *("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", "{source}"),
            *("--task", "text-generation-with-past", "--weight-format", "int8", "{out}"),
        ),
    ),
}
"""Beside "gguf", the file itself."""


def python_of(name: str, cache: Path) -> Path:
    """The environment's interpreter, installed if it is not there. Raises UnavailableError."""
    environment = ENVIRONMENTS[name]
    root = cache / "environments" / name.replace(" ", "-")
    python = root / "bin" / "python"
    made_by = {"installs": [list(each) for each in environment.installs], "variables": environment.variables}
    if _is_made(root, made_by):
        return python
    print(f"installing {name} …", file=sys.stderr, flush=True)
    shutil.rmtree(root, ignore_errors=True)
    log = _log(cache, f"install {name}")
    _run([sys.executable, "-m", "venv", str(root)], log)
    for packages in environment.installs:
        _run([str(python), "-m", "pip", "install", *packages], log, environment.variables)
    (root / MADE).write_text(json.dumps(made_by))
    return python


def model_of(name: str, cache: Path, gguf: Path) -> Path:
    """The model in that form, converted if it is not there. Raises UnavailableError."""
    if name == "gguf":
        return gguf
    conversion = MODELS[name]
    source = model_of(conversion.source, cache, gguf)
    out = cache / "models" / name.replace(" ", "-")
    made_by = {"of": _digest(gguf), "command": list(conversion.command)}
    if _is_made(out, made_by):
        return out
    python = python_of(conversion.environment, cache)
    print(f"converting: {name} …", file=sys.stderr, flush=True)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [each.format(source=source, out=out) for each in conversion.command]
    _run([str(python), *command], _log(cache, f"convert {name}"))
    (out / MADE).write_text(json.dumps(made_by))
    return out


def _is_made(folder: Path, made_by: object) -> bool:
    made = folder / MADE
    return made.is_file() and json.loads(made.read_text()) == made_by


def _run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    environ = {**os.environ, **(variables or {})}
    environ.pop("PYTHONPATH", None)
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environ, check=False).returncode
    if status:
        raise UnavailableError(f"{reason_in(log)} (exit status {status}; {log})")


def reason_in(log: Path) -> str:
    """The last line that tells of an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _log(cache: Path, name: str) -> Path:
    folder = cache / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name.replace(' ', '-')}.log"
    log.unlink(missing_ok=True)
    return log


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
