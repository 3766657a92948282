"""TensorRT-RTX really compiles every architecture's engines here, without a GPU. None of them has run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from graphs import constant, float32, model_of, typed, value_of
from pairs import NAMES, K, Pairs
from safetensors.torch import save_file

from graphspec.architectures.step import FusedStep
from graphspec.building import build, resolve_pair
from graphspec.bundle import verify_bundle
from graphspec.errors import BuildError, BundleError, ConfigError
from graphspec.export import pipeline
from graphspec.export.specialise import specialise_prefill, specialise_step
from graphspec.export.tensorrt_compile import TensorRt
from graphspec.export.trace import trace
from graphspec.export.weights import large_initializers, weights_to_inputs
from graphspec.resolution import complete_config
from graphspec.runtime.tensorrt_library import check_rtx_header
from graphspec.speculative_config import SpeculativeConfig

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 Linux and Windows only")
pytestmark = pytest.mark.slow

CAPACITY = 64


@pytest.fixture(scope="module")
def compiler() -> TensorRt:
    return TensorRt("tensorrt-rtx")


def traced(pairs: Pairs, name: str, *, greedy: bool) -> ir.Model:
    pair = pairs.pair(name)
    resolution = resolve_pair(pair.target, pair.draft, arch=name)
    method = resolution.architecture.methods[0]
    asked = SpeculativeConfig.parse({"speculative_method": method, "num_speculative_tokens": K})
    config = complete_config(asked, resolution)
    target = resolution.architecture.target.load(resolution.target, capacity=CAPACITY)
    step = FusedStep(target, resolution.load_drafter(target, config), greedy=greedy)
    model = trace(step.cast("bfloat16"))
    pipeline.run_passes(model, pipeline.PORTABLE, on_pass=lambda _: None)
    return model


def compiled(compiler: TensorRt, graph: ir.Model) -> bytes:
    pipeline.run_passes(graph, pipeline.tensorrt(), on_pass=lambda _: None)
    weights_to_inputs(graph, large_initializers(graph.graph, smallest=64))
    return compiler.compile(graph, "test")


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_target_and_variant_compiles(compiler: TensorRt, pairs: Pairs, name: str, greedy: bool) -> None:
    """Of every drafter all widths and the prefill, for one target and variant; for the others, which have the same
    sampler and the same layers, the widest step. A compilation takes seconds."""
    model = traced(pairs, name, greedy=greedy)
    everything = "Llama3" in name and not greedy
    for width in (0, 1, K) if everything else (K,):
        fixed = specialise_step(model, width=width, num_draft_tokens=K, capacity=CAPACITY, batch=2)
        check_rtx_header(compiled(compiler, fixed), "step", compiler.version)
    if everything:
        prefill = specialise_prefill(model, chunk=16, capacity=CAPACITY)
        check_rtx_header(compiled(compiler, prefill), "prefill", compiler.version)


def test_smollm2_compiles_at_its_full_size(compiler: TensorRt, tmp_path: Path) -> None:
    """Its 30 layers and 49,152 tokens, with weights of zeros: an engine takes them as inputs."""
    sizes: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    shapes = {name: value.shape for name, value in model.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == 134_515_008
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    model.config.save_pretrained(tmp_path)
    resolution = resolve_pair(tmp_path, None, method="ngram")
    config = complete_config(
        SpeculativeConfig.parse({"speculative_method": "ngram", "num_speculative_tokens": 4}), resolution
    )
    target = resolution.architecture.target.load(resolution.target, capacity=2048)
    graph = trace(FusedStep(target, resolution.load_drafter(target, config)).cast("bfloat16"))
    pipeline.run_passes(graph, pipeline.PORTABLE, on_pass=lambda _: None)
    fixed = specialise_step(graph, width=4, num_draft_tokens=4, capacity=2048, batch=1)
    check_rtx_header(compiled(compiler, fixed), "step", compiler.version)


@pytest.mark.parametrize("encoding", ["float16", "fp8", "int8", "int4"])
def test_a_bundle_of_engines_is_written(pairs: Pairs, tmp_path: Path, encoding: str) -> None:
    out = tmp_path / "bundle"
    manifest = build(
        model=pairs.pair(NAMES[3]).target,
        out=out,
        backend="tensorrt-rtx",
        encoding=encoding,
        max_length=CAPACITY,
        max_batch_size=1,
        num_speculative_tokens=1,
        use_greedy_acceptance=True,
        bake_weights=encoding == "float16",
    ).manifest
    verify_bundle(out)
    assert {graph.name for graph in manifest.graphs} == {"step_w0_b1", "step_w1_b1", "prefill_16", "prefill_128"}
    assert ("weights/model.safetensors" in manifest.files) == (encoding != "float16")
    assert manifest.encoding == encoding
    inputs = {spec.name: spec.dtype for graph in manifest.graphs for spec in graph.inputs}
    stored = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "int4"}.get(encoding)
    assert stored is None or stored in inputs.values()


def test_an_operator_that_the_parser_does_not_know_is_named(compiler: TensorRt) -> None:
    x = value_of("x", float32(0, 2, 3))
    node = ir.node("Unknowable", [x], name="the_node")
    node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'target', 'target.layers.0', 'op']"
    model = model_of([x], [node], [typed(node.outputs[0], "y", float32(0, 2, 3))])
    with pytest.raises(BuildError, match=r"tensorrt-rtx cannot parse graph odd: .*the_node of target.layers.0"):
        compiler.compile(model, "odd")


def test_a_graph_that_cannot_be_built_says_why(compiler: TensorRt) -> None:
    """A cache of integers: KVCacheUpdate takes floats only."""
    cache, update = value_of("cache", np.zeros((1, 1, 8, 4), np.int64)), value_of("update", np.ones((1, 1, 1, 4), int))
    start = constant("start", np.array([0]))
    node = ir.node("TensorScatter", [cache, update, start], attributes={"axis": -2}, name="scatter")
    model = model_of(
        [cache, update], [node], [typed(node.outputs[0], "next", np.zeros((1, 1, 8, 4), np.int64))], [start]
    )
    with pytest.raises(BuildError, match=r"tensorrt-rtx cannot (parse|build) graph odd: .+"):
        compiler.compile(model, "odd")


def relu() -> ir.Model:
    x = value_of("x", float32(0, 2, 3))
    node = ir.node("Relu", [x])
    return model_of([x], [node], [typed(node.outputs[0], "y", float32(0, 2, 3))])


@pytest.mark.filterwarnings("ignore:.*Timing cache:DeprecationWarning")
def test_timings_are_kept_and_never_the_reason_that_a_build_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TensorRT-RTX has the calls, and they do nothing; what TensorRT makes of a file has not been seen."""
    compiler = TensorRt("tensorrt-rtx")
    monkeypatch.setattr(compiler, "backend", "tensorrt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = compiler._timing_file()
    assert compiler.compile(relu(), "relu")
    assert [file] == list(file.parent.iterdir())
    for damage in (b"garbage", b""):
        file.write_bytes(damage)
        assert compiler.compile(relu(), "relu")
        assert file.read_bytes() not in (b"garbage", b"")
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    assert compiler.compile(relu(), "relu")


def test_a_graph_too_large_for_onnx_is_refused(compiler: TensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = value_of("x", float32(0, 2, 3)), constant("w", float32(1, 2, 3))
    node = ir.node("Add", [x, w])
    model = model_of([x], [node], [typed(node.outputs[0], "y", float32(0, 2, 3))], [w])
    assert compiler.compile(model, "add")
    monkeypatch.setattr("graphspec.export.tensorrt_compile._LARGEST_GRAPH", 23)
    with pytest.raises(BuildError, match=r"graph add with its weights has 0\.0 GB, .*without --bake-weights"):
        compiler.compile(model, "add")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: b"ptrt" + plan[4:], "not a whole TensorRT-RTX engine"),
        (lambda plan: plan[:-1], "not a whole TensorRT-RTX engine"),
        (lambda plan: plan[:24] + bytes([9, 9, 9, 9]) + plan[28:], "was built by TensorRT-RTX 9.9.9.9"),
    ],
)
def test_an_engine_of_another_release_is_refused_by_its_header(compiler: TensorRt, change: Any, said: str) -> None:
    plan = compiler.compile(relu(), "relu")
    check_rtx_header(plan, "engine", compiler.version)
    with pytest.raises(BundleError, match=said):
        check_rtx_header(change(plan), "engine", compiler.version)


@pytest.mark.parametrize(("backend", "extra"), [("tensorrt", "gpu"), ("tensorrt-rtx", "tensorrt-rtx")])
def test_a_missing_library_says_which_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, backend: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(ConfigError, match=rf"pip install 'graphspec-llm\[build,{extra}\]'"):
        TensorRt(backend)
