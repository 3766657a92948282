"""What a build writes, beyond what its text shows: graphs, their interface, the options that shape them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from answers import PROMPTS, greedy_answer
from forced import TABLE
from pairs import FORCED, LAYERS, MAX_LENGTH, NAMES, WIDTHS, Encoding, K, Pairs

from graphspec.architectures.step import StepInputs
from graphspec.building import build
from graphspec.bundle import read_manifest
from graphspec.errors import ConfigError, RequestError
from graphspec.export.dialect import DOMAIN
from graphspec.export.drafting import NUM_DRAFTS
from graphspec.export.pipeline import PORTABLE, onnxruntime
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow

NGRAM = NAMES[3]
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "uniform"}


def options(pairs: Pairs, out: Path, **changes: Any) -> dict[str, Any]:
    settings = {"num_speculative_tokens": K, "max_length": MAX_LENGTH, "encoding": "float32"}
    return {"model": pairs.pair(NGRAM).target, "out": out, **settings, **changes}


@pytest.mark.parametrize(("name", "encoding"), [(NAMES[1], "float32"), (NAMES[6], "int8")])
def test_the_graph_is_the_step_of_the_design(pairs: Pairs, name: str, encoding: Encoding) -> None:
    manifest = read_manifest(pairs.bundle(name, encoding))
    states = [f"{s.name}" for s in pairs.step(name).states]
    (graph,) = (graph for graph in manifest.graphs if graph.role == "any")
    assert [spec.name for spec in graph.inputs] == [*StepInputs._fields, *states, NUM_DRAFTS]
    results = ["accepted", "committed", "next_tokens", "next_kv_len", "logits"]
    assert [spec.name for spec in graph.outputs] == [*results, *(f"{state}.next" for state in states)]
    assert dict(graph.aliases) == {f"{state}.next": state for state in states}
    shapes = {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}
    assert shapes["tokens"] == ("batch", "tokens")
    assert shapes["uniform"] == ("batch", "capacity", 1)
    assert shapes["target.0.keys"] == ("batch", 2, "capacity", manifest.states[0].shape[3])
    assert shapes["committed"] == ("batch", "verified")
    assert shapes["next_tokens"] == ("batch", K + 1)
    assert manifest.row_invariant
    assert graph.widths == manifest.widths == WIDTHS


def test_a_state_that_a_drafter_only_reads_is_input_and_output(pairs: Pairs) -> None:
    """A model team's drafter may return a state as it came."""
    manifest = read_manifest(pairs.bundle(FORCED))
    assert manifest.states[-1].input == TABLE
    assert manifest.states[-1].output == f"{TABLE}.next"
    assert len(manifest.states) == 2 * LAYERS + 1


def test_each_width_has_a_portable_graph_without_weights(pairs: Pairs) -> None:
    root = pairs.bundle(NAMES[1])
    portable = [graph for graph in read_manifest(root).graphs if graph.role == "portable"]
    assert [graph.widths for graph in portable] == [(width,) for width in WIDTHS]
    for graph, width in zip(portable, WIDTHS, strict=True):
        file = root / graph.file
        assert file.stat().st_size < 300_000
        model = onnx.load(file)
        assert {node.domain for node in model.graph.node} == {"", DOMAIN}
        shapes = {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}
        assert shapes["tokens"] == ("batch", K + 1)
        assert shapes["committed"] == ("batch", width + 1)
        assert not {"n_tokens", "n_known", "next_token", "verify_offsets", "key_positions"} & shapes.keys()


def test_the_greedy_variant_with_some_widths_and_every_pass_written(pairs: Pairs, tmp_path: Path) -> None:
    out, passes = tmp_path / "bundle", tmp_path / "passes"
    build(**options(pairs, out, use_greedy_acceptance=True, widths=(2,), dump_passes=passes))
    written = sorted(path.name for path in passes.iterdir())
    steps = [*PORTABLE, *onnxruntime("float32", "uint8")]
    assert written == [f"{number:02}_{step.name}.onnx" for number, step in enumerate(steps)]

    manifest = read_manifest(out)
    (graph,) = (graph for graph in manifest.graphs if graph.role == "any")
    assert not SAMPLING & {spec.name for spec in graph.inputs}
    assert manifest.widths == (0, 2)
    expected = [greedy_answer(pairs.pair(NGRAM).target, prompt, 24) for prompt in PROMPTS]
    with load(out, num_threads=1) as bundle:
        greedy = SamplingParams(max_new_tokens=24)
        for width in (0, 2):
            assert [answer.token_ids for answer in bundle.generate(PROMPTS, greedy, width=width)] == expected
        with pytest.raises(RequestError, match="width 1 is not in this bundle; it was built for 0, 2"):
            bundle.generate(PROMPTS, greedy, width=1)
        with pytest.raises(RequestError, match=r"temperature is 0\.5 and the bundle was built with --use-greedy"):
            bundle.generate(PROMPTS, SamplingParams(temperature=0.5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_length": 257}, "--max-length 257 is more than the 256 tokens that .* was made for"),
        ({"widths": (1, K + 1)}, f"{K + 1}"),
        ({"max_length": 1}, "--max-length 1"),
        ({"max_batch_size": 0}, "--max-batch-size 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_and_nothing_is_left(
    pairs: Pairs, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build(**options(pairs, tmp_path / "bundle", **change))
    assert list(tmp_path.iterdir()) == []
