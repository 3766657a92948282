"""Whether a graph's rows keep their bits, found by running it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import tiny

import graphspec
from graphspec.architectures.state import StateSpec
from graphspec.export.invariance import is_row_invariant

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
step (int64[b, t] tokens, int64[r] verify_offsets, float[b, 1, s, 1] keys)
    => (float[b, 1, s, 1] next, float[b, r, 1] logits)
{
    nothing = Constant <value_floats: floats = [0.0]> ()
    size = Shape <start: int = 1, end: int = 2> (tokens)
    length = Cast <to: int = 1> (size)
    next = Add (keys, CACHED)
    batch = Shape <start: int = 0, end: int = 1> (tokens)
    asked = Shape (verify_offsets)
    one = Constant <value_ints: ints = [1]> ()
    shape = Concat <axis: int = 0> (batch, asked, one)
    logits = Expand (JUDGED, shape)
}
"""
"""What is added to the cache, and what the logits are, may depend on the length of the step."""


@pytest.mark.parametrize(("cached", "judged"), [("nothing", "nothing"), ("length", "nothing"), ("nothing", "length")])
def test_a_graph_whose_rows_depend_on_the_step_is_found_out(tmp_path: Path, cached: str, judged: str) -> None:
    model = onnx.parser.parse_model(GRAPH.replace("CACHED", cached).replace("JUDGED", judged))
    for node in model.graph.node:
        node.input[:] = ["target.0.keys" if name == "keys" else name for name in node.input]
        node.output[:] = ["target.0.keys.next" if name == "next" else name for name in node.output]
    model.graph.input[2].name, model.graph.output[0].name = "target.0.keys", "target.0.keys.next"
    (tmp_path / "graphs").mkdir()
    onnx.save(model, tmp_path / "graphs" / "any.onnx")
    spec = StateSpec(name="target.0.keys", shape=("batch", 1, "capacity", 1))
    found = is_row_invariant(tmp_path, [spec], tiny.VOCABULARY, positions=300, num_threads=1)
    assert found is ("length" not in (cached, judged))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 256, "head_dim": 64},
        {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 256, "head_dim": 256},
        {"num_key_value_heads": 4, "num_attention_heads": 4},
    ],
    ids=["one key head", "wide heads", "as many key heads as heads"],
)
@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_built_graphs_keep_the_bits_of_a_row(tmp_path: Path, sizes: dict[str, int], encoding: str) -> None:
    model = tiny.save_llama(tmp_path / "model", layers=2, max_position_embeddings=1024, **sizes)
    built = graphspec.build(model=model, out=tmp_path / "bundle", encoding=encoding, max_length=400, widths=[0])
    assert built.manifest.row_invariant is True
    kv_heads = sizes["num_key_value_heads"]
    with pytest.raises(graphspec.GraphspecError, match="key/value heads"):
        graphspec.load(tmp_path / "bundle", num_threads=kv_heads + 1)
