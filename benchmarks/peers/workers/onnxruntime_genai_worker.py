"""ONNX Runtime GenAI, plain or with its n-gram lookup."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import onnxruntime_genai
from protocol import Watch, logprobs_of, serve


class OnnxRuntimeGenAI:
    """A generator a request."""

    def __init__(self, args: argparse.Namespace) -> None:
        threads = {"intra_op_num_threads": args.threads, "inter_op_num_threads": 1}
        config = onnxruntime_genai.Config(args.model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = onnxruntime_genai.Model(config)
        self._speculation = {"ngram_size": args.ngram, "max_draft_tokens": args.drafts} if args.drafts else {}
        self.about = {
            "version": f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}",
            "lookup": f"{args.drafts} drafts by {args.ngram} tokens" if args.drafts else "none",
        }

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """As Peer's."""
        generator = self._generator(len(ids) + max_new_tokens)
        generator.append_tokens(list(ids))
        while not generator.is_done():
            generator.generate_next_token()
            watch.add([int(generator.get_next_tokens()[0])])
            if watch.tokens[-1] in eos:
                break
        if not self._speculation:
            return {"steps": len(watch.tokens) - 1}
        told = generator.get_speculative_stats()
        return {"steps": told["target_forward_passes"] + told["standard_fallback_steps"]}

    def score(self, ids: Sequence[int]) -> list[float]:
        """As Peer's."""
        generator = self._generator(len(ids) + 1)
        generator.append_tokens(list(ids))
        return logprobs_of(generator.get_output("logits")[0], ids)

    def _generator(self, max_length: int) -> Any:
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=max_length)
        if self._speculation:
            params.set_speculative_options(**self._speculation)
        return onnxruntime_genai.Generator(self._model, params)


if __name__ == "__main__":
    serve(OnnxRuntimeGenAI)
