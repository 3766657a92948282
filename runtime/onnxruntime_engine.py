"""ONNX Runtime: one graph, dynamic in batch, width, chunk and context, serves everything.

The caches' first dimension is the slot table. A step runs the range of slots that holds its rows; rows between
that are not stepped are computed and dropped: what is written beyond a row's length is overwritten later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphspec.bundle import Bundle, Host, rebuild_command
from graphspec.errors import BundleError
from graphspec.manifest import Graph, Manifest

from .caches import Caches, PackedCaches, Placed, zeros
from .cuda_provider import CUDA, CudaCaches, check_used, is_available, memory_of, provider_of
from .engine import NO_TOKEN, Chunk, Pending, StepResult
from .sampling import SamplingParams

Array = NDArray[Any]

_RESULTS = ("accepted", "committed", "next_tokens", "next_kv_len")
_LOGITS = "logits"
NUM_DRAFTS = "num_drafts"
"""Input of a graph that drafts on demand: i64[], how many."""
_SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "uniform"})
"""Inputs of a graph that samples."""
_PLACES = 1024
"""Beside the slots."""
_NEEDED = frozenset({"tokens", "kv_len", "n_tokens", "n_known", "next_token", "verify_offsets", "key_positions"})
"""Inputs of every graph, beside its states."""
_KNOWN = _NEEDED | _SAMPLING | {NUM_DRAFTS}
_TYPES = {
    f"tensor({theirs})": ours
    for theirs, ours in (("float", "float32"), ("float16", "float16"), ("int64", "int64"), ("int32", "int32"))
}
"""ONNX Runtime's names of types, and the manifest's."""


class OnnxRuntimeEngine:
    """Engine on ONNX Runtime's CPU provider, or its CUDA one (not run yet); a worker thread is the device."""

    def __init__(
        self, bundle: Bundle, *, num_slots: int | None = None, num_threads: int | None = None, profile: bool = False
    ) -> None:
        manifest = bundle.manifest
        self.num_slots = num_slots or manifest.max_batch_size
        self.capacity = manifest.capacity
        self._width = manifest.num_draft_tokens
        self._fewest_tokens = manifest.fewest_tokens
        self._graph = _graph(bundle)
        self._session = _session(bundle, self._graph, num_threads or most_threads(manifest), profile=profile)
        self._inputs = frozenset(spec.name for spec in self._graph.inputs)
        self._vocabulary = _vocabulary(self._graph)
        _check_interface(self._session, bundle, self._graph)
        try:
            self._caches = _caches(manifest, self.num_slots)
            self._uniform = np.zeros((self.num_slots, self.capacity, 1), np.float32)
        except (MemoryError, ValueError) as error:  # ValueError: more than any machine could have
            raise BundleError(
                f"{bundle.root} needs more memory than there is: {self.num_slots} rows of {self.capacity} positions; "
                "load it with a smaller max_batch_size, or build it with a smaller --max-length"
            ) from error
        self._tokens = np.full((self.num_slots, self._width + 1), NO_TOKEN, np.int64)
        self._kv_len = np.zeros(self.num_slots, np.int64)
        self._sampling: dict[str, Array] = {
            "temperature": np.zeros(self.num_slots, np.float32),
            "top_k": np.zeros(self.num_slots, np.int64),
            "top_p": np.ones(self.num_slots, np.float32),
            "min_p": np.zeros(self.num_slots, np.float32),
        }
        self._on = memory_of(manifest.backend.device_class)
        self._is_cuda = manifest.backend.device_class == CUDA
        self._bindings: dict[tuple[str, int, int, bool], tuple[int, Any]] = {}
        self._device = ThreadPoolExecutor(1, thread_name_prefix="graphspec-engine")
        self._warm_up()

    @property
    def drafts_on_demand(self) -> bool:
        """Where the drafter has weights; not in bundles made before there was a choice."""
        return NUM_DRAFTS in self._inputs

    @property
    def num_places(self) -> int:
        """As many as anybody could fill, in the memory of a CPU."""
        return 0 if self._is_cuda else self.num_slots + _PLACES

    def copy(self, source: int, target: int, length: int) -> None:
        """Queued behind what was launched before."""
        self._device.submit(self._caches.copy, source, target, length)

    def admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], *, kept: int = 0) -> None:
        """Queued behind what was launched before."""
        self._device.submit(self._admit, slot, params, uniform, kept)

    def prefill(self, chunk: Chunk) -> Pending:
        """Runs the chunk's tokens in one step of that one row."""
        return self._device.submit(self._prefill, chunk)

    def step(self, slots: Sequence[int], width: int, *, num_drafts: int | None = None, logits: bool = False) -> Pending:
        """Verifies `width` drafts in each of the rows and drafts anew."""
        return self._device.submit(self._step, tuple(slots), width, num_drafts, logits)

    def drafts(self, slot: int) -> NDArray[np.int64]:
        """Waits for what was launched."""
        future: Future[NDArray[np.int64]] = self._device.submit(lambda: self._tokens[slot].copy())
        return future.result()

    def replace_drafts(self, slot: int, drafts: NDArray[np.int64]) -> None:
        """The row's drafts become these, i64[K] (-1: none): for benchmarks. Queued behind what was launched before."""
        self._device.submit(np.copyto, self._tokens[slot, 1:], drafts)

    def end_profiling(self) -> str:
        """Path of ONNX Runtime's profile, of an engine made with profile=True."""
        return str(self._device.submit(self._session.end_profiling).result())

    def close(self) -> None:
        """Waits for what was launched, then ends the worker."""
        self._device.shutdown()

    def _warm_up(self) -> None:
        """The first step touches every page of the weights: better at load than in the first request."""
        self.step([0], self._width).result()
        self._kv_len[0] = 0

    def _admit(self, slot: int, params: SamplingParams, uniform: NDArray[np.float32], kept: int) -> None:
        self._tokens[slot] = NO_TOKEN
        self._kv_len[slot] = kept
        self._sampling["temperature"][slot] = 0.0 if params.greedy else params.temperature
        self._sampling["top_k"][slot] = max(params.top_k, 0)
        self._sampling["top_p"][slot] = params.top_p
        self._sampling["min_p"][slot] = params.min_p
        self._uniform[slot] = uniform

    def _prefill(self, chunk: Chunk) -> StepResult:
        length = len(chunk.tokens)
        counts = {"n_tokens": length, "n_known": length, "next_token": chunk.next_token}
        offsets = np.arange(1 - max(chunk.num_logits, 1), 1)
        columns = self._columns(1, length)
        placed = self._caches.place((chunk.slot,), self._kv_len, self._ahead(columns), alone=True)
        tokens = np.full((1, columns), NO_TOKEN)
        tokens[0, :length] = chunk.tokens
        num_drafts = chunk.num_drafts if chunk.next_token == NO_TOKEN else 0
        logits = chunk.num_logits > 0
        return self._run((chunk.slot,), tokens, placed, num_drafts, offsets=offsets, counts=counts, logits=logits)

    def _step(self, slots: tuple[int, ...], width: int, num_drafts: int | None, logits: bool) -> StepResult:
        columns = self._columns(len(slots), width + 1)
        placed = self._caches.place(slots, self._kv_len, self._ahead(columns), alone=False)
        tokens = self._tokens[placed.slots.start : placed.slots.stop, :columns]
        counts = {"n_tokens": width + 1, "n_known": 1, "next_token": NO_TOKEN}
        offsets = np.arange(width + 1)
        return self._run(slots, tokens, placed, num_drafts, offsets=offsets, counts=counts, logits=logits)

    def _columns(self, rows: int, length: int) -> int:
        """Tokens to run of each row for `length` real ones; the others are padding."""
        return max(length, -(-self._fewest_tokens // rows))

    def _ahead(self, length: int) -> int:
        """Positions behind those that a row holds which running `length` tokens and drafting writes or looks at."""
        return length + self._width + 1

    def _run(
        self,
        slots: tuple[int, ...],
        tokens: Array,
        placed: Placed,
        num_drafts: int | None,
        *,
        offsets: Array,
        counts: dict[str, int],
        logits: bool,
    ) -> StepResult:
        rows = slice(placed.slots.start, placed.slots.stop)
        feeds: dict[str, Array] = {name: np.full(len(tokens), value, np.int64) for name, value in counts.items()}
        feeds |= {name: values[rows] for name, values in self._sampling.items()}
        feeds["tokens"] = np.ascontiguousarray(tokens)
        if self._is_cuda:  # there a binding would keep what the table held when it was bound
            feeds["uniform"] = self._uniform[rows]
        feeds["kv_len"] = placed.lengths
        feeds["verify_offsets"] = offsets
        feeds["key_positions"] = np.arange(placed.visible)
        asked = self._width if num_drafts is None or not self.drafts_on_demand else num_drafts
        feeds[NUM_DRAFTS] = np.array(asked)
        binding = self._binding(placed, logits)
        for name in self._inputs & feeds.keys():
            binding.bind_cpu_input(name, feeds[name])
        results = self._bind_results(binding, len(tokens), len(offsets), logits=logits)
        begun = time.perf_counter()
        self._session.run_with_iobinding(binding)
        seconds = time.perf_counter() - begun
        inside = [slot - rows.start for slot in slots]
        if inside != list(range(len(tokens))):
            results = {name: values[inside] for name, values in results.items()}
        chosen = list(slots)
        self._tokens[chosen] = results["next_tokens"]
        self._kv_len[chosen] = results["next_kv_len"]
        # Columns below offset 0 repeat the prompt.
        return StepResult(
            slots=slots,
            accepted=results["accepted"],
            committed=results["committed"][:, -offsets[0] :],
            drafts=results["next_tokens"][:, 1 : asked + 1],
            logits=results.get(_LOGITS),
            seconds=seconds,
        )

    def _bind_results(self, binding: Any, rows: int, asked: int, *, logits: bool) -> dict[str, Array]:
        """Memory of the step's own, which the caller keeps. Were it the session's, every state would be wrapped to get
        at these few."""
        shapes: dict[str, tuple[int, ...]] = {
            "accepted": (rows,),
            "committed": (rows, asked),
            "next_tokens": (rows, self._width + 1),
            "next_kv_len": (rows,),
        }
        results: dict[str, Array] = {name: np.empty(shape, np.int64) for name, shape in shapes.items()}
        if logits:
            results[_LOGITS] = np.empty((rows, asked, self._vocabulary), np.float32)
        for name, values in results.items():
            binding.bind_output(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)
        return results

    def _binding(self, placed: Placed, logits: bool) -> Any:
        """States and tables of a range of slots, bound until they move: the same memory as input and output. One for
        steps with logits and one for those without, which do not copy them."""
        (name, moves), slots = placed.memory, placed.slots
        key = (name, slots.start, slots.stop, logits)
        bound_at, binding = self._bindings.get(key, (-1, None))
        if bound_at == moves:
            return binding
        binding = self._session.io_binding()
        if "uniform" in self._inputs and not self._is_cuda:
            table = onnxruntime.OrtValue.ortvalue_from_numpy(self._uniform[slots.start : slots.stop])
            binding.bind_ortvalue_input("uniform", table)
        for state in placed.states():
            where = (self._on, 0, state.dtype, state.shape, state.address)
            binding.bind_input(state.input, *where)
            binding.bind_output(state.output, *where)
        self._bindings[key] = moves, binding
        return binding


def most_threads(manifest: Manifest) -> int:
    """Threads that keep the bits, at most one for each core.

    With more threads than key/value heads, a product of attention is split between two of them when it is long
    enough, and its sums are then added up in another order (MLAS): a row would depend on the length of a step.
    """
    heads = [state.shape[1] for state in manifest.states if state.input.startswith("target.")]
    return min([os.cpu_count() or 1, *(size for size in heads if isinstance(size, int))])


def host() -> Host:
    """This machine and its ONNX Runtime, as a bundle is checked against."""
    import platform

    machine = platform.machine()
    return Host(
        backend="onnxruntime",
        version=onnxruntime.__version__,
        # Whether products with int8 weights are exact here is asked of the CPU itself, once the bundle is open.
        # Likewise whether CUDA is really there, of the session.
        device_classes=frozenset({machine, f"{machine}-vnni"} | ({CUDA} if is_available() else set())),
    )


def _graph(bundle: Bundle) -> Graph:
    """The one that serves everything."""
    found = [graph for graph in bundle.manifest.graphs if graph.role != "portable"]
    if len(found) != 1 or found[0].role != "any" or found[0].batch_sizes != "dynamic":
        names = ", ".join(graph.name for graph in found)
        raise BundleError(
            f"{bundle.root} has the graphs {names}, and this server runs one graph for everything; rebuild it with: "
            f"{rebuild_command(bundle.manifest.build_command, bundle.root)}"
        )
    return found[0]


def _session(bundle: Bundle, graph: Graph, num_threads: int | None, *, profile: bool) -> Any:
    _check_exact(bundle)
    options = _options(num_threads)
    options.enable_profiling = profile
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.root))
    model = bundle.read(graph.file)
    device_class = bundle.manifest.backend.device_class
    try:
        session = onnxruntime.InferenceSession(model, options, providers=[provider_of(device_class)])
    except Exception as error:
        raise BundleError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {graph.file} of {bundle.root}: "
            f"{' '.join(str(error).split())}; rebuild it with: "
            f"{rebuild_command(bundle.manifest.build_command, bundle.root)}"
        ) from error
    check_used(session, device_class, bundle.root)
    return session


