"""Bundles whose manifest was edited, and its checksum too: one line before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from pairs import NAMES, K, Pairs
from restaging import restage

from graphspec.bundle import read_manifest
from graphspec.errors import BundleError
from graphspec.runtime.generate import load

pytestmark = pytest.mark.slow


def edited(bundle: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The one graph that runs, changed, and the others: the manifest's `graphs`."""
    graphs = [graph.model_dump() for graph in read_manifest(bundle).graphs]
    (running,) = (graph for graph in graphs if graph["role"] == "any")
    change(running)
    return {"graphs": graphs}


def refused(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        load(bundle, num_threads=1)
    assert "\n" not in str(caught.value)
    assert "graphspec build" in str(caught.value)
    return str(caught.value)


def without_dimensions(graph: dict[str, Any]) -> None:
    for spec in graph["outputs"]:
        if spec["name"] == "next_tokens":
            spec["shape"] = ("batch", "drafted")


def test_more_drafts_than_the_graph_makes(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])
    changed = edited(bundle, without_dimensions)
    out = restage(bundle, tmp_path / "out", num_draft_tokens=K + 1, **changed)
    assert "contradicts itself: graphs/any.onnx is not as" in refused(out)
    assert "output next_tokens" in refused(out)


def test_states_that_neither_the_graph_nor_the_manifest_updates(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])
    changed = edited(bundle, lambda graph: graph.update(aliases={}))
    out = restage(bundle, tmp_path / "out", states=(), **changed)
    assert "input target.0.keys" in refused(out)


def test_a_state_of_another_shape(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])

    def wider(graph: dict[str, Any]) -> None:
        for spec in (*graph["inputs"], *graph["outputs"]):
            if spec["name"].startswith("target.0.keys"):
                spec["shape"] = (*spec["shape"][:3], 17)

    states = [state.model_dump() for state in read_manifest(bundle).states]
    states[0]["shape"] = ("batch", 2, "capacity", 17)
    said = refused(restage(bundle, tmp_path / "out", states=states, **edited(bundle, wider)))
    assert "input target.0.keys, output target.0.keys.next" in said


@pytest.mark.parametrize("named", [True, False])
def test_a_bundle_that_samples_and_says_it_is_greedy(pairs: Pairs, tmp_path: Path, named: bool) -> None:
    bundle = pairs.bundle(NAMES[3])
    sampling = ("temperature", "top_k", "top_p", "min_p", "uniform")

    def hide(graph: dict[str, Any]) -> None:
        graph["inputs"] = [spec for spec in graph["inputs"] if named or spec["name"] not in sampling]

    manifest = {**edited(bundle, hide), "variants": ("greedy",)}
    if named:  # the manifest itself cannot be made
        with pytest.raises(ValueError, match="samples, and the bundle says that it is greedy"):
            restage(bundle, tmp_path / "out", **manifest)
    else:
        assert "input temperature" in refused(restage(bundle, tmp_path / "out", **manifest))


def test_a_graph_of_another_bundle(pairs: Pairs, tmp_path: Path) -> None:
    """Its own manifest fits it; this one does not."""
    bundle, other = pairs.bundle(NAMES[3]), pairs.bundle(NAMES[0])
    graph = (other / "graphs" / "any.onnx").read_bytes()
    assert "graphs/any.onnx of " in refused(restage(bundle, tmp_path / "out", {"graphs/any.onnx": graph}))


def test_a_graph_that_no_server_could_feed(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])
    model = onnx.load(bundle / "graphs" / "any.onnx", load_external_data=False)
    more = onnx.helper.make_tensor_value_info("mystery", onnx.TensorProto.INT64, ["batch"])
    model.graph.input.append(more)

    def describe(graph: dict[str, Any]) -> None:
        graph["inputs"] = [*graph["inputs"], {"name": "mystery", "dtype": "int64", "shape": ("batch",)}]

    out = restage(bundle, tmp_path / "out", {"graphs/any.onnx": model.SerializeToString()}, **edited(bundle, describe))
    assert "(input mystery)" in refused(out)


def test_no_graph_for_everything(pairs: Pairs, tmp_path: Path) -> None:
    bundle = pairs.bundle(NAMES[3])
    changed = edited(bundle, lambda graph: graph.update(role="step"))
    running = next(graph for graph in changed["graphs"] if graph["role"] == "step")
    changed["graphs"].append({**running, "name": "reads", "role": "prefill"})
    assert "has the graphs any, reads, and this server runs one" in refused(
        restage(bundle, tmp_path / "out", **changed)
    )


@pytest.mark.parametrize("capacity", [10**15, 10**19])
def test_rows_longer_than_any_memory(pairs: Pairs, tmp_path: Path, capacity: int) -> None:
    bundle = pairs.bundle(NAMES[3])
    out = restage(bundle, tmp_path / "out", capacity=capacity, max_length=capacity // 2)
    with pytest.raises(BundleError, match=f"needs more memory than there is: 8 rows of {capacity} positions"):
        load(out, num_threads=1)
