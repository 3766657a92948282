"""Whether a row's numbers depend on what shares the step: asked of the graph itself, on the CPU at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphspec.architectures.state import StateSpec

Arrays = dict[str, NDArray[Any]]
_Logits = dict[int, NDArray[np.float32]]
"""Of the first row, f32[V] by position."""

_LONGEST = 300
"""Tokens: past every size at which MLAS changes how it adds up (64, 128, 256)."""
_ROOM = 32
"""Positions behind the tokens, for drafts."""
_ASKED = 64
"""The last positions of a piece at which its logits are compared: as many as an engine asks for at most."""
_CUTS = ((1, 2, 3), (60, 65, 129), (150, 295), (255, 256, 258), (-3, -2, -1))
"""Where the tokens are cut in pieces; negative: from the end."""


def is_row_invariant(
    root: Path,
    states: Sequence[StateSpec],
    vocabulary: int,
    *,
    positions: int,
    num_threads: int,
    fewest_tokens: int = 1,
) -> bool:
    """Runs the same tokens whole, in pieces and beside other rows: True if every target cache has the same bits,
    and the logits.

    `positions`: tokens that a row has room for; `fewest_tokens`: as of the manifest.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = num_threads
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(root))
    model = (root / "graphs" / "any.onnx").read_bytes()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    length = min(_LONGEST, positions)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (4, length))
    alone = _run(session, states, tokens[:1], (length,), fewest_tokens)
    others = [_run(session, states, tokens[:1], pieces, fewest_tokens) for pieces in _pieces(length)]
    others.append(_run(session, states, tokens, (length,), fewest_tokens))
    return all(_same_bits(alone, other, states, length) for other in others)


def _pieces(length: int) -> list[tuple[int, ...]]:
    """Lengths of the pieces for each set of cuts."""
    found = []
    for cuts in _CUTS:
        ends = sorted({cut % length for cut in cuts if cut % length > 0 and abs(cut) < length} | {length})
        found.append(tuple(np.diff([0, *ends]).tolist()))
    return found


def _run(
    session: Any, states: Sequence[StateSpec], tokens: NDArray[np.int64], split: Sequence[int], fewest_tokens: int
) -> tuple[Arrays, _Logits]:
    """The states after the tokens i64[B, T], fed in pieces as a prompt is; the logits on the way."""
    batch = len(tokens)
    capacity = tokens.shape[1] + _ROOM
    held = {spec.name: np.zeros(spec.sizes(batch, capacity), spec.dtype) for spec in states}
    logits, start = _Logits(), 0
    for length in split:
        after = start + length
        visible = min(-(-(after + 1) // 32) * 32, capacity)
        following = tokens[:, after] if after < tokens.shape[1] else np.full(batch, -1)
        padding = max(0, -(-fewest_tokens // batch) - length)
        feeds = {
            "tokens": np.pad(tokens[:, start:after], ((0, 0), (0, padding)), constant_values=-1),
            "kv_len": np.full(batch, start),
            "n_tokens": np.full(batch, length),
            "n_known": np.full(batch, length),
            "next_token": following,
            "verify_offsets": np.arange(1 - min(length, _ASKED), 1),
            "key_positions": np.arange(visible),
            "temperature": np.zeros(batch, np.float32),
            "top_k": np.zeros(batch, np.int64),
            "top_p": np.ones(batch, np.float32),
            "min_p": np.zeros(batch, np.float32),
            "uniform": np.zeros((batch, capacity, 1), np.float32),
            "num_drafts": np.zeros((), np.int64),
        }
        read = {value.name for value in session.get_inputs()}
        seen = {spec.name: _first(held[spec.name], spec, visible) for spec in states}
        given = {name: value for name, value in {**feeds, **seen}.items() if name in read}
        names = [*(f"{spec.name}.next" for spec in states), "logits"]
        *updated, asked = session.run(names, given)
        for spec, after_step in zip(states, updated, strict=True):
            _first(held[spec.name], spec, visible)[...] = after_step
        first = asked[0].copy()  # a view would keep the other rows'
        logits |= dict(zip(range(after - len(first), after), first, strict=True))
        start = after
    return held, logits


def _first(array: NDArray[Any], spec: StateSpec, count: int) -> NDArray[Any]:
    """A view of the first positions of every row; all of a state that has none."""
    if "capacity" not in spec.shape:
        return array
    return array[(slice(None),) * spec.shape.index("capacity") + (slice(count),)]


def _same_bits(
    left: tuple[Arrays, _Logits], right: tuple[Arrays, _Logits], states: Sequence[StateSpec], length: int
) -> bool:
    """Compares the first row's entries at the positions of the tokens, and its logits where both have them."""

    def written(arrays: Arrays, spec: StateSpec) -> NDArray[Any]:
        return _first(arrays[spec.name][:1], spec, length)

    # What a drafter keeps decides what is proposed, never what is committed.
    kept = [spec for spec in states if spec.name.startswith("target.")]
    return all(np.array_equal(written(left[0], spec), written(right[0], spec)) for spec in kept) and all(
        np.array_equal(left[1][position], right[1][position]) for position in left[1].keys() & right[1].keys()
    )
