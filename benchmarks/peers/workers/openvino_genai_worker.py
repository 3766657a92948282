"""OpenVINO GenAI, plain or with its prompt lookup."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Watch, logprobs_of, serve


class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it ships no types
    """Tells the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.calls = 0

    def write(self, token: int | Sequence[int]) -> Any:
        """One token, or those of one step."""
        self.calls += 1
        self._watch.add([token] if isinstance(token, int) else token)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is kept back."""


class OpenVinoGenAI:
    """The pipeline as it comes, for text; the compiled model itself for log-probabilities, which it does not tell."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = {"INFERENCE_NUM_THREADS": args.threads}
        self._drafts = {"num_assistant_tokens": args.drafts, "max_ngram_size": args.ngram} if args.drafts else {}
        self.about = {
            "version": f"openvino-genai {openvino_genai.__version__.split('-')[0]}",
            "lookup": f"{args.drafts} drafts by {args.ngram} tokens" if args.drafts else "none",
            "precision": str(openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()),
        }
        if args.score:
            self._compiled = openvino.Core().compile_model(Path(args.model) / "openvino_model.xml", "CPU", settings)
        else:
            lookup = {"prompt_lookup": True} if args.drafts else {}
            self._pipeline = openvino_genai.LLMPipeline(args.model, "CPU", **settings, **lookup)

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """As Peer's."""
        streamer = Streamer(watch)
        tokens = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        self._pipeline.generate(
            inputs,
            streamer=streamer,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stop_token_ids=set(eos),
            **self._drafts,
        )
        return {"steps": streamer.calls - 1}

    def score(self, ids: Sequence[int]) -> list[float]:
        """As Peer's."""
        request = self._compiled.create_infer_request()
        tokens = np.array([ids], np.int64)
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        known = {name for value in self._compiled.inputs for name in value.get_names()}
        results = request.infer({name: value for name, value in inputs.items() if name in known})
        return logprobs_of(next(iter(results.values()))[0], ids)


if __name__ == "__main__":
    serve(OpenVinoGenAI)