def _check_interface(session: Any, bundle: Bundle, graph: Graph) -> None:
    """Raises BundleError where the graph in the file is not the one that the manifest describes, or not one that
    this engine can feed: hashes say that files are as they were written, not that they belong together."""
    manifest = bundle.manifest
    states = {state.input for state in manifest.states}
    problems = []
    for what, specs, found in (
        ("input", graph.inputs, session.get_inputs()),
        ("output", graph.outputs, session.get_outputs()),
    ):
        said = {spec.name: (spec.dtype, spec.shape) for spec in specs}
        real = {value.name: (_TYPES.get(value.type, value.type), tuple(value.shape)) for value in found}
        problems += [f"{what} {name}" for name in sorted(said.keys() | real) if said.get(name) != real.get(name)]
    problems += [f"input {name}" for name in sorted(_NEEDED - {spec.name for spec in graph.inputs})]
    problems += [f"input {spec.name}" for spec in graph.inputs if spec.name not in states | _KNOWN]
    needed = (*_RESULTS, _LOGITS) if "logprobs" in manifest.capabilities else _RESULTS
    problems += [f"output {name}" for name in needed if name not in {spec.name for spec in graph.outputs}]
    samples = {spec.name for spec in graph.inputs} & _SAMPLING
    if samples not in (_SAMPLING, set()) or bool(samples) != ("greedy" not in manifest.variants):
        problems.append("sampling")
    if problems:
        raise BundleError(
            f"{bundle.root} contradicts itself: {graph.file} is not as the manifest or this server expects "
            f"({', '.join(dict.fromkeys(problems))}); rebuild it with: "
            f"{rebuild_command(manifest.build_command, bundle.root)}"
        )


