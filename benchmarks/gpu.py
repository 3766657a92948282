"""Builds, checks and measures engines on an NVIDIA GPU, in one run of under ten minutes. Not run on one yet.

    python benchmarks/gpu.py [--model M] [--draft-model-path D] [--encoding bfloat16] [--json gpu.json]

Without --model, the SmolLM2 that `make demo` downloads, or the hub's. Prints a table, writes JSON, and exits with 1
where a check failed or there is no GPU; what the time did not suffice for is named.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphspec
from graphspec import Generation
from graphspec.backends import BACKENDS
from graphspec.runtime.engine import Chunk, Engine
from graphspec.runtime.generate import LoadedBundle
from graphspec.runtime.sampling import SamplingParams, uniform_table

DEMO = Path(".demo/SmolLM2-135M-Instruct.Q4_1.gguf")
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = (
    "Write an HTML table with three columns and five rows, with the headings Name, Age and City.",
    "List the planets of the solar system, one a line.",
    "What is the capital of France?",
    "Count from one to twenty.",
)
TOKENS = 96
SLACK = 2.0
"""How much less exact than eager bfloat16 an engine may be."""


def main() -> int:
    """0: all checks hold."""
    args = _arguments()
    if reason := why_no_gpu(args.backend):
        print(f"no measurement: {reason}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + 60 * args.minutes
    backend = args.backend or installed_backend()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        try:
            built = build(args, backend, bundle, until=time.monotonic() + 60 * args.build_minutes)
        except OutOfTime:
            # Of what was compiled, TensorRT kept which kernels are fastest: that does not take as long again.
            args.max_batch_size, args.widths = 1, f"0,{args.widths.rpartition(',')[2]}"
            built = build(args, backend, bundle, until=deadline) | {"reduced": "batches and widths: no time for more"}
        report = {"backend": backend, "encoding": args.encoding, **built}
        before = free_bytes()
        started = time.monotonic()
        with graphspec.load(bundle) as loaded:
            report |= {"load_seconds": time.monotonic() - started, "device_bytes": before - free_bytes()}
            report |= measure(loaded, args, deadline)
    Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)
    return 0 if report.get("lossless", {}).get("equal") and report.get("numerics", {}).get("within") else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO) if DEMO.exists() else HUB)
    parser.add_argument("--draft-model-path")
    parser.add_argument("--backend", choices=("tensorrt", "tensorrt-rtx"))
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--widths", default="0,1,2,4", help="drafts verified; the largest is K")
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=9.0, help="sections that would start later are skipped")
    parser.add_argument("--build-minutes", type=float, default=4.0, help="then a smaller bundle is built instead")
    parser.add_argument("--json", default="gpu.json")
    return parser.parse_args()


def installed_backend() -> str | None:
    """TensorRT if it is installed, else TensorRT-RTX."""
    names = ("tensorrt", "tensorrt-rtx")
    return next((name for name in names if importlib.util.find_spec(BACKENDS[name].module)), None)


def why_no_gpu(backend: str | None) -> str:
    """The reason, in one line; empty where there is a GPU with what it needs."""
    if (backend or installed_backend()) is None:
        return "neither tensorrt nor tensorrt_rtx is installed: pip install 'graphspec-llm[build,gpu]'"
    if backend and importlib.util.find_spec(BACKENDS[backend].module) is None:  # type: ignore[index]
        return f"{backend} is not installed"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-python is not installed"
    status, count = cuda().cudaGetDeviceCount()
    return "" if count else f"no NVIDIA GPU can be used here ({status.name})"


def cuda() -> Any:
    """cuda-python."""
    return importlib.import_module("cuda.bindings.runtime")


def free_bytes() -> int:
    """Of the device's memory."""
    return int(cuda().cudaMemGetInfo()[1])


class OutOfTime(Exception):  # noqa: N818 - nobody's error
    """A build took longer than it may."""


def build(args: argparse.Namespace, backend: str | None, out: Path, *, until: float) -> dict[str, Any]:
    """Builds the bundle → seconds and bytes. Raises OutOfTime between two engines."""

    def on_stage(stage: str) -> None:
        print(f"  {stage}", file=sys.stderr)
        if time.monotonic() > until:
            raise OutOfTime

    widths = [int(width) for width in args.widths.split(",")]
    started = time.monotonic()
    built = graphspec.build(
        model=args.model,
        draft_model_path=args.draft_model_path,
        backend=backend or "tensorrt-rtx",
        encoding=args.encoding,
        widths=widths,
        num_speculative_tokens=max(widths),
        max_batch_size=args.max_batch_size,
        max_length=args.max_length,
        out=out,
        on_stage=on_stage,
    )
    manifest = built.manifest
    return {
        "model": args.model,
        "architecture": manifest.architecture,
        "library": f"{manifest.backend.name} {manifest.backend.version}",
        "device_class": manifest.backend.device_class,
        "widths": list(manifest.widths),
        "build_seconds": time.monotonic() - started,
        "bundle_bytes": manifest.size,
    }


