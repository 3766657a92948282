"""Engines of fixed width and batch on a GPU: one captured launch a step, results copied out beside the next one.

Row state lies on the device and is changed in place: a step runs the rows of the smallest batch bucket that
reaches its highest slot, and rows of it that are not stepped are not `active`: they keep their tokens and length.

    compute stream   step N ──▶ state ← outputs[N % 2] ──▶ step N+1 ──▶ …
    copy stream                  outputs[N % 2] ──▶ host          (the host waits for this alone)

Not run on a GPU yet: the tests run it on a stand-in for the device (tests/support/fake_device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphspec.bundle import Bundle
from graphspec.errors import BundleError, EngineError
from graphspec.manifest import Graph, Manifest

from .device import Address, Device, Library, Plan
from .device_results import Results
from .device_rows import RowState
from .engine import Chunk, Pending
from .sampling import SamplingParams
from .weights_file import stored_tensors

Array = NDArray[Any]
WEIGHTS = "weights/model.safetensors"


class TensorRtEngine:
    """Engine on TensorRT or TensorRT-RTX."""

    def __init__(self, bundle: Bundle, library: Library, device: Device, *, num_slots: int | None = None) -> None:
        manifest = bundle.manifest
        self.num_slots = num_slots or manifest.max_batch_size
        self.capacity = manifest.capacity
        self._device = device
        self._steps = {
            (graph.batch_sizes[0], graph.widths[0]): graph
            for graph in manifest.graphs
            if graph.role == "step" and graph.batch_sizes != "dynamic"
        }
        self._buckets = sorted({batch for batch, _ in self._steps})
        rows = self._bucket(self.num_slots)
        self._compute, self._out = device.stream(), device.stream()
        self._rows = RowState(manifest, rows, device, self._compute)
        self._results = Results(rows, manifest.num_draft_tokens + 1, device, self._compute, self._out)
        self._weights = _upload_weights(bundle, device, self._compute, known=self._rows.addresses().keys())
        used = {key: graph for key, graph in self._steps.items() if key[0] <= rows}
        plans = {graph.name: library.load(bundle.read(graph.file), graph.file) for graph in used.values()}
        self._prefills = {
            _chunk_size(graph): library.load(bundle.read(graph.file), graph.file)
            for graph in manifest.graphs
            if graph.role == "prefill"
        }
        self._rows.check_in_place({source for plan in self._prefills.values() for source in plan.aliases.values()})
        everything = [*plans.values(), *self._prefills.values()]
        self._scratch = device.allocate(max(plan.scratch for plan in everything))
        self._kept = _separate_outputs(manifest, everything, rows, device)
        self._chunk = {name: device.allocate(8 * size) for name, size in _chunk_inputs(self._prefills)}
        self._launches = {
            (*key, parity): self._prepare(plans[graph.name], key[0], parity)
            for key, graph in used.items()
            for parity in range(self._results.parities)
        }
        self._rows.reset_all()

    @property
    def drafts_on_demand(self) -> bool:
        """No: a step is one graph, whatever is done with its drafts."""
        return False

    @property
    def num_places(self) -> int:
        """The slots: nothing is kept on the host."""
        return self.num_slots

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: ARG002
        """Whole rows, which a GPU copies in less time than it takes to say which part of them."""
        self._rows.copy(source, target)

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        """Ordered behind what was launched before."""
        self._rows.admit(slot, params, uniform, kept)

    def step(
        self,
        slots: Sequence[int],
        width: int,
        *,
        num_drafts: int | None = None,  # noqa: ARG002
        logits: bool = False,
    ) -> Pending:
        """Verifies `width` drafts in each of the rows and drafts K anew."""
        _refuse_logits(logits)
        chosen = tuple(slots)
        bucket = self._bucket(max(chosen) + 1)
        self._rows.activate(chosen)
        parity = self._results.begin()
        self._launches[bucket, width, parity]()
        return self._results.finish(parity, chosen, rows=chosen, columns=width + 1)

    def prefill(self, chunk: Chunk) -> Pending:
        """Runs the chunk in pieces of the sizes that the bundle has engines for."""
        _refuse_logits(chunk.num_logits > 0)
        pieces = list(_pieces(chunk, sorted(self._prefills)))
        for piece, size in pieces[:-1]:
            self._prefill(piece, size)
        return self._prefill(*pieces[-1])

    def drafts(self, slot: int) -> NDArray[np.int64]:
        """Waits for what was launched."""
        return self._rows.tokens_of(slot)

    def close(self) -> None:
        """Waits for what was launched, then frees the device's memory."""
        try:
            self._results.settle()
        finally:
            self._device.close()

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= rows)

    def _prepare(self, plan: Plan, bucket: int, parity: int) -> Callable[[], None]:
        """What launches a step. Run once with no row active before it is captured: libraries set up lazily."""
        work = partial(self._launch, plan, self._rows.addresses(), range(bucket), parity)
        self._rows.activate(())
        work()
        return self._device.capture(self._compute, work) if plan.can_be_captured(self._compute) else work

    def _prefill(self, chunk: Chunk, size: int) -> Pending:
        """One engine call. Padding after the chunk's tokens is written beyond the row's length."""
        plan, slot = self._prefills[size], chunk.slot
        tokens = np.zeros((1, size), np.int64)
        tokens[0, : len(chunk.tokens)] = chunk.tokens
        inputs = {"tokens": tokens, "n_tokens": len(chunk.tokens), "next_token": chunk.next_token}
        for name, value in inputs.items():
            self._device.upload(self._chunk[name], np.atleast_1d(np.asarray(value, np.int64)), self._compute)
        parity = self._results.begin()
        self._launch(plan, {**self._rows.addresses_of(slot), **self._chunk}, range(slot, slot + 1), parity)
        return self._results.finish(parity, (slot,), rows=(0,), columns=1)

    def _launch(self, plan: Plan, inputs: Mapping[str, Address], rows: range, parity: int) -> None:
        """Runs the engine on those rows, and takes their tokens, lengths and states from it."""
        outputs = self._results.addresses(parity)
        addresses = {**self._weights, **inputs, **outputs}
        plan.bind(addresses | self._state_outputs(plan, addresses), self._scratch)
        plan.run(self._compute)
        self._rows.take(outputs, rows)
        self._keep(plan, rows)

    def _state_outputs(self, plan: Plan, addresses: Mapping[str, Address]) -> dict[str, Address]:
        """Where updated states go: in place where the engine can, else to memory of their own."""
        found = {output: addresses[source] for output, source in plan.aliases.items()}
        return found | {name: at for name, (at, _) in self._kept.items() if name not in found}

    def _keep(self, plan: Plan, rows: range) -> None:
        """Copies states that were not updated in place back to where the next step reads them."""
        for output, (at, source) in self._kept.items():
            if output not in plan.aliases:
                self._rows.copy_state(source, at, rows[0], len(rows))


