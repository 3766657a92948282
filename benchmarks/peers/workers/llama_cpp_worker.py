"""llama.cpp through llama-cpp-python, plain or with its prompt lookup.

Where the processor has AMX, llama.cpp lays weights out for it. Its AMX code, compiled by gcc 12, ends in SIGILL: in
that compiler's header `_tile_loadconfig` names 8 of the 64 bytes that it reads, so the others are never written.
--no-repack keeps weights as they lie in the file, where every processor can multiply with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Watch, logprobs_of, serve


class LlamaCpp:
    """The token generator below create_completion: no text is made of tokens while it is timed."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.no_repack:
            _keep_layout()
        draft = LlamaPromptLookupDecoding(args.ngram, args.drafts) if args.drafts else None
        self._model = llama_cpp.Llama(
            args.model,
            n_ctx=args.max_length,
            n_threads=args.threads,
            n_threads_batch=args.threads,
            logits_all=args.score,
            draft_model=draft,
            verbose=False,
        )
        self._steps = 0
        self._count_steps()
        lookup = f"{args.drafts} drafts by {args.ngram} tokens" if draft else "none"
        layout = "weights as in the file" if args.no_repack else "weights repacked"
        self.about = {"version": f"llama-cpp-python {llama_cpp.__version__}", "layout": layout, "lookup": lookup}

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """As Peer's."""
        self._model.reset()  # else it would keep what begins like the prompt before
        self._steps = 0
        for token in self._model.generate(list(ids), temp=0.0):
            watch.add([token])
            if token in eos or len(watch.tokens) == max_new_tokens:
                break
        return {"steps": self._steps - 1}  # one was the prompt's

    def score(self, ids: Sequence[int]) -> list[float]:
        """As Peer's."""
        self._model.reset()
        self._model.eval(list(ids))
        return logprobs_of(self._model.scores[: len(ids)], ids)

    def _count_steps(self) -> None:
        evaluate = self._model.eval

        def counted(tokens: Sequence[int]) -> None:
            self._steps += 1
            evaluate(tokens)

        self._model.eval = counted


def _keep_layout() -> None:
    """Llama's constructor has no argument for it."""
    defaults = llama_cpp.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = changed


if __name__ == "__main__":
    serve(LlamaCpp)