def measure(loaded: LoadedBundle, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Every section for which there is time."""
    engine = loaded._engine
    sections: dict[str, Callable[[], Any]] = {
        "lossless": lambda: losslessness(loaded),
        "numerics": lambda: numerics(loaded, args.model, args.draft_model_path),
        "step_ms": lambda: step_times(engine, loaded.manifest.widths, loaded.manifest.max_batch_size, args.rounds),
        "tokens_per_second": lambda: speeds(loaded),
        "idle": lambda: idle_share(engine, max(loaded.manifest.widths), args.rounds),
    }
    report: dict[str, Any] = {"skipped": []}
    for name, section in sections.items():
        if time.monotonic() > deadline:
            report["skipped"].append(name)
            continue
        print(f"  measuring {name}", file=sys.stderr)
        report[name] = section()
    return report


def prompts(loaded: LoadedBundle) -> list[list[int]]:
    """Token ids; as chat messages where the model has a template."""
    try:
        texts = [loaded.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    except graphspec.GraphspecError:
        return [list(loaded.encode(prompt)) for prompt in PROMPTS]
    return [list(loaded.encode(text, add_special_tokens=False)) for text in texts]


def answers(
    loaded: LoadedBundle, ids: Sequence[Sequence[int]], width: int, temperature: float, *, seed: int = 0
) -> list[Generation]:
    """Of fixed length; seeds count up from `seed`."""
    params = [
        SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=seed + index, ignore_eos=True)
        for index in range(len(ids))
    ]
    return loaded.generate(list(ids), params, width=width)


def losslessness(loaded: LoadedBundle) -> dict[str, Any]:
    """Whether every width gives, in a batch, the tokens that each prompt alone gives without speculation."""
    ids, differing = prompts(loaded), []
    for temperature in (0.0, 0.8):
        plain = [answers(loaded, [one], 0, temperature, seed=seed)[0].token_ids for seed, one in enumerate(ids)]
        for width in loaded.manifest.widths:
            for index, answer in enumerate(answers(loaded, ids, width, temperature)):
                if answer.token_ids != plain[index]:
                    both = zip(answer.token_ids, plain[index], strict=True)
                    at = next(place for place, (ours, other) in enumerate(both) if ours != other)
                    differing.append({"temperature": temperature, "width": width, "prompt": index, "from_token": at})
    return {"equal": not differing, "differing": differing}


def numerics(loaded: LoadedBundle, model: str, draft: str | None) -> dict[str, Any]:
    """How far the greedy tokens are below the best logits of the eager target in float32, beside how far eager
    bfloat16 is off: an engine that is as exact as that chooses nothing more than twice its error below."""
    import torch

    from graphspec.building import resolve_pair

    ids, gap, error = prompts(loaded), 0.0, 0.0
    resolution = resolve_pair(model, draft, arch=loaded.manifest.architecture)
    target = resolution.architecture.target.load(resolution.target, capacity=loaded.manifest.capacity)
    given = [answer.token_ids for answer in answers(loaded, ids, 0, 0.0)]
    whole = [[*prompt, *tokens] for prompt, tokens in zip(ids, given, strict=True)]
    exact = [eager_logits(target, tokens) for tokens in whole]
    for parameter in target.parameters():  # not the rotary tables, which stay float32 in the fused step too
        parameter.data = parameter.data.to(torch.bfloat16)
    for prompt, tokens, sequence, logits in zip(ids, given, whole, exact, strict=True):
        error = max(error, float((eager_logits(target, sequence) - logits).abs().max()))
        after = logits[len(prompt) - 1 : -1]
        chosen = after[torch.arange(len(tokens)), torch.tensor(tokens)]
        gap = max(gap, float((after.amax(1) - chosen).max()))
    return {"largest_gap": gap, "eager_bfloat16_error": error, "within": gap <= SLACK * 2 * error}


def eager_logits(target: Any, tokens: Sequence[int]) -> Any:
    """f32[T, V], in one pass."""
    import torch

    from graphspec.architectures.state import layer_caches

    dtype = next(target.parameters()).dtype
    states = [torch.zeros(state.sizes(1, target.capacity), dtype=dtype) for state in target.states]
    ids = torch.tensor([list(tokens)])
    window = target.window(torch.zeros(1, dtype=torch.int64), ids, torch.arange(len(tokens) + 1))
    with torch.no_grad():
        hidden, _ = target(ids, window, layer_caches(states))
        return target.logits(hidden.final)[0]


def fill(engine: Engine, batch: int, context: int = 64) -> None:
    """A prompt of arbitrary tokens in each of the first rows."""
    for slot in range(batch):
        engine.admit(slot, SamplingParams(), uniform_table(slot, engine.capacity))
        engine.prefill(Chunk(slot=slot, tokens=tuple(range(5, 5 + context)))).result()


def step_times(engine: Engine, widths: Sequence[int], largest: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step, read one step late: {batch: {width: ms}}."""
    found: dict[str, dict[str, float]] = {}
    batch = 1
    while batch <= min(largest, engine.num_slots):
        found[str(batch)] = {str(width): _step_ms(engine, batch, width, rounds) for width in widths}
        batch *= 2
    return found


def _step_ms(engine: Engine, batch: int, width: int, rounds: int) -> float:
    fill(engine, batch)
    count = min(rounds, (engine.capacity - 64) // (width + 1) - 2)
    earlier, marks = engine.step(range(batch), width), []
    for _ in range(count):
        launched = engine.step(range(batch), width)
        earlier.result()
        marks.append(time.perf_counter())
        earlier = launched
    earlier.result()
    return 1e3 * statistics.median(after - before for before, after in pairwise(marks))


def speeds(loaded: LoadedBundle) -> list[dict[str, float]]:
    """Generated tokens a second with and without drafts, for one prompt and for a full batch."""
    ids, found = prompts(loaded), []
    for batch in sorted({1, loaded.manifest.max_batch_size}):
        asked = [ids[index % len(ids)] for index in range(batch)]
        for width in sorted({0, max(loaded.manifest.widths)}):
            started = time.monotonic()
            given = answers(loaded, asked, width, 0.0)
            seconds = time.monotonic() - started
            accepted = statistics.mean(answer.acceptance.acceptance_length for answer in given) if width else 0.0
            rate = sum(len(answer.token_ids) for answer in given) / seconds
            found.append({"batch": batch, "width": width, "tokens_per_second": rate, "acceptance_length": accepted})
    return found


def idle_share(engine: Any, width: int, rounds: int) -> dict[str, float]:
    """The device's time between steps of one row, launched one ahead: by events around each step on its stream."""
    fill(engine, 1)
    runtime, stream = cuda(), engine._compute
    rounds = min(rounds, (engine.capacity - 64) // (width + 1) - 2)
    events = [[runtime.cudaEventCreate()[1] for _ in range(2)] for _ in range(rounds)]
    earlier = engine.step([0], width)
    for start, end in events:
        runtime.cudaEventRecord(start, stream)
        launched = engine.step([0], width)
        runtime.cudaEventRecord(end, stream)
        earlier.result()
        earlier = launched
    earlier.result()
    runtime.cudaStreamSynchronize(stream)
    gaps = [runtime.cudaEventElapsedTime(a[1], b[0])[1] for a, b in pairwise(events)]
    total = runtime.cudaEventElapsedTime(events[0][0], events[-1][1])[1]
    return {"share": sum(gaps) / total, "median_gap_ms": statistics.median(gaps), "goal_share": 0.02}


def print_table(report: dict[str, Any]) -> None:
    """For people; the JSON has the rest."""
    print(f"{report['model']}: {report['architecture']}, {report['library']} on {report['device_class']}")
    print(f"build {report['build_seconds']:.0f} s, bundle {report['bundle_bytes'] / 1e6:.0f} MB")
    print(f"load {report['load_seconds']:.1f} s, device memory {report['device_bytes'] / 1e6:.0f} MB")
    for name, key in (("lossless", "equal"), ("numerics", "within")):
        print(f"{name}: {'not measured' if name not in report else 'holds' if report[name][key] else report[name]}")
    for batch, row in report.get("step_ms", {}).items():
        print(f"step ms, batch {batch:>2}: " + "  ".join(f"width {width}: {ms:.2f}" for width, ms in row.items()))
    for row in report.get("tokens_per_second", []):
        print(
            f"batch {row['batch']:>2}, width {row['width']}: {row['tokens_per_second']:.0f} tokens/s, "
            f"acceptance length {row['acceptance_length']:.2f}"
        )
    if "idle" in report:
        print(f"device idle between steps, batch 1: {report['idle']['share']:.1%} (goal: under 2%)")
    if "reduced" in report:
        print(f"reduced: {report['reduced']}")
    if report["skipped"]:
        print(f"no time for: {', '.join(report['skipped'])}")


if __name__ == "__main__":
    sys.exit(main())
