"""A lowered graph run by hand in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from graphspec.architectures.state import StateSpec
from graphspec.speculative_config import LONGEST_DRAFT

Array = NDArray[Any]

LOGITS = "logits"
"""f32[B, R, V]: what ArgMax and the draw read."""


def session(model: ir.Model, root: Path, *, num_threads: int = 1, optimise: bool = True) -> Any:
    """A session on the model, whose weights lie in files below `root`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = num_threads
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(root))
    text = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row's part of a step."""

    tokens: tuple[int, ...]
    """Known ones, then drafts."""
    num_known: int
    next_token: int = -1


class Stepper:
    """Rows with their states over one session."""

    def __init__(self, session: Any, states: Sequence[StateSpec], *, batch: int, capacity: int) -> None:
        self._session, self._specs, self._capacity = session, states, capacity
        self.states: dict[str, Array] = {
            spec.name: np.zeros(spec.sizes(batch, capacity), spec.dtype) for spec in states
        }
        self.kv_len = np.zeros(batch, np.int64)
        self.uniform = np.zeros((batch, capacity, 1), np.float32)
        self.temperature = np.zeros(batch, np.float32)

    def step(self, rows: Sequence[Row], *, asked: int, visible: int) -> dict[str, Array]:
        """Runs the rows, padded to one length, asking the target at `asked` positions. Keeps kv_len as it is."""
        batch, length = len(rows), max(len(row.tokens) for row in rows)
        tokens = np.zeros((batch, length), np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = row.tokens
        feeds: dict[str, Array] = {
            "tokens": tokens,
            "kv_len": self.kv_len,
            "n_tokens": np.array([len(row.tokens) for row in rows]),
            "n_known": np.array([row.num_known for row in rows]),
            "next_token": np.array([row.next_token for row in rows]),
            "verify_offsets": np.arange(asked),
            "key_positions": np.arange(visible),
            "temperature": self.temperature,
            "top_k": np.zeros(batch, np.int64),
            "top_p": np.ones(batch, np.float32),
            "min_p": np.zeros(batch, np.float32),
            "uniform": self.uniform,
            "num_drafts": np.array(LONGEST_DRAFT),  # whatever K is: all
            **{spec.name: self._first(spec, visible) for spec in self._specs},
        }
        read = {value.name for value in self._session.get_inputs()}
        names = [output.name for output in self._session.get_outputs()]
        given = {name: value for name, value in feeds.items() if name in read}
        outputs = dict(zip(names, self._session.run(names, given), strict=True))
        for spec in self._specs:
            self._first(spec, visible)[...] = outputs[f"{spec.name}.next"]
        return outputs

    def _first(self, spec: StateSpec, count: int) -> Array:
        """The first positions of every row: a step's states are as long as what it looks at."""
        return self.states[spec.name][(slice(None),) * spec.shape.index("capacity") + (slice(count),)]
