"""Text from a bundle, without a server: `graphspec.load(bundle).generate(...)`.

Prompts share the engine's slots: as one request ends, the next takes its row.
"""

from __future__ import annotations

import os
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from threading import Condition
from types import TracebackType
from typing import Any, Self

from graphspec.bundle import Bundle
from graphspec.errors import ConfigError, GraphspecError, RequestError
from graphspec.manifest import Manifest
from graphspec.signing import Signer, load_signer

from .answer import Answer, Generation, Piece, new_answer
from .chat import render_chat
from .engine import Engine
from .loading import open_engine
from .loop import Loop, Policy
from .requests import check_count, checked_params, checked_prompts
from .rows import PREFILL_CHUNK, Row
from .sampling import SamplingParams
from .text import Tokenizer
from .width_policy import AdaptiveWidths, Width, checked_width


class LoadedBundle:
    """A bundle ready to generate. Use as a context manager, or call `close`."""

    def __init__(self, bundle: Bundle, engine: Engine, tokenizer: Tokenizer) -> None:
        self._bundle, self._engine = bundle, engine
        # Nothing is left on the device between two calls of a caller, and its answers come when it asks for them.
        self._loop = Loop(
            engine,
            Policy(overlap=False, prompts_first=True, reuse_prefixes=False),
            widths=AdaptiveWidths(bundle.manifest.widths, on_demand=engine.drafts_on_demand),
        )
        self._in_turn = self._closed = False
        self._turned = Condition()
        self.tokenizer = tokenizer

    @property
    def manifest(self) -> Manifest:
        """What the bundle was built from and for."""
        return self._bundle.manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the engine. What is asked afterwards, and pieces still to come, are a RequestError."""
        with self._turned:
            self._closed = True
            self._turned.wait_for(lambda: not self._in_turn)
        self._engine.close()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        width: Width | str | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> list[Generation]:
        """One answer for each prompt, a text or token ids; everything else as `stream`."""
        generations: dict[int, Generation] = {}
        for piece in self.stream(prompts, params, width=width, prefill_chunk=prefill_chunk):
            if piece.generation is not None:
                generations[piece.index] = piece.generation
        return [generations[index] for index in range(len(generations))]

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        width: Width | str | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Iterator[Piece]:
        """Pieces of the answers as steps commit them.

        `params` holds for every prompt, or is one for each. `width`: drafts verified a step; None: the widest of
        the bundle; 0: no speculation; "auto": what is fastest as it goes; "1:4,8:2,16:0": 4, with 8 rows at once 2,
        with 16 none. The answers are the same at any width.
        Raises RequestError before anything is generated.
        """
        self._check_open()
        asked = checked_prompts(prompts)
        each = checked_params(params, len(asked))
        verified = self.checked_width(width)
        check_count("prefill_chunk", prefill_chunk)
        answers = [self._answer(i, p, s) for i, (p, s) in enumerate(zip(asked, each, strict=True))]
        return self._run(answers, verified, prefill_chunk)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's chat template makes of messages. Raises RequestError."""
        tokenizer = self.tokenizer
        return render_chat(
            tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )

    @property
    def engine(self) -> Engine:
        """What runs the steps."""
        return self._engine

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a chat prompt names its special tokens itself. Raises RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"the text is {reprlib.repr(text)}: it must be a string")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this bundle is closed: load it again, and close it when all answers are there")

    def checked_width(self, width: Width | str | None) -> Width:
        """A width of the bundle, "auto", or a schedule of its widths; None: its widest. Raises RequestError."""
        return checked_width(width, self.manifest.widths)

    def _answer(self, index: int, prompt: str | tuple[int, ...], params: SamplingParams) -> Answer:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return new_answer(self.manifest, self.tokenizer, ids, params, index=index)

    def _run(self, answers: Sequence[Answer], width: Width, prefill_chunk: int) -> Iterator[Piece]:
        news, client = deque[Piece | GraphspecError](), object()
        rows = [
            Row(answer=answer, on_news=news.append, width=width, chunk_size=prefill_chunk, client=client)
            for answer in answers
        ]
        try:
            with self._turned:
                for row in rows:
                    self._loop.add(row)
            left = len(rows)
            while left:
                self._wait_for(news)
                piece = news.popleft()
                if isinstance(piece, GraphspecError):
                    raise piece
                left -= piece.generation is not None
                yield piece
        finally:  # also when the caller drops the iterator in the middle
            for row in rows:
                row.cancelled = True

    def _wait_for(self, news: Sized) -> None:
        """Takes turns until there is some, or waits for another thread's."""
        while True:
            with self._turned:
                self._turned.wait_for(lambda: news or not self._in_turn)
                self._check_open()
                if news:
                    return
                self._in_turn = True
                self._loop.admit()
            try:
                self._loop.turn()
            finally:
                with self._turned:
                    self._in_turn = False
                    self._turned.notify_all()


def load(
    bundle: str | Path,
    *,
    max_batch_size: int | None = None,
    num_threads: int | None = None,
    verify: bool = True,
    require_signature: str | Path | None = None,
) -> LoadedBundle:
    """Opens a bundle: hashes and backend are checked before a byte reaches the backend, and before those, where
    `require_signature` names the file of a public key, that this key signed it. Raises BundleError, and ConfigError
    for settings that the bundle or this machine cannot honour."""
    if not isinstance(bundle, str | os.PathLike):
        raise ConfigError(f"the bundle is {reprlib.repr(bundle)}: it must be a path")
    for name, value in (("max_batch_size", max_batch_size), ("num_threads", num_threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{name} is {reprlib.repr(value)}: it must be an integer, or None")
    opened, engine = open_engine(
        Path(bundle),
        num_slots=max_batch_size,
        num_threads=num_threads,
        verify=verify,
        signer=_signer(require_signature, verify),
    )
    tokenizer = Tokenizer.load(opened.root)
    opened.confirm()  # a rebuild while it loaded would have mixed two bundles
    return LoadedBundle(opened, engine, tokenizer)


def _signer(public_key: object, verify: bool) -> Signer | None:
    if public_key is None:
        return None
    if not isinstance(public_key, str | os.PathLike):
        raise ConfigError(f"require_signature is {reprlib.repr(public_key)}: it must be the path of a public key")
    if not verify:
        raise ConfigError("require_signature with verify=False: a signature vouches for files only if they are hashed")
    return load_signer(Path(public_key))
