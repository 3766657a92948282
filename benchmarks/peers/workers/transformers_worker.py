"""transformers' generate, plain or with its prompt lookup."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from protocol import Watch, logprobs_of, serve


class Streamer:
    """Tells the watch; generate calls it with the prompt first."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.calls = -1

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then the tokens of one step."""
        self.calls += 1
        if self.calls:
            self._watch.add(value.flatten().tolist())

    def end(self) -> None:
        """Nothing is kept back."""


class Transformers:
    """The model in one dtype."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        self._drafts = {"prompt_lookup_num_tokens": args.drafts, "max_matching_ngram_size": args.ngram}
        self._lookup = self._drafts if args.drafts else {}
        self.about = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}, {args.dtype}",
            "lookup": f"{args.drafts} drafts by {args.ngram} tokens" if args.drafts else "none",
        }

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """As Peer's."""
        streamer = Streamer(watch)
        tokens = torch.tensor([ids])
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(eos),
            pad_token_id=min(eos),
            streamer=streamer,
            **self._lookup,
        )
        return {"steps": streamer.calls - 1}

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        """As Peer's."""
        return logprobs_of(self._model(torch.tensor([ids])).logits[0].float().numpy(), ids)


if __name__ == "__main__":
    serve(Transformers)
