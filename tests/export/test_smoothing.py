"""Moving outliers into weights: nothing changes in floating point, and less is lost in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphspec.architectures import ops
from graphspec.architectures.state import layer_caches
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.export.smoothing import smooth
from graphspec.registry import target_kind

CAPACITY = 64
TOKENS = [(7 * i * i + 3 * i + 5) % tiny.VOCABULARY for i in range(40)]


def load(path: Path) -> DecoderTarget:
    target: DecoderTarget = target_kind(open_checkpoint(path)).load(open_checkpoint(path), capacity=CAPACITY)
    return target


def with_outliers(path: Path, factor: float = 30.0) -> Path:
    """Some channels of every norm are large, and are read by small weights, as trained models have them."""
    tensors = load_file(path / "model.safetensors")
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name, tensor in tensors.items():
        for norm, weights in readers.items():
            if f".{norm}." in name:
                tensor[[3, 11]] *= factor
            if any(f".{weight}.weight" in name for weight in weights) and norm == _norm_of(name):
                tensor[:, [3, 11]] /= factor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _norm_of(weight: str) -> str:
    return "input_layernorm" if "self_attn" in weight else "post_attention_layernorm"


@torch.no_grad()
def logits(target: DecoderTarget) -> Tensor:
    caches = [torch.zeros(spec.sizes(1, CAPACITY)) for spec in target.states]
    tokens = torch.tensor([TOKENS])
    window = target.window(torch.tensor([0]), tokens, torch.arange(CAPACITY))
    return target.logits(target(tokens, window, layer_caches(caches))[0].final)


def in_int8(x: Tensor, weight: Tensor) -> Tensor:
    """What the int8 encoding computes, from its definition."""
    step, largest = weight.abs().amax(1, keepdim=True) / 127, x.abs().amax(-1, keepdim=True) / 127
    return torch.nn.functional.linear((x / largest).round() * largest, (weight / step).round() * step)


@pytest.mark.parametrize(
    ("save", "changes"),
    [
        (tiny.save_llama, {}),
        (tiny.save_llama, {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
        (tiny.save_qwen3, {}),
    ],
)
def test_the_model_is_the_same_to_the_last_bit(tmp_path: Path, save: Any, changes: dict[str, Any]) -> None:
    target = load(with_outliers(save(tmp_path, layers=3, **changes)))
    before = logits(target)
    weights = {name: value.clone() for name, value in target.named_parameters()}
    smooth(target)
    assert torch.equal(logits(target), before)
    changed = {name.split(".", 2)[-1] for name, value in target.named_parameters() if not value.equal(weights[name])}
    assert {"input_norm.weight", "attention.qkv.weight", "mlp.gate_up.weight", "mlp.down.weight"} <= changed


def test_less_is_lost_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(with_outliers(tiny.save_llama(tmp_path, layers=3)))
    exact = logits(target)
    monkeypatch.setattr(ops, "linear", in_int8)
    before = (logits(target) - exact).abs().mean()
    smooth_in_float(target, monkeypatch)
    after = (logits(target) - exact).abs().mean()
    assert after < before / 3


def smooth_in_float(target: DecoderTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear", torch.nn.functional.linear)
        smooth(target)


def test_a_channel_that_nothing_reaches_stays_as_it_is(tmp_path: Path) -> None:
    path = tiny.save_llama(tmp_path, layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][5] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][:, 7] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    target = load(path)
    before = logits(target)
    smooth(target)
    assert torch.equal(logits(target), before)
    assert all(value.isfinite().all() for value in target.parameters())
