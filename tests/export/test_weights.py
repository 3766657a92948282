"""The weights file: a safetensors file like any other, at whose offsets a graph finds its tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import Array, constant, float32, model_of, typed, value_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import NAMES, Pairs
from safetensors import safe_open
from safetensors.numpy import load_file
from stepping import session

from graphspec.export.weights import derived, externalise, made_of, weights_to_inputs, write_safetensors

ARRAYS: dict[str, Array] = {
    "odd": np.arange(7, dtype=np.float32),
    "one": np.array([3], np.int64),
    "bytes": np.arange(-60, 69, dtype=np.int8).reshape(3, 43),
    "even": np.arange(64, dtype=np.uint8).reshape(8, 8),
    "half": np.arange(33, dtype=np.float16),
    "flags": np.array([True, False, True]),
    "wide": float32(0, 16, 4),
}


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {name: ir.tensor(array) for name, array in ARRAYS.items()})
    loaded = load_file(path)
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_offsets_are_those_of_the_file_and_large_tensors_start_on_64(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    places = write_safetensors(path, {name: ir.tensor(array) for name, array in ARRAYS.items()})
    content = path.read_bytes()
    for name, (offset, length) in places.items():
        assert content[offset : offset + length] == ARRAYS[name].tobytes()
    assert all(offset % 64 == 0 for name, (offset, _) in places.items() if ARRAYS[name].nbytes % 64 == 0)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_tensors_lie_end_to_end_whatever_their_sizes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("sizes") / "w.safetensors"
    arrays = {f"t{index}": np.full(size, index, np.uint8) for index, size in enumerate(sizes)}
    places = write_safetensors(path, {name: ir.tensor(array) for name, array in arrays.items()})
    content = path.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    assert (8 + header) % 64 == 0
    assert json.loads(content[8 : 8 + header]).keys() == arrays.keys()
    ends = sorted((offset, offset + length) for offset, length in places.values())
    assert [start for start, _ in ends] == [8 + header, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == len(content)
    loaded = load_file(path)
    assert all((loaded[name] == array).all() for name, array in arrays.items())


def test_one_weight_at_a_time_is_in_memory_while_they_are_written(tmp_path: Path) -> None:
    """Each is made when its turn comes, once, and given up after."""
    made: list[str] = []

    def maker(name: str) -> Callable[[Any], Any]:
        def make(array: Any) -> Any:
            made.append(name)
            return array * 2

        return make

    source = ir.tensor(float32(0, 64, 64))
    shape, kind = (64, 64), ir.DataType.FLOAT
    tensors = {name: derived(source, maker(name), shape, kind, name) for name in ("a", "b", "c")}
    assert made == []
    write_safetensors(tmp_path / "w.safetensors", tensors)
    assert made == ["a", "b", "c"]
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["b"], float32(0, 64, 64) * 2)


def graph() -> ir.Model:
    x, large, small = value_of("x", float32(0, 2, 32)), constant("large", float32(1, 32)), constant("s", float32(2, 1))
    big = constant("big", float32(3, 32, 32))
    first = ir.node("MatMul", [x, big])
    second = ir.node("Mul", [typed(first.outputs[0], "a", float32(0, 2, 32)), large])
    third = ir.node("Add", [typed(second.outputs[0], "b", float32(0, 2, 32)), small])
    output = typed(third.outputs[0], "y", float32(0, 2, 32))
    return model_of([x], [first, second, third], [output], [large, small, big])


def test_a_graph_computes_the_same_with_its_weights_in_the_file(tmp_path: Path) -> None:
    before = session(graph(), tmp_path).run(None, {"x": float32(0, 2, 32)})[0]
    model = graph()
    (tmp_path / "weights").mkdir()
    externalise(model, tmp_path / "weights" / "w.safetensors", "weights/w.safetensors", smallest=64)
    assert load_file(tmp_path / "weights" / "w.safetensors").keys() == {"large", "big"}
    after = session(model, tmp_path).run(None, {"x": float32(0, 2, 32)})[0]
    np.testing.assert_array_equal(after, before)


def test_weights_become_inputs_of_the_same_names() -> None:
    model = graph()
    weights_to_inputs(model, ["large", "big"])
    assert [value.name for value in model.graph.inputs] == ["x", "large", "big"]
    assert list(model.graph.initializers) == ["s"]


def test_what_is_made_of_a_weight_is_one_and_what_a_graph_adds_is_none() -> None:
    tensor = ir.tensor(float32(0, 4))
    given = ["w", "w.int4", "w.scale", "layers.0.w.fp8", "fixed_const_3", "x.w", "ww.int4"]
    assert [*made_of({"w", "layers.0.w"}, dict.fromkeys(given, tensor))] == given[:4]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "encoding"), [(NAMES[1], "float32"), (NAMES[1], "int8")])
def test_a_bundle_s_graph_finds_every_weight_by_offset(pairs: Pairs, name: str, encoding: Any) -> None:
    root = pairs.bundle(name, encoding)
    file = root / "weights" / "model.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    graph = onnx.load(root / "graphs" / "any.onnx", load_external_data=False).graph
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert {tensor.name for tensor in external} == set(tensors)
    for tensor in external:
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "weights/model.safetensors"
        offset, length = int(place["offset"]), int(place["length"])
        assert content[offset : offset + length] == tensors[tensor.name].tobytes()
        assert list(tensor.dims) == list(tensors[tensor.name].shape)
        assert offset % 64 == 0 or length % 64
    inside = [tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    assert sum(len(tensor.raw_data) for tensor in inside) < 20_000
    with safe_open(file, "numpy") as opened:
        kinds = {opened.get_tensor(key).dtype.name for key in opened.keys()}  # noqa: SIM118 - not a mapping
    assert ("int8" in kinds or "uint8" in kinds) == (encoding == "int8")


@pytest.mark.slow
def test_int8_weights_take_a_quarter_of_float32_s(pairs: Pairs) -> None:
    sizes = [
        (pairs.bundle(NAMES[1], encoding) / "weights" / "model.safetensors").stat().st_size
        for encoding in ("float32", "int8")
    ]
    assert sizes[1] < 0.4 * sizes[0]  # embeddings and rotary tables stay float32
