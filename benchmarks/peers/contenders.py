"""Who takes part, and how each is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from environments import HERE, model_of, python_of

OURS = ""
"""The environment that this script runs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the model."""

    name: str
    worker: str
    environment: str
    model: str
    """A name for `model_of`; of ours, the path of a bundle."""
    speculates: bool = False
    options: tuple[str, ...] = ()
    scores_as: str = ""
    """The contender whose perplexity is this one's too: the same weights and products."""

    @property
    def ours(self) -> bool:
        """Whether it is graphspec."""
        return self.environment == OURS

    def command(self, cache: Path, gguf: Path, *, threads: int, max_length: int, score: bool = False) -> list[str]:
        """What starts it. Installs and converts what is not there. Raises UnavailableError."""
        python = sys.executable if self.ours else str(python_of(self.environment, cache))
        model = self.model if self.ours else str(model_of(self.model, cache, gguf))
        sizes = ["--threads", str(threads), "--max-length", str(max_length)]
        return [
            *(python, str(HERE / "workers" / self.worker), "--model", model, *sizes, *self.options),
            *(["--score"] if score else []),
        ]


def peers() -> list[Contender]:
    """Everybody else's, plain and with prompt lookup: llama.cpp's with the drafts a step that its documentation
    recommends for CPUs, the others' with one more."""
    llama = ("llama_cpp_worker.py", "llama.cpp", "gguf")
    onnxruntime = ("onnxruntime_genai_worker.py", "onnxruntime-genai", "onnxruntime-genai int4")
    openvino = ("openvino_genai_worker.py", "openvino-genai", "openvino int8")
    transformers = ("transformers_worker.py", "transformers", "checkpoint")
    two, three = ("--drafts", "2", "--ngram", "2"), ("--drafts", "3", "--ngram", "2")
    return [
        *_both("llama.cpp Q4_1", *llama, options=(), lookup=two),
        *_both("llama.cpp Q4_1 not repacked", *llama, options=("--no-repack",), lookup=two),
        *_both("ONNX Runtime GenAI int4", *onnxruntime, options=(), lookup=three),
        *_both("OpenVINO GenAI int8", *openvino, options=(), lookup=three),
        *_both("transformers float32", *transformers, options=("--dtype", "float32"), lookup=three),
    ]


def _both(
    name: str, worker: str, environment: str, model: str, *, options: tuple[str, ...], lookup: tuple[str, ...]
) -> list[Contender]:
    plain = Contender(name=name, worker=worker, environment=environment, model=model, options=options)
    drafting = {"name": f"{name}, lookup", "speculates": True, "scores_as": name}
    return [plain, replace(plain, options=(*options, *lookup), **drafting)]


def ours(name: str, bundle: Path, widths: Sequence[str]) -> list[Contender]:
    """One bundle at each width."""
    first = f"{name}, width 0"
    return [
        Contender(
            name=f"{name}, width {width}",
            worker="graphspec_worker.py",
            environment=OURS,
            model=str(bundle),
            speculates=width != "0",
            options=("--width", width),
            scores_as="" if width == "0" else first,
        )
        for width in ("0", *(width for width in widths if width != "0"))
    ]
