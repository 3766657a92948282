"""What a step puts out, twice: one set is copied to the host while the next step writes the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphspec.errors import EngineError

from .device import Address, Device, Handle
from .engine import StepResult


class Results:
    """Outputs of `rows` rows on the device, and the host's copies."""

    parities = 2

    def __init__(self, rows: int, width: int, device: Device, compute: Handle, out: Handle) -> None:
        """`width`: K + 1."""
        self._device, self._compute, self._out = device, compute, out
        self._rows, self._width = rows, width
        sizes = {"accepted": 1, "committed": width, "next_tokens": width, "next_kv_len": 1}
        self._memory = [
            {name: device.allocate(8 * rows * size) for name, size in sizes.items()} for _ in range(self.parities)
        ]
        self._host = [device.host_array((rows * (2 * width + 1),), np.int64) for _ in range(self.parities)]
        self._computed = [device.event() for _ in range(self.parities)]
        self._copied = [device.event() for _ in range(self.parities)]
        self._waiting: list[_Waiting | None] = [None] * self.parities
        self._count = 0

    def addresses(self, parity: int) -> dict[str, Address]:
        """Of the outputs of one set."""
        return dict(self._memory[parity])

    def begin(self) -> int:
        """The set the next step writes: its last results are read, so that they cannot be lost."""
        parity = self._count % self.parities
        self._count += 1
        if (earlier := self._waiting[parity]) is not None:
            earlier.result()
        return parity

    def finish(self, parity: int, slots: tuple[int, ...], *, rows: Sequence[int], columns: int) -> _Waiting:
        """Copies the set out once the step is done; `rows` are the slots' rows in it, `columns` = W + 1."""
        device, memory, host = self._device, self._memory[parity], self._host[parity]
        device.record(self._computed[parity], self._compute)
        device.wait(self._out, self._computed[parity])
        highest = max(rows) + 1
        accepted, committed = host[:highest], host[self._rows : self._rows + highest * columns]
        device.download(accepted, memory["accepted"], self._out)
        device.download(committed, memory["committed"], self._out)
        pending = host[-highest * self._width :]
        device.download(pending, memory["next_tokens"], self._out)
        device.record(self._copied[parity], self._out)
        copies = accepted, committed.reshape(-1, columns), pending.reshape(-1, self._width)
        waiting = _Waiting(device, self._copied[parity], slots, list(rows), copies)
        self._waiting[parity] = waiting
        return waiting

    def settle(self) -> None:
        """Reads what was launched and not read yet; who asks for a result later is told what the device said."""
        for waiting in self._waiting:
            if waiting is not None:
                with suppress(EngineError):
                    waiting.result()


class _Waiting:
    """A launched step's result."""

    def __init__(
        self,
        device: Device,
        copied: Handle,
        slots: tuple[int, ...],
        rows: list[int],
        copies: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    ) -> None:
        self._device, self._copied = device, copied
        self._slots, self._rows = slots, rows
        self._accepted, self._committed, self._pending = copies
        self._result: StepResult | EngineError | None = None

    def result(self) -> StepResult:
        """Waits for the copy. Raises EngineError if the device failed."""
        if self._result is None:
            self._result = self._read()
        if isinstance(self._result, EngineError):
            raise self._result
        return self._result

    def _read(self) -> StepResult | EngineError:
        try:
            self._device.synchronise(self._copied)
        except EngineError as error:
            return error
        return StepResult(
            slots=self._slots,
            accepted=self._accepted[self._rows].copy(),
            committed=self._committed[self._rows].copy(),
            drafts=self._pending[self._rows, 1:],
        )
