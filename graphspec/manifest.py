"""What a bundle says about itself: manifest.json as a type, and the rules it keeps.

Reading one from disk, with the errors a user sees, is in bundle.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

FORMAT: Literal[1] = 1
# 1  2026-11  first format

Backend = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
Encoding = Literal["float32", "int8", "int4", "fp8", "bfloat16", "float16"]
DType = Literal[
    "bool", "int4", "uint4", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "bfloat16", "float16", "float32"
]
_STATE_BYTES = {"bool": 1, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "float32": 4}
"""Of one value of a state."""
_BITS = {name: 8 * size for name, size in _STATE_BYTES.items()}
_BITS |= {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "float8_e4m3fn": 8}
Role = Literal["step", "prefill", "any", "portable"]


def _relative(path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")) or not path.isprintable() or set(path) & set("\\:"):
        raise ValueError(f"{path!r} is not a plain relative path inside the bundle")
    return path


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _alphabetical(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(min_length=1)]
RelativePath = Annotated[str, AfterValidator(_relative)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Widths = Annotated[tuple[NonNegative, ...], Field(min_length=1), AfterValidator(_ascending)]
"""Numbers of verified draft tokens; sorted, each once, whatever order they are given in."""
Sizes = Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_ascending)] | Literal["dynamic"]
"""Every size a graph was built for, or "dynamic": any."""
Names = Annotated[tuple[Name, ...], AfterValidator(_alphabetical)]
"""A set of names; sorted, so that equal sets are written alike."""
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)*")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Model(_Part):
    """One checkpoint of the pair, as it was when the bundle was built."""

    name: Name
    """What the user called it: a path or a hub id."""
    config_sha256: Sha256
    weights_sha256: Sha256
    model_type: Name
    vocab_size: Count


class Pair(_Part):
    """Target and draft; an n-gram drafter has no draft checkpoint."""

    target: Model
    draft: Model | None = None


class BackendInfo(_Part):
    """What the graphs were compiled with and for."""

    name: Backend
    version: Version
    """Library version at build time."""
    min_version: Version | None = None
    """Oldest library that runs the graphs; None: only `version` itself does."""
    device_class: Name
    """For example "x86_64", "x86_64-vnni" or "sm90"; a server compares it with the classes it belongs to."""


class TensorSpec(_Part):
    """One input or output of a graph."""

    name: Name
    dtype: DType
    shape: tuple[NonNegative | Name, ...]
    """A name stands for a size known only when the graph runs."""

    @property
    def nbytes(self) -> int | None:
        """None where a size is not known."""
        sizes = [dim for dim in self.shape if isinstance(dim, int)]
        return prod(sizes) * _BITS[self.dtype] // 8 if len(sizes) == len(self.shape) else None


class Graph(_Part):
    """One ONNX graph or engine."""

    name: Name
    file: RelativePath
    role: Role
    """"step" verifies, "prefill" reads prompts, "any" does both; "portable" is kept to be lowered again
    and never run."""
    widths: Widths
    """Verify widths it serves."""
    batch_sizes: Sizes
    variant: Name | None = None
    """Which of the manifest's variants it is; None: it serves them all."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[Name, Name] = Field(default_factory=dict)
    """Output name → input name whose memory it updates in place."""

    @model_validator(mode="after")
    def _names_and_aliases_fit(self) -> Self:
        inputs, outputs = _by_name(self.inputs, "input"), _by_name(self.outputs, "output")
        for output, input_ in self.aliases.items():
            if output not in outputs or input_ not in inputs:
                raise ValueError(f"alias {output} → {input_} names no output and input of graph {self.name}")
            if (outputs[output].dtype, outputs[output].shape) != (inputs[input_].dtype, inputs[input_].shape):
                raise ValueError(f"alias {output} → {input_} of graph {self.name} differs in dtype or shape")
        _refuse_twice(self.aliases.values(), f"inputs aliased by two outputs of graph {self.name}")
        return self


class StateSpec(_Part):
    """Memory a row keeps between steps: target and draft caches, token history."""

    input: Name
    output: Name
    dtype: DType
    shape: tuple[Count | Literal["batch", "capacity"], ...]
    """"batch" stands for the number of slots, "capacity" for the manifest's."""

    def sizes(self, batch: int, capacity: int) -> list[int]:
        """The shape, of so many rows and positions."""
        named = {"batch": batch, "capacity": capacity}
        return [named[dim] if isinstance(dim, str) else dim for dim in self.shape]

    def row_bytes(self, capacity: int) -> int:
        """Of one row of `capacity` positions."""
        return _STATE_BYTES[self.dtype] * prod(self.sizes(1, capacity))


class FileEntry(_Part):
    """One file of the bundle."""

    size: NonNegative
    """Bytes."""
    sha256: Sha256


