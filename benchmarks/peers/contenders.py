"""Who takes part, and how each is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Everybody else's, plain and with prompt lookup where they have it: of the drafts a step that we tried, the
    number that was fastest on these prompts, or what its documentation recommends for CPUs."""
    plain = [
        ("llama.cpp Q4_1", "llama_cpp_worker.py", "llama.cpp", "gguf", ()),
        ("ONNX Runtime GenAI int4", "onnxruntime_genai_worker.py", "onnxruntime-genai", "onnxruntime-genai int4", ()),
        ("OpenVINO GenAI int8", "openvino_genai_worker.py", "openvino-genai", "openvino int8", ()),
        ("transformers float32", "transformers_worker.py", "transformers", "checkpoint", ("--dtype", "float32")),
    ]
    lookup = {
        "llama.cpp Q4_1": ("--drafts", "2", "--ngram", "2"),
        "ONNX Runtime GenAI int4": ("--drafts", "3", "--ngram", "3"),
        "OpenVINO GenAI int8": ("--drafts", "3", "--ngram", "3"),
        "transformers float32": ("--drafts", "3", "--ngram", "2"),
    }
    found = []
    for name, worker, environment, model, options in plain:
        one = Contender(name=name, worker=worker, environment=environment, model=model, options=options)
        found.append(one)
        found.append(
            Contender(
                name=f"{name}, lookup",
                worker=worker,
                environment=environment,
                model=model,
                speculates=True,
                options=(*options, *lookup[name]),
                scores_as=name,
            )
        )
    return found


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