def _upload_weights(bundle: Bundle, device: Device, stream: Any, *, known: Collection[str]) -> dict[str, Address]:
    """One copy for every engine; none where they hold their own. Raises BundleError for one of another size than the
    engines read, and for one that is missing; `known` inputs are no weights."""
    wanted = {
        spec.name: spec.nbytes
        for graph in bundle.manifest.graphs
        for spec in graph.inputs
        if spec.name not in (*known, "n_tokens", "next_token")
    }
    addresses = dict[str, Address]()
    stored = stored_tensors(bundle.path(WEIGHTS)) if WEIGHTS in bundle.manifest.files else ()
    for name, content in stored:
        if content.nbytes != wanted.get(name, content.nbytes):
            raise BundleError(
                f"{WEIGHTS} holds {content.nbytes} bytes of {name}, and the engines read {wanted[name]}; rebuild the "
                "bundle"
            )
        addresses[name] = device.allocate(content.nbytes)
        device.upload(addresses[name], content, stream)
    if missing := sorted(wanted.keys() - addresses.keys()):
        raise BundleError(f"{WEIGHTS} lacks {len(missing)} weights that the engines read ({missing[0]} …): rebuild it")
    return addresses


def _separate_outputs(
    manifest: Manifest, plans: Iterable[Plan], rows: int, device: Device
) -> dict[str, tuple[Address, str]]:
    """Memory for the updated states that some engine does not write in place, and the state each belongs to."""
    in_place = set.intersection(*(set(plan.aliases) for plan in plans))
    return {
        state.output: (device.allocate(rows * state.row_bytes(manifest.capacity)), state.input)
        for state in manifest.states
        if state.output not in in_place
    }


def _refuse_logits(asked: bool) -> None:
    if asked:
        raise EngineError("logits were asked for, and engines of TensorRT keep them on the device")


def _chunk_size(graph: Graph) -> int:
    (size,) = (spec.shape[1] for spec in graph.inputs if spec.name == "tokens")
    if not isinstance(size, int):
        raise BundleError(f"graph {graph.name} has no fixed chunk size; rebuild the bundle")
    return size


def _chunk_inputs(prefills: Mapping[int, Plan]) -> list[tuple[str, int]]:
    return [("tokens", max(prefills)), ("n_tokens", 1), ("next_token", 1)]


def _pieces(chunk: Chunk, sizes: Sequence[int]) -> Iterable[tuple[Chunk, int]]:
    """The chunk in the fewest pieces, each with the smallest engine that holds it: reading the weights is most of what
    a call costs, and padding costs nothing beside it."""
    tokens, start = chunk.tokens, 0
    while start < len(tokens):
        left = len(tokens) - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        end = min(start + size, len(tokens))
        following = tokens[end] if end < len(tokens) else chunk.next_token
        yield Chunk(slot=chunk.slot, tokens=tokens[start:end], next_token=following), size
        start = end