class Manifest(_Part):
    """manifest.json. Every field is checked when one is made, read or written."""

    format: Literal[1] = FORMAT
    graphspec_version: Name
    """Which graphspec wrote it."""
    created: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    """UTC, seconds. For people only: nothing depends on it."""
    build_command: Name
    """The command line that builds this bundle again, on the machine and at the place where it was built."""
    key: Sha256
    """Hash of everything the build read (`bundle.input_key`)."""
    architecture: Name
    methods: Names
    """Values of --speculative-method the architecture answers to."""
    capabilities: Names = ()
    pair: Pair
    speculative: Mapping[str, JsonValue] = Field(default_factory=dict)
    """The SpeculativeConfig as given."""
    num_draft_tokens: NonNegative
    """K: drafts proposed each step at most."""
    widths: Widths
    """Verify widths a step may use, each 0..K."""
    max_batch_size: Count
    capacity: Count
    """S: positions in each row of a cache."""
    max_length: Count
    """Prompt and output tokens one request may use, at most S - (K + 2)."""
    prefill_chunks: Sizes
    """Numbers of prompt tokens one prefill call may take."""
    encoding: Encoding
    variants: Names = ()
    eos_token_ids: tuple[NonNegative, ...]
    backend: BackendInfo
    row_invariant: bool | None = None
    """Whether a row's result was found bit-equal in every batch and width on the build machine; None: not
    checked."""
    fewest_tokens: Annotated[Count, Field(exclude_if=lambda fewest: fewest == 1)] = 1
    """Tokens of a step, all rows together, below which products take another path: what has fewer is padded. Not
    written where it is 1: a graphspec that does not know the field reads every bundle that has no need of it."""
    graphs: Annotated[tuple[Graph, ...], Field(min_length=1)]
    states: tuple[StateSpec, ...]
    files: Mapping[RelativePath, FileEntry]
    """Every file but manifest.json and its signature, by its path inside the bundle."""
    checksum: Sha256 | Literal[""] = ""
    """Hash of every other field of the file; empty until it is written (`bundle.encode`)."""

    @property
    def size(self) -> int:
        """Bytes of every file but manifest.json."""
        return sum(entry.size for entry in self.files.values())

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        slack = self.num_draft_tokens + 2
        if self.widths[-1] > self.num_draft_tokens:
            raise ValueError(f"width {self.widths[-1]} is more than the {self.num_draft_tokens} drafted tokens")
        if self.max_length + slack > self.capacity:
            raise ValueError(f"max_length {self.max_length} + {slack} is over the capacity {self.capacity}")
        return self

    @model_validator(mode="after")
    def _graphs_fit(self) -> Self:
        _refuse_twice((graph.name for graph in self.graphs), "graphs of one name")
        for graph in self.graphs:
            self._check_graph(graph)
        steps = {width for graph in self.graphs if graph.role in ("step", "any") for width in graph.widths}
        if unserved := sorted(set(self.widths) - steps):
            raise ValueError(f"no step graph serves the widths {unserved}")
        if not any(graph.role in ("prefill", "any") for graph in self.graphs):
            raise ValueError("no graph prefills")
        return self

    @model_validator(mode="after")
    def _each_step_has_one_graph(self) -> Self:
        runnable = [graph for graph in self.graphs if graph.role != "portable"]
        for first, second in combinations(runnable, 2):
            if _serve_the_same(first, second):
                raise ValueError(f"graphs {first.name} and {second.name} serve the same steps")
        return self

    def _check_graph(self, graph: Graph) -> None:
        if graph.file not in self.files:
            raise ValueError(f"graph {graph.name}: {graph.file} is not one of the bundle's files")
        if unknown := sorted(set(graph.widths) - set(self.widths)):
            raise ValueError(f"graph {graph.name}: widths {unknown} are not the bundle's")
        if graph.batch_sizes != "dynamic" and graph.batch_sizes[-1] > self.max_batch_size:
            raise ValueError(f"graph {graph.name}: batch {graph.batch_sizes[-1]} is over {self.max_batch_size}")
        if graph.variant is not None and graph.variant not in self.variants:
            raise ValueError(f"graph {graph.name}: {graph.variant} is not one of the bundle's variants")
        if graph.role == "portable":
            return
        # What the fused step is called with (graphspec.architectures.step).
        drafted = [spec.shape[-1] for spec in graph.outputs if spec.name == "next_tokens" and spec.shape]
        if any(isinstance(size, int) and size != self.num_draft_tokens + 1 for size in drafted):
            raise ValueError(f"graph {graph.name} drafts {drafted[0]} - 1 tokens, not {self.num_draft_tokens}")
        if (graph.variant or self.variants) in ("greedy", ("greedy",)) and "temperature" in _names(graph.inputs):
            raise ValueError(f"graph {graph.name} samples, and the bundle says that it is greedy")

    @model_validator(mode="after")
    def _states_fit(self) -> Self:
        _refuse_twice((state.input for state in self.states), "states of one input")
        runnable = [graph for graph in self.graphs if graph.role != "portable"]
        for state in self.states:
            inputs = [(graph, spec) for graph in runnable for spec in graph.inputs if spec.name == state.input]
            if not inputs:
                raise ValueError(f"state {state.input} is an input of no graph")
            for graph, spec in inputs:
                if spec.dtype != state.dtype or not self._is_shape(spec, state):
                    raise ValueError(f"state {state.input} differs from the input of graph {graph.name}")
                if state.output not in (output.name for output in graph.outputs):
                    raise ValueError(f"state {state.output} is no output of graph {graph.name}")
        known = {state.input for state in self.states}
        for graph in runnable:
            if strange := sorted({*graph.aliases.values()} - known):
                raise ValueError(f"graph {graph.name} updates {', '.join(strange)} in place, which is no state")
        return self

    def _is_shape(self, spec: TensorSpec, state: StateSpec) -> bool:
        """Whether a graph's input can be the state's memory: names in the graph stand for any size."""
        sizes = [self.capacity if dim == "capacity" else dim for dim in state.shape]
        pairs = zip(spec.shape, sizes, strict=False)
        return len(spec.shape) == len(sizes) and all(
            isinstance(taken, str) or kept in (taken, "batch") for taken, kept in pairs
        )

    @model_validator(mode="after")
    def _files_fit(self) -> Self:
        if "manifest.json" in self.files:
            raise ValueError("manifest.json cannot list itself")
        if "manifest.sig" in self.files:
            raise ValueError("manifest.sig signs the manifest, which therefore cannot list it")
        return self


