"""Row state on a device: tokens, lengths, sampling, random numbers, caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphspec.errors import BundleError
from graphspec.manifest import Manifest

from .device import ALIGNMENT, Address, Device, Handle
from .engine import NO_TOKEN
from .sampling import SamplingParams


class RowState:
    """Memory of `rows` rows, one after another."""

    def __init__(self, manifest: Manifest, rows: int, device: Device, stream: Handle) -> None:
        self._device, self._stream, self._rows = device, stream, rows
        self._width = manifest.num_draft_tokens + 1
        self._capacity = manifest.capacity
        self._states = [state.input for state in manifest.states]
        self._strides = {
            "tokens": 8 * self._width,
            "kv_len": 8,
            "active": 1,
            "temperature": 4,
            "top_k": 8,
            "top_p": 4,
            "min_p": 4,
            "uniform": 4 * manifest.capacity,
            **{state.input: state.row_bytes(manifest.capacity) for state in manifest.states},
        }
        self._memory = {name: device.allocate(rows * stride) for name, stride in self._strides.items()}
        self._alone = {
            name: device.allocate(stride) for name, stride in self._strides.items() if self._is_between(name)
        }
        self._active: NDArray[np.bool_] | None = None

    def addresses(self) -> dict[str, Address]:
        """Of every input of all rows."""
        return dict(self._memory)

    def addresses_of(self, slot: int) -> dict[str, Address]:
        """Of every input of one row, for a graph launched next. What lies between two multiples of ALIGNMENT is
        copied to one, so the graph must not change it in place."""
        for name, at in self._alone.items():
            self._device.copy(at, self._at(name, slot), self._strides[name], self._stream)
        return {name: self._at(name, slot) for name in self._memory} | self._alone

    def check_in_place(self, states: Iterable[str]) -> None:
        """Raises BundleError if a graph of one row cannot change these states where they lie."""
        if between := sorted(name for name in states if self._is_between(name)):
            raise BundleError(
                f"rows of {', '.join(between)} are no multiple of {ALIGNMENT} bytes, and an engine changes them in "
                "place: the bundle was not built by this graphspec; rebuild it"
            )

    def reset_all(self) -> None:
        """Every row empty; the caches hold zeros or what finite numbers were written, masked either way."""
        for slot in range(self._rows):
            self._upload("tokens", slot, np.full(self._width, NO_TOKEN, np.int64))
            self._upload("kv_len", slot, np.zeros(1, np.int64))
            self._upload("top_p", slot, np.ones(1, np.float32))

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], kept: int) -> None:
        """A row of `kept` tokens with a request's sampling and its table f32[capacity, 1]."""
        self._upload("tokens", slot, np.full(self._width, NO_TOKEN, np.int64))
        self._upload("kv_len", slot, np.array([kept], np.int64))
        temperature = 0.0 if params.greedy else params.temperature
        self._upload("temperature", slot, np.array([temperature], np.float32))
        self._upload("top_k", slot, np.array([max(params.top_k, 0)], np.int64))
        self._upload("top_p", slot, np.array([params.top_p], np.float32))
        self._upload("min_p", slot, np.array([params.min_p], np.float32))
        self._upload("uniform", slot, uniform)

    def copy(self, source: int, target: int) -> None:
        """The caches of one row become another's."""
        for name in self._states:
            self._device.copy(self._at(name, target), self._at(name, source), self._strides[name], self._stream)

    def activate(self, slots: Sequence[int]) -> None:
        """Only these rows advance from now on."""
        active = np.zeros(self._rows, np.bool_)
        active[list(slots)] = True
        if self._active is None or not np.array_equal(active, self._active):
            self._device.upload(self._memory["active"], active, self._stream)
            self._active = active

    def take(self, outputs: Mapping[str, Address], rows: Sequence[int]) -> None:
        """Tokens and lengths that a graph put out for these rows, which follow each other."""
        for output, name in (("next_tokens", "tokens"), ("next_kv_len", "kv_len")):
            size = len(rows) * self._strides[name]
            self._device.copy(self._at(name, rows[0]), outputs[output], size, self._stream)

    def copy_state(self, name: str, source: Address, slot: int, rows: int) -> None:
        """A state of `rows` rows from `slot` on."""
        self._device.copy(self._at(name, slot), source, rows * self._strides[name], self._stream)

    def tokens_of(self, slot: int) -> NDArray[np.int64]:
        """The row's pending token and drafts, i64[K+1]; waits for the device."""
        host = self._device.host_array((self._width,), np.int64)
        self._device.download(host, self._at("tokens", slot), self._stream)
        event = self._device.event()
        self._device.record(event, self._stream)
        self._device.synchronise(event)
        return host.copy()

    def _upload(self, name: str, slot: int, values: NDArray[Any]) -> None:
        self._device.upload(self._at(name, slot), values, self._stream)

    def _at(self, name: str, slot: int) -> Address:
        return self._memory[name] + slot * self._strides[name]

    def _is_between(self, name: str) -> bool:
        return self._rows > 1 and self._strides[name] % ALIGNMENT != 0
