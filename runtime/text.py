"""Text to token ids and back: all at once, or a few tokens at a time as a model produces them."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graphspec.errors import BundleError, RequestError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""What a tokenizer is read from; only the first must be there."""
REPLACEMENT = "\ufffd"
"""Stands for bytes that are not, or not yet, a character."""
_SHORTENED = 4
"""Characters that a normalizer may make one of: Unicode composes no more."""
MAX_UNDECIDED = 256
"""Tokens in a row whose text may be held back; no text that means anything comes near it."""


def _byte_level() -> Mapping[str, int]:
    """The letters that GPT-2's and many later vocabularies write bytes with."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


class Tokenizer:
    """A model's tokenizer, its special tokens and its chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Takes the contents of FILES by name. Raises BundleError if one cannot be read, or the first is
        missing."""
        if "tokenizer.json" not in files:
            raise BundleError("the bundle has no tokenizer.json: build it again with `graphspec build`")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises nothing narrower
            raise BundleError(f"tokenizer.json cannot be read ({error}): build the bundle again") from error
        # Training settings some checkpoints ship would cut or pad a prompt without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        config = _read_json(files, "tokenizer_config.json")
        self.bos_token = _token(config, "bos_token")
        """Empty if the model has none."""
        self.eos_token = _token(config, "eos_token")
        self.chat_template = _chat_template(files, config)
        """Jinja source; None if the model has none."""
        self.eos_token_ids = self._eos_token_ids(_read_json(files, "generation_config.json"))
        """Every id that ends an answer, ascending: the tokenizer's own and those of the generation config."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes = self._byte_tokens()
        letters = (self._tokenizer.token_to_id(letter) for letter in "a0.")
        self._anchor = [token_id for token_id in letters if token_id is not None][:1]
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._contents = dict[int, bytes]()

    @classmethod
    def load(cls, bundle: Path) -> "Tokenizer":
        """From a bundle directory: each of FILES in its tokenizer/ folder or beside it."""
        files = {}
        for name in FILES:
            for path in (bundle / name, bundle / "tokenizer" / name):
                if path.is_file():
                    files[name] = path.read_bytes()
        return cls(files)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. A rendered chat has its special tokens already: pass False for it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: it has half a surrogate pair at character {error.start}"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def fewest_tokens(self, text: str) -> int:
        """A bound below that of `encode` which takes no time, however long the text."""
        return len(text) // (self._longest * _SHORTENED)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all `token_ids`; ids outside the vocabulary have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def hidden(self, shown: Collection[str] = ()) -> frozenset[int]:
        """The special tokens that are not text, but for those whose text is in `shown`."""
        return frozenset(self._special - {self._tokenizer.token_to_id(text) for text in shown})

    def visible(self, token_ids: Iterable[int], hidden: Collection[int]) -> list[int]:
        """Those of `token_ids` that have a text, without the `hidden`."""
        return [
            token_id
            for token_id in token_ids
            if token_id not in hidden and self._tokenizer.id_to_token(token_id) is not None
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's part of a text, in UTF-8; of a character that spans tokens, its own bytes. A special token's
        is its name; an id that the tokenizer does not know has none."""
        if token_id not in self._contents:
            self._contents[token_id] = self._content(token_id)
        return self._contents[token_id]

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a byte-fallback vocabulary, such as `<0xE4>`. A run of them is
        text only as a whole: one bad byte turns all of it into U+FFFD."""
        return token_id in self._bytes

    def _content(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._bytes:
            return bytes([int(name[3:5], 16)])
        # After another token: the first of a text loses its leading space.
        text = self.decode([*self._anchor, token_id])[len(self.decode(self._anchor)) :]
        if REPLACEMENT in text and all(letter in _BYTE_LEVEL for letter in name):
            return bytes(_BYTE_LEVEL[letter] for letter in name)
        return text.encode()

    def _eos_token_ids(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        listed = generation.get("eos_token_id")
        ids = listed if isinstance(listed, list) else [listed]
        own = self._tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        return tuple(sorted({token_id for token_id in [*ids, own] if token_id is not None}))

    def _byte_tokens(self) -> set[int]:
        names = (f"<0x{value:02X}>" for value in range(256))
        ids = {name: self._tokenizer.token_to_id(name) for name in names}
        # Without a byte-fallback decoder such a token is plain text, and decodes to its own name.
        return {i for name, i in ids.items() if i is not None and name not in self.decode([i])}


class IncrementalDetokenizer:
    """Text of token ids that arrive a few at a time: everything `push` returned, then `finish`, is exactly
    `decode` of all of them. No piece ends inside a character, and none is ever taken back.

    Decoding a token takes its neighbours: a first token loses its leading space, a character may span
    tokens. So a window is decoded: the last tokens whose text is out, then those whose text is not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """With the `prompt` the ids continue, their text is what they add to it (a leading space is kept). Of the
        special tokens that are skipped, those `shown` are not."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden(shown) if skip_special_tokens else frozenset[int]()
        self._window = tokenizer.visible(prompt[-MAX_UNDECIDED:], self._hidden)
        self._num_undecided = 0
        # A prompt may end inside a character: its U+FFFD is not text that is out.
        self._text = self._decode()
        self._num_out = len(self._text.rstrip(REPLACEMENT))

    @property
    def undecided(self) -> str:
        """Text that is whole but could still be taken back by the next token. Never ends with U+FFFD."""
        return self._text[self._num_out :].rstrip(REPLACEMENT) if self._num_undecided else ""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens decide."""
        return "".join([self._push(token_id) for token_id in self._tokenizer.visible(token_ids, self._hidden)])

    def finish(self) -> str:
        """The text still held back: the last token has come."""
        text = self._text[self._num_out :] if self._num_undecided else ""
        self._advance()
        return text

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_undecided += 1
        self._text = self._decode()
        if self._num_undecided > MAX_UNDECIDED:
            return self.finish()
        if self._tokenizer.is_byte(token_id):
            return ""
        end = max(self._num_out, len(self._text.rstrip(REPLACEMENT)))
        text = self._text[self._num_out : end]
        self._num_out = end
        if text and end == len(self._text):
            self._advance()
        return text

    def _advance(self) -> None:
        """Leaves in the window only the tokens just decided, as context for the next."""
        if self._num_undecided:
            self._window = self._window[-self._num_undecided :]
            self._num_undecided = 0
            self._text = self._decode()
            self._num_out = len(self._text)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)  # what is skipped never got here


def _read_json(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise BundleError(f"{name} is not JSON ({error}): build the bundle again") from error
    if not isinstance(content, dict):
        raise BundleError(f"{name} is not a JSON object: build the bundle again")
    return content


def _token(config: Mapping[str, Any], name: str) -> str:
    """A special token's text: written as a string, or as an object that holds one."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """From its own file, else from the tokenizer's config: one template, or several by name."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise BundleError(f"chat_template.jinja is not UTF-8 ({error}): build the bundle again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None
