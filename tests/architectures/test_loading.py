"""A checkpoint whose tensors do not fit is refused with one error that names them all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from twins import CAPACITY, Twin, load_twin

from graphspec.architectures.drafters import eagle, eagle3_loading, standalone
from graphspec.architectures.drafters.eagle import EagleDrafter
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.ngram import NgramDrafter
from graphspec.architectures.drafters.standalone import StandaloneDrafter
from graphspec.architectures.step import FusedStep
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.registry import target_kind
from graphspec.speculative_config import SpeculativeConfig

NAN, INFINITY = float("nan"), float("inf")
LAYER = "model.layers.1"

Tensors = dict[str, Tensor]


def edit(path: Path, change: Callable[[Tensors], object]) -> Path:
    """Rewrites a checkpoint's tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def edit_config(path: Path, changes: dict[str, Any]) -> None:
    """Changes keys of a config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load_target(path: Path) -> DecoderTarget:
    checkpoint = open_checkpoint(path)
    target: DecoderTarget = target_kind(checkpoint).load(checkpoint, capacity=CAPACITY)
    return target


def load_eagle(twin: Twin, path: Path) -> EagleDrafter:
    return eagle.load_drafter(twin.target, open_checkpoint(path), 3, SpeculativeConfig())


def load_eagle3(twin: Twin, path: Path) -> Eagle3Drafter:
    return eagle3_loading.load_drafter(twin.target, open_checkpoint(path), 3, SpeculativeConfig())


def load_standalone(twin: Twin, path: Path) -> StandaloneDrafter:
    return standalone.load_drafter(twin.target, open_checkpoint(path), 3, SpeculativeConfig())


def said(load: Callable[[], object]) -> str:
    """The message of the CheckpointError that `load` raises: one line."""
    with pytest.raises(CheckpointError) as error:
        load()
    message = str(error.value)
    assert "\n" not in message
    return message


def break_in_every_way(tensors: Tensors) -> None:
    del tensors[f"{LAYER}.self_attn.k_proj.weight"], tensors["model.norm.weight"]
    tensors[f"{LAYER}.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.extra.weight"] = torch.zeros(2)
    tensors[f"{LAYER}.mlp.up_proj.weight"] = torch.zeros(127, 64)
    tensors["lm_head.weight"] = torch.zeros(120, 64)


@pytest.mark.parametrize("save", [tiny.save_llama, tiny.save_qwen3])
def test_a_targets_problems_are_named_together(tmp_path: Path, save: Callable[..., Path]) -> None:
    message = said(lambda: load_target(edit(save(tmp_path, layers=2), break_in_every_way)))
    assert "2 missing" in message
    assert "2 unexpected" in message
    assert "2 of the wrong shape" in message
    for name in ("self_attn.k_proj.weight", "model.norm.weight", "self_attn.q_proj.bias", "model.extra.weight"):
        assert name in message
    assert f"{LAYER}.mlp.up_proj.weight (found [127, 64], expected [128, 64])" in message
    assert "lm_head.weight (found [120, 64], expected [128, 64])" in message


def test_values_that_are_not_finite_are_named_together(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = NAN
        tensors[f"{LAYER}.mlp.down_proj.weight"][1, :2] = -INFINITY
        tensors["lm_head.weight"][5, 5] = INFINITY

    message = said(lambda: load_target(edit(tiny.save_llama(tmp_path, layers=2), spoil)))
    for name in ("model.norm.weight (1 of 64", f"{LAYER}.mlp.down_proj.weight (2 of", "lm_head.weight (1 of"):
        assert name in message


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    path = edit(tiny.save_llama(tmp_path, layers=1), lambda tensors: tensors.pop("lm_head.weight"))
    assert "1 missing: lm_head.weight" in said(lambda: load_target(path))


def test_a_tied_checkpoints_copy_of_the_embedding_and_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    target = load_target(edit(tiny.save_llama(tmp_path, layers=1, tie_word_embeddings=True), add))
    assert target.head is None
    assert target.config.tied


@pytest.mark.parametrize("save", [tiny.save_llama, tiny.save_qwen3])
def test_a_head_of_its_own_holds_against_a_config_that_calls_it_tied(
    small: Twin, tmp_path: Path, save: Callable[..., Path]
) -> None:
    """As transformers decides: the two are tied only where they are equal."""
    other = torch.randn(128, 64, generator=torch.Generator().manual_seed(5))
    path = save(tmp_path, layers=2, tie_word_embeddings=True)
    twin = load_twin(edit(path, lambda tensors: tensors.update({"lm_head.weight": other})))
    assert torch.equal(twin.head.float(), other)
    for target in (twin.target, load_standalone(small, path).model):
        assert target.head is not None
        assert torch.equal(target.head.weight, other)


def test_float64_weights_that_float32_does_not_hold_are_named(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double() * 1e300
        tensors["lm_head.weight"] = tensors["lm_head.weight"].double()

    message = said(lambda: load_target(edit(tiny.save_llama(tmp_path, layers=1), widen)))
    assert "model.norm.weight (64 of 64 values)" in message
    assert "lm_head" not in message


def test_weights_beyond_half_precision_are_named_when_they_are_cast(tmp_path: Path) -> None:
    path = edit(tiny.save_llama(tmp_path, layers=1), lambda t: t["model.norm.weight"][0].fill_(1e6))
    step = FusedStep(load_target(path), NgramDrafter(3, 1, 3))
    with pytest.raises(UnsupportedError, match=r"float16 holds no value beyond 65504, .*: target\.norm\.weight$"):
        step.cast("float16")
    assert step.cast("bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.uint8, torch.bool, torch.int64])
def test_complex_numbers_and_integers_are_no_weights(small: Twin, tmp_path: Path, dtype: torch.dtype) -> None:
    def change(name: str) -> Callable[[Tensors], object]:
        return lambda tensors: tensors.update({name: tensors[name].to(dtype)})

    path = edit(tiny.save_llama(tmp_path / "target", layers=1), change("model.norm.weight"))
    message = said(lambda: load_target(path))
    assert "model.norm.weight (" in message
    assert ("complex numbers" if dtype.is_complex else "integers where weights belong") in message
    draft = edit(tiny.save_eagle(tmp_path / "draft"), change("fc.weight"))
    assert "fc.weight (" in said(lambda: load_eagle(small, draft))


def test_norms_of_q_and_k_belong_to_qwen3_only(tmp_path: Path) -> None:
    missing = edit(tiny.save_qwen3(tmp_path / "q", layers=1), lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"))
    assert "1 missing: model.layers.0.self_attn.q_norm.weight" in said(lambda: load_target(missing))
    added = edit(
        tiny.save_llama(tmp_path / "l", layers=1),
        lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
    )
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight" in said(lambda: load_target(added))


def test_an_eagle_heads_problems_are_named_together(small: Twin, tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["layers.0.self_attn.o_proj.weight"]
        tensors["hidden_norm.weight"] = torch.ones(64)
        tensors["fc.weight"] = torch.zeros(64, 192)

    message = said(lambda: load_eagle(small, edit(tiny.save_eagle(tmp_path), damage)))
    assert "1 missing: layers.0.self_attn.o_proj.weight" in message
    assert "1 unexpected: hidden_norm.weight" in message
    assert "fc.weight (found [64, 192], expected [64, 128])" in message


def test_an_eagle_head_that_wants_its_last_norm_must_have_it(small: Twin, tmp_path: Path) -> None:
    path = tiny.save_eagle(tmp_path, use_last_layernorm=True)
    assert "1 missing: norm.weight" in said(lambda: load_eagle(small, path))


@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        ("use_input_layernorm_in_first_layer", "1 missing: layers.0.input_layernorm.weight"),
        ("qkv_bias", "3 missing: layers.0.self_attn.k_proj.bias"),
        ("attention_bias", "3 missing: layers.0.self_attn.k_proj.bias"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_an_eagle_heads_switches_promise_must_be_there(
    small: Twin, tmp_path: Path, switch: str, missing: str, nested: bool
) -> None:
    config: dict[str, Any] = {"eagle_config": {switch: True}} if nested else {switch: True}
    assert missing in said(lambda: load_eagle(small, tiny.save_eagle(tmp_path, **config)))


def test_a_first_norm_that_an_eagle_heads_config_denies_is_not_used(small: Twin, tmp_path: Path) -> None:
    norm = {"layers.0.input_layernorm.weight": torch.ones(64)}
    path = tiny.save_eagle(tmp_path, tiny.eagle_tensors() | norm, use_input_layernorm_in_first_layer=False)
    assert "1 unexpected: layers.0.input_layernorm.weight" in said(lambda: load_eagle(small, path))


@pytest.mark.parametrize(
    "switch",
    [
        {"use_aux_hidden_state": True},
        {"parallel_draft_step": 3},
        {"parallel_drafting": True},
        {"use_mtp_layernorm": True},
    ],
    ids=str,
)
def test_a_switch_that_no_eagle_head_follows_here_is_refused_by_name(
    small: Twin, tmp_path: Path, switch: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=f"asks for {next(iter(switch))}: "):
        load_eagle(small, tiny.save_eagle(tmp_path, **switch))


def test_an_eagle_head_with_an_output_head_of_its_own_is_refused_and_a_copy_is_not(small: Twin, tmp_path: Path) -> None:
    assert "no lm_head.weight" in said(lambda: load_eagle(small, tiny.save_eagle(tmp_path / "a", has_lm_head=True)))
    head = small.head.float()
    copy = {"lm_head.weight": head.half()}
    assert load_eagle(small, tiny.save_eagle(tmp_path / "b", tiny.eagle_tensors() | copy, has_lm_head=True))
    own = {"lm_head.weight": head + 1}
    with pytest.raises(UnsupportedError, match="an output head of its own"):
        load_eagle(small, tiny.save_eagle(tmp_path / "c", tiny.eagle_tensors() | own, has_lm_head=True))


@pytest.mark.parametrize("key", ["model", "eagle_config"])
def test_a_part_of_an_eagle_config_is_an_object(small: Twin, tmp_path: Path, key: str) -> None:
    config: dict[str, Any] = {key: "x"}
    message = said(lambda: load_eagle(small, tiny.save_eagle(tmp_path, **config)))
    assert f"config.json says {key} is 'x', and this kind of model needs it as an object" in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of config.json: fp8"),
        ({"compression_config": {"format": "pack"}}, "compression_config of config.json: no quant_method"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ": bitsandbytes"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_its_method(
    small: Twin, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    target, draft = tiny.save_llama(tmp_path / "t", layers=1), tiny.save_eagle(tmp_path / "d", **settings)
    edit_config(target, settings)
    for load in (lambda: load_target(target), lambda: load_eagle(small, draft), lambda: load_standalone(small, target)):
        with pytest.raises(UnsupportedError, match=named):
            load()


@pytest.mark.parametrize(
    "settings", [None, {}, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}]
)
def test_a_quantisation_that_is_none_is_no_matter(tmp_path: Path, settings: dict[str, Any] | None) -> None:
    target = tiny.save_llama(tmp_path, layers=1)
    edit_config(target, {"quantization_config": settings})
    assert load_target(target)


def test_an_eagle_head_of_another_hidden_size_names_both(small: Twin, tmp_path: Path) -> None:
    message = said(lambda: load_eagle(small, tiny.save_eagle(tmp_path, hidden_size=48)))
    assert "hidden size 48" in message
    assert "the target 64" in message


def test_a_head_that_overflowed_in_half_precision_is_refused(small: Twin, tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in tiny.eagle_tensors().items()}
    tensors["fc.weight"][0, 0] = 1e6  # infinite in float16
    assert "fc.weight" in said(lambda: load_eagle(small, tiny.save_eagle(tmp_path, tensors)))


def test_two_spellings_of_one_tensor_are_named(small: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle_tensors()
    twice = tensors | {"model.fc.weight": tensors["fc.weight"] + 1}
    message = said(lambda: load_eagle(small, tiny.save_eagle(tmp_path, twice)))
    assert "fc.weight and " in message
    assert "model.fc.weight" in message
    assert "two spellings of one tensor" in message


def test_a_draft_lm_of_another_vocabulary_names_both(small: Twin, tmp_path: Path) -> None:
    message = said(lambda: load_standalone(small, tiny.save_llama(tmp_path, layers=1, vocab_size=120)))
    assert "vocabulary of 120 tokens" in message
    assert "128" in message


def test_a_draft_lms_problems_are_named_together(small: Twin, tmp_path: Path) -> None:
    path = edit(tiny.save_llama(tmp_path, layers=2), break_in_every_way)
    message = said(lambda: load_standalone(small, path))
    assert all(part in message for part in ("2 missing", "2 unexpected", "2 of the wrong shape"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_heads_become_float32_exactly(small: Twin, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in tiny.eagle_tensors().items()}
    drafter = load_eagle(small, tiny.save_eagle(tmp_path, tensors))
    assert torch.equal(drafter.fc.weight, tensors["fc.weight"].float())
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    q, k, v = (tensors[f"layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv")
    (layer,) = drafter.layers
    assert torch.equal(layer.attention.qkv.weight, torch.cat((q, k, v)))
