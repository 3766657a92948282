"""Milliseconds of one step by verify width, beside the matrix products alone; or by the rows that share it.

    python benchmarks/step_time.py BUNDLE [--context 100] [--rounds 15] [--profile] [--rows 1,2,4,8]

Widths are run in turn, so that a machine whose speed drifts slows all of them; medians are printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from graphspec.bundle import open_bundle
from graphspec.runtime.engine import Chunk
from graphspec.runtime.onnxruntime_engine import OnnxRuntimeEngine
from graphspec.runtime.sampling import SamplingParams, uniform_table

PRODUCTS = ("MatMulIntegerToFloat", "MatMul")


def products_only(bundle: Path) -> Callable[[int], Callable[[], object]]:
    """The target's weight products of the bundle's graph and nothing else → for R rows, a function to time."""
    model = ir.load(bundle / "graphs" / "any.onnx")
    weights = model.graph.initializers
    read = [n for n in model.graph if n.op_type in PRODUCTS and n.inputs[1] is not None and n.inputs[1].name in weights]
    # In an int8 graph a small product or two stay in float.
    kind = PRODUCTS[0] if any(n.op_type == PRODUCTS[0] for n in read) else PRODUCTS[1]
    nodes = [n for n in read if n.op_type == kind]
    inputs: dict[int, ir.Value] = {}
    copies, outputs, used = [], [], {}
    for node in nodes:
        size = int(node.inputs[1].shape[0])
        dtype = ir.DataType.FLOAT if kind == "MatMul" else ir.DataType.UINT8
        source = inputs.setdefault(
            size, ir.Value(name=f"x{size}", shape=ir.Shape(["rows", size]), type=ir.TensorType(dtype))
        )
        for value in node.inputs[1:]:
            used.setdefault(
                value.name, ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
            )
        copy = ir.node(node.op_type, [source, *(used[v.name] for v in node.inputs[1:])], domain=node.domain)
        copy.outputs[0].name = f"y{len(copies)}"
        copy.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        copies.append(copy)
        outputs.append(copy.outputs[0])
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=copies,
        initializers=list(used.values()),
        opset_imports={"": 24, "com.microsoft": 1},
        name="products",
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    session = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def for_rows(rows: int) -> Callable[[], object]:
        dtype = np.float32 if kind == "MatMul" else np.uint8
        feeds = {f"x{size}": np.full((rows, size), 100, dtype) for size in inputs}
        return lambda: session.run(None, feeds)

    return for_rows


def engine_at(bundle: Path, context: int, *, rows: int = 1, profile: bool = False) -> OnnxRuntimeEngine:
    """An engine whose rows hold a prompt of `context` tokens each."""
    opened = open_bundle(bundle, verify=False)
    engine = OnnxRuntimeEngine(opened, num_slots=rows, profile=profile)
    vocabulary = opened.manifest.pair.target.vocab_size
    for row in range(rows):
        engine.admit(row, SamplingParams(), uniform_table(0, engine.capacity))
        tokens = np.random.default_rng(row).integers(100, vocabulary - 1, context)
        engine.prefill(Chunk(slot=row, tokens=tuple(tokens.tolist()))).result()
    return engine


def measure(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each task, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(rounds + 2):
        for name, task in tasks.items():
            for repeat in range(4):
                start = time.perf_counter()
                task()
                if round_ >= 2 and repeat:  # the first run after another shape pays for the change
                    times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def profile(engine: OnnxRuntimeEngine, width: int, steps: int = 30) -> list[tuple[str, float, int]]:
    """(operator, ms a step, nodes) from ONNX Runtime's profiler, slowest first."""
    for _ in range(steps):
        engine.step([0], width, num_drafts=width).result()
    path = Path(engine.end_profiling())
    events = json.loads(path.read_text())
    path.unlink()
    runs = [e for e in events if e.get("cat") == "Session" and e["name"] == "model_run"][-steps:]
    begin = runs[0]["ts"]
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= begin]
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in kernels:
        total[event["args"]["op_name"]] += event["dur"]
        count[event["args"]["op_name"]] += 1
    return [(name, value / steps / 1e3, count[name] // steps) for name, value in total.most_common(20)]


def _step(engine: OnnxRuntimeEngine, context: int, width: int, rows: int = 1) -> object:
    """Of rows at the same context each time: many rounds would end beyond the bundle's length."""
    for row in range(rows):
        engine.admit(row, SamplingParams(), np.zeros((engine.capacity, 1), np.float32), kept=context)
    return engine.step(range(rows), width, num_drafts=width).result()


def by_rows(bundle: Path, context: int, rounds: int, counts: list[int], width: int) -> None:
    """Prints what a step costs that several rows share."""
    engine = engine_at(bundle, context, rows=max(counts))
    result = measure({f"{n} rows": partial(_step, engine, context, width, n) for n in counts}, rounds)
    engine.close()
    base = result[f"{counts[0]} rows"]
    for name, milliseconds in result.items():
        print(f"width {width}, {name:8} {milliseconds:7.2f} ms, {milliseconds / base:.2f} of the first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], help="for example 1,2,4,8")
    arguments = parser.parse_args()
    widths = open_bundle(arguments.bundle, verify=False).manifest.widths
    if arguments.rows:
        for width in (0, min(3, widths[-1])):
            by_rows(arguments.bundle, arguments.context, arguments.rounds, arguments.rows, width)
        return
    if arguments.profile:
        for width in (0, min(3, widths[-1])):
            engine = engine_at(arguments.bundle, arguments.context, profile=True)
            print(f"width {width}: operator, ms a step, nodes")
            for name, milliseconds, nodes in profile(engine, width):
                print(f"  {name:32} {milliseconds:7.3f} {nodes:5}")
        return
    engine = engine_at(arguments.bundle, arguments.context)
    steps: dict[str, Any] = {f"step, width {w}": partial(_step, engine, arguments.context, w) for w in widths}
    result = measure(steps, arguments.rounds)
    # One session after the other: the threads of an idle one spin for a while, on the cores of the next.
    engine.close()
    steps.clear()
    gc.collect()
    alone = products_only(arguments.bundle)
    result |= measure({f"products, {w + 1} rows": alone(w + 1) for w in widths}, arguments.rounds)
    for name, milliseconds in result.items():
        print(f"{name:24} {milliseconds:7.2f} ms")
    base = result["step, width 0"]
    print(f"step at width 0 / products at 1 row: {base / result['products, 1 rows']:.2f}")
    for width in widths[1:]:
        print(f"step at width {width} / step at width 0: {result[f'step, width {width}'] / base:.2f}")


if __name__ == "__main__":
    main()
