"""A manifest that contradicts itself cannot be made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graphspec.manifest import Manifest, numeric, summary

ARTIFACT = Path(__file__).parent / "artifacts" / "format-1" / "manifest.json"


def fields(**changes: object) -> dict[str, Any]:
    """The fields of the committed artifact, with changes."""
    stored: dict[str, Any] = json.loads(ARTIFACT.read_text())
    return {**stored, **changes}


def graph(**changes: object) -> dict[str, Any]:
    return {**fields()["graphs"][0], **changes}


def state(**changes: object) -> dict[str, Any]:
    return {**fields()["states"][0], **changes}


TEMPERATURE = {"name": "temperature", "dtype": "float32", "shape": ["batch"]}


def drafting(count: int) -> dict[str, Any]:
    """A graph whose next_tokens are so many."""
    tokens = {"name": "next_tokens", "dtype": "int64", "shape": ["batch", count]}
    return graph(widths=[0, 1], outputs=[*graph()["outputs"], tokens])


def message(changed: Mapping[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        Manifest.model_validate(changed)
    return str(caught.value)


def test_sets_are_sorted_whatever_order_they_are_given_in() -> None:
    manifest = Manifest.model_validate(
        fields(widths=[2, 0, 1, 0], methods={"eagle3", "eagle"}, prefill_chunks=[64, 16])
    )
    assert manifest.widths == (0, 1, 2)
    assert manifest.methods == ("eagle", "eagle3")
    assert manifest.prefill_chunks == (16, 64)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Manifest.model_validate(fields()).capacity = 5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (fields(widths=[0, 3]), "width 3 is more than the 2 drafted tokens"),
        (fields(widths=[-1, 0]), "greater than or equal to 0"),
        (fields(widths=[]), "at least 1 item"),
        (fields(max_length=61), "max_length 61 + 4 is over the capacity 64"),
        (fields(format=2), "Input should be 1"),
        (fields(nonsense=1), "Extra inputs are not permitted"),
        (fields(key="abc"), "should match pattern"),
        (fields(created="yesterday"), "should match pattern"),
        (fields(encoding="int3"), "Input should be 'float32'"),
        (fields(graphs=[]), "at least 1 item"),
        (fields(graphs=[graph(), graph()]), "graphs of one name: step"),
        (fields(graphs=[graph(file="graphs/other.onnx")]), "graphs/other.onnx is not one of the bundle's files"),
        (fields(graphs=[graph(widths=[0, 1])]), r"no step graph serves the widths [2]"),
        (fields(graphs=[graph(role="prefill")]), r"no step graph serves the widths [0, 1, 2]"),
        (fields(graphs=[graph(role="step")]), "no graph prefills"),
        (fields(widths=[0, 1]), "widths [2] are not the bundle's"),
        (fields(graphs=[graph(batch_sizes=[1, 8])]), "batch 8 is over 4"),
        (fields(graphs=[graph(batch_sizes=[])]), "at least 1 item"),
        (fields(graphs=[graph(variant="logprobs")]), "logprobs is not one of the bundle's variants"),
        (fields(graphs=[graph(aliases={"accepted": "nothing"})]), "alias accepted → nothing names no"),
        (fields(graphs=[graph(aliases={"accepted": "tokens"})]), "differs in dtype or shape"),
        (
            fields(graphs=[graph(aliases={"next_kv_len": "kv_len", "accepted": "kv_len"})]),
            "alias next_kv_len → kv_len names no",
        ),
        (fields(graphs=[graph(inputs=[*graph()["inputs"], graph()["inputs"][0]])]), "inputs of one name: tokens"),
        (fields(states=[state(), state()]), "states of one input: cache.0.key"),
        (fields(states=[state(input="cache.9.key")]), "state cache.9.key is an input of no graph"),
        (fields(states=[state(output="nothing")]), "state nothing is no output of graph step"),
        (fields(states=[state(dtype="float16")]), "state cache.0.key differs from the input of graph step"),
        (fields(states=[state(shape=["batch", 2, 8])]), "state cache.0.key differs from the input of graph step"),
        (
            fields(states=[state(shape=["batch", 1, "capacity", 8])]),
            "state cache.0.key differs from the input of graph",
        ),
        (fields(states=[state(shape=["batch", 2, "batch", 9])]), "state cache.0.key differs from the input of graph"),
        (fields(capacity=65), "state cache.0.key differs from the input of graph step"),
        (fields(states=[state(shape=["batch", 2, "length", 8])]), "Input should be 'batch' or 'capacity'"),
        (fields(states=[]), "graph step updates cache.0.key in place, which is no state"),
        (fields(graphs=[graph(), graph(name="z")]), "graphs step and z serve the same steps"),
        (
            fields(graphs=[graph(), graph(name="z", role="step", widths=[1], batch_sizes=[4])]),
            "graphs step and z serve the same steps",
        ),
        (
            fields(graphs=[graph(), graph(name="y", role="prefill"), graph(name="z", role="prefill", widths=[0])]),
            "graphs y and z serve the same steps",
        ),
        (fields(num_draft_tokens=1, widths=[0, 1], graphs=[drafting(3)]), "graph step drafts 3 - 1 tokens, not 1"),
        (fields(num_draft_tokens=1, widths=[0, 1], graphs=[drafting(1)]), "graph step drafts 1 - 1 tokens, not 1"),
        (
            fields(variants=["greedy"], graphs=[graph(variant=None, inputs=[*graph()["inputs"], TEMPERATURE])]),
            "graph step samples, and the bundle says that it is greedy",
        ),
        (fields(files={**fields()["files"], "manifest.json": {"size": 1, "sha256": "0" * 64}}), "list itself"),
    ],
)
def test_a_contradiction_is_refused(changed: dict[str, object], said: str) -> None:
    assert said in message(changed)


def test_graphs_of_other_widths_batches_variants_and_chunks_stand_side_by_side() -> None:
    """As TensorRT's engines do."""
    steps = [
        graph(name=f"w{width}_b{batch}_{variant}", role="step", widths=[width], batch_sizes=[batch], variant=variant)
        for width in (0, 1, 2)
        for batch in (1, 4)
        for variant in ("greedy", "sampling")
    ]
    (tokens, *others) = graph()["inputs"]
    prefills = [
        graph(name=f"p{chunk}", role="prefill", widths=[0], inputs=[{**tokens, "shape": ["batch", chunk]}, *others])
        for chunk in (16, 64)
    ]
    both = Manifest.model_validate(fields(variants=["greedy", "sampling"], graphs=[*steps, *prefills]))
    assert len(both.graphs) == 14