def numeric(version: str) -> tuple[int, ...]:
    """The numbers a version starts with, without trailing zeros: "1.32.0+cpu" → (1, 32)."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(number) for number in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def summary(manifest: Manifest) -> list[tuple[str, str]]:
    """What a person wants to know of a bundle, as (label, value) rows."""
    backend, pair = manifest.backend, manifest.pair
    rows = [
        ("architecture", manifest.architecture),
        ("methods", _listed(manifest.methods)),
        ("target", _model_line(pair.target)),
        ("draft", _model_line(pair.draft) if pair.draft else "none"),
        ("drafted tokens", str(manifest.num_draft_tokens)),
        ("widths", _listed(manifest.widths)),
        ("max batch size", str(manifest.max_batch_size)),
        ("max length", f"{manifest.max_length} tokens (capacity {manifest.capacity})"),
        ("prefill chunks", _listed(manifest.prefill_chunks)),
        ("encoding", manifest.encoding),
        ("variants", _listed(manifest.variants)),
        ("capabilities", _listed(manifest.capabilities)),
        ("backend", f"{backend.name} {backend.version} on {backend.device_class}"),
        ("row invariant", {None: "not checked", True: "yes", False: "no"}[manifest.row_invariant]),
    ]
    rows += [("graph", _graph_line(graph)) for graph in manifest.graphs]
    rows += [("file", f"{file} ({_bytes(entry.size)})") for file, entry in sorted(manifest.files.items())]
    return [
        *rows,
        ("size on disk", _bytes(manifest.size)),
        ("key", manifest.key),
        ("built", f"{manifest.created} by graphspec {manifest.graphspec_version}"),
    ]


def _model_line(model: Model) -> str:
    return f"{model.name} ({model.model_type}, vocabulary {model.vocab_size})"


def _graph_line(graph: Graph) -> str:
    variant = f", {graph.variant}" if graph.variant else ""
    sizes = f"widths {_listed(graph.widths)}, batch sizes {_listed(graph.batch_sizes)}"
    return f"{graph.name} ({graph.role}{variant}; {sizes})"


def _listed(values: Iterable[object]) -> str:
    return values if isinstance(values, str) else ", ".join(map(str, values)) or "none"


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    unit, scale = next(("kMGTPE"[i], 1000 ** (i + 1)) for i in range(6) if i == 5 or size < 999.95 * 1000 ** (i + 1))
    return f"{size / scale:.1f} {unit}B"


def _serve_the_same(first: Graph, second: Graph) -> bool:
    """Whether a server could not tell which of two graphs to run."""
    variants = {first.variant, second.variant} - {None}
    dynamic = "dynamic" in (first.batch_sizes, second.batch_sizes)
    if len(variants) > 1 or not (dynamic or set(first.batch_sizes) & set(second.batch_sizes)):
        return False
    if first.role == second.role == "prefill":
        return _chunk(first) == _chunk(second)
    return "prefill" not in (first.role, second.role) and bool(set(first.widths) & set(second.widths))


def _chunk(graph: Graph) -> int | str | None:
    """Prompt tokens that one call of a prefill graph takes."""
    return next((spec.shape[-1] for spec in graph.inputs if spec.name == "tokens" and spec.shape), None)


def _names(specs: Iterable[TensorSpec]) -> set[str]:
    return {spec.name for spec in specs}


def _by_name(specs: tuple[TensorSpec, ...], what: str) -> dict[str, TensorSpec]:
    _refuse_twice((spec.name for spec in specs), f"{what}s of one name")
    return {spec.name: spec for spec in specs}


def _refuse_twice(names: Iterable[str], what: str) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{what}: {', '.join(twice)}")