def _vocabulary(graph: Graph) -> int:
    """V of its logits; 0: it gives none."""
    sizes = [spec.shape[-1] for spec in graph.outputs if spec.name == _LOGITS]
    return sizes[0] if sizes and isinstance(sizes[0], int) else 0


def _options(num_threads: int | None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if num_threads:
        options.intra_op_num_threads = num_threads
    return options


def _check_exact(bundle: Bundle) -> None:
    """Products uint8 × int8 saturate on a CPU without VNNI: wrong text, and no error."""
    if not bundle.manifest.backend.device_class.endswith("-vnni"):
        return
    probe = bundle.read("graphs/int8_probe.onnx")
    session = onnxruntime.InferenceSession(probe, _options(1), providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"rows": np.full((1, 64), 255, np.uint8)})
    if not (product == 255 * 127 * 64).all():
        raise BundleError(
            f"{bundle.root} was built for CPUs with VNNI ({bundle.manifest.backend.device_class}), and this one "
            "rounds such products; rebuild it here with: "
            f"{rebuild_command(bundle.manifest.build_command, bundle.root)}"
        )


def _caches(manifest: Manifest, num_slots: int) -> Caches:
    """Raises MemoryError or ValueError if this machine could not hold all rows at their longest."""
    for state in manifest.states:
        zeros(state, num_slots, manifest.capacity)  # reserved, not touched
    if manifest.backend.device_class == CUDA:
        return CudaCaches(manifest, num_slots, memory_of(CUDA))
    return PackedCaches(manifest, num_slots)