def test_two_outputs_cannot_alias_one_input() -> None:
    outputs = [*graph()["outputs"], {"name": "next_kv_len", "dtype": "int64", "shape": ["batch"]}]
    aliases = {"accepted": "kv_len", "next_kv_len": "kv_len"}
    said = message(fields(graphs=[graph(outputs=outputs, aliases=aliases)]))
    assert "inputs aliased by two outputs of graph step: kv_len" in said


def test_a_portable_graph_serves_no_step() -> None:
    assert "no step graph serves" in message(fields(graphs=[graph(role="portable")], states=[]))


def test_a_portable_graph_need_not_take_the_states_the_others_take() -> None:
    portable = graph(name="kept", role="portable", inputs=[], outputs=[], aliases={})
    assert Manifest.model_validate(fields(graphs=[graph(), portable])).graphs[1].role == "portable"


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "", ".", "..", "a\\b", "C:/a", "a\nb", "a\0b", "a\ud800"],
)
def test_a_path_that_could_leave_the_bundle_is_refused(path: str) -> None:
    files = {**fields()["files"], path: {"size": 1, "sha256": "0" * 64}}
    assert "is not a plain relative path" in message(fields(files=files))
    assert "is not a plain relative path" in message(fields(graphs=[graph(file=path)]))


@given(st.lists(st.sampled_from(["a", "..", ".", "", "/", "b c", "é"]), min_size=1, max_size=6))
def test_an_accepted_path_stays_inside_the_bundle(parts: list[str]) -> None:
    path = "/".join(parts)
    files = {**fields()["files"], path: {"size": 1, "sha256": "0" * 64}}
    try:
        accepted = path in Manifest.model_validate(fields(files=files)).files
    except ValidationError:
        accepted = False
    root = Path("/bundles/one")
    plain = (root / path).parts == (*root.parts, *parts) and not {"..", ".", ""} & set(parts)
    assert accepted == (plain and "/" not in parts)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("1.32.0", (1, 32)), ("1.32", (1, 32)), ("11.4.0.7+cu13", (11, 4, 0, 7)), ("1.33.0rc1", (1, 33)), ("x", ())],
)
def test_versions_compare_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert numeric(version) == numbers


def test_the_summary_tells_what_the_bundle_is() -> None:
    sizes = {name: {"size": size, "sha256": "0" * 64} for name, size in [("a", 999), ("b", 1_500_000)]}
    manifest = Manifest.model_validate(fields(files={**fields()["files"], **sizes}, row_invariant=None))
    rows = summary(manifest)
    told = dict(rows)
    assert told["architecture"] == "UnifiedEagle3Llama3ForCausalLM"
    assert told["target"] == "target (llama, vocabulary 128)"
    assert told["draft"] == "draft (llama, vocabulary 32)"
    assert told["widths"] == "0, 1, 2"
    assert told["max length"] == "60 tokens (capacity 64)"
    assert told["prefill chunks"] == "dynamic"
    assert told["backend"] == "onnxruntime 1.32.0 on x86_64"
    assert told["row invariant"] == "not checked"
    assert told["size on disk"] == "1.5 MB"
    assert ("file", "a (999 B)") in rows
    assert ("file", "b (1.5 MB)") in rows


def test_the_summary_of_a_pair_without_a_draft_says_none() -> None:
    pair = {"target": fields()["pair"]["target"]}
    assert dict(summary(Manifest.model_validate(fields(pair=pair, variants=["sampling"]))))["draft"] == "none"
