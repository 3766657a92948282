"""Ours: a bundle at one width, as graphspec.load(bundle).stream(...) runs it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol import Watch, serve

from graphspec import __version__
from graphspec.runtime.bench.recorder import Recorder, Times
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.loading import open_engine
from graphspec.runtime.sampling import SamplingParams
from graphspec.runtime.text import Tokenizer


class Graphspec:
    """graphspec.load, with an engine that notes what its launches cost."""

    def __init__(self, args: argparse.Namespace) -> None:
        opened, engine = open_engine(Path(args.model), num_slots=1, num_threads=args.threads, verify=True)
        self._recorder = Recorder(engine, 1)
        self._bundle = LoadedBundle(opened, self._recorder, Tokenizer.load(opened.root))
        self._width: Any = int(args.width) if args.width.isdecimal() else args.width
        self._bundle.checked_width(self._width)
        manifest = opened.manifest
        self.about = {
            "version": f"graphspec {__version__}, {manifest.backend.name} {manifest.backend.version}",
            "bundle": f"{manifest.architecture}, {manifest.encoding}, width {args.width}",
        }

    def generate(self, ids: Sequence[int], max_new_tokens: int, eos: frozenset[int], watch: Watch) -> Mapping[str, Any]:
        """As Peer's. Text is made of the tokens meanwhile: there is no generation without."""
        self._recorder.times = times = Times()
        params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=tuple(eos))
        for piece in self._bundle.stream([ids], params, width=self._width):
            watch.add(piece.token_ids)
        self._recorder.close()
        return {"steps": times.steps, "steps_seconds": times.steps_wall, "device_seconds": times.steps_device}

    def score(self, ids: Sequence[int]) -> list[float]:
        """As Peer's."""
        (answer,) = self._bundle.generate([ids], SamplingParams(max_new_tokens=1, prompt_logprobs=0), width=0)
        assert answer.prompt_logprobs is not None
        return [found.logprob for found in answer.prompt_logprobs if found is not None]


if __name__ == "__main__":
    serve(Graphspec)
