"""Turning the residual stream: nothing changes in floating point but rounding, and less is lost in 8 bits."""

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
from graphspec.architectures.target import DecoderTarget, Hidden
from graphspec.checkpoints import open_checkpoint
from graphspec.export.rotation import BOUND, rotate
from graphspec.registry import target_kind

CAPACITY = 64
TOKENS = torch.tensor([[(7 * i * i + 3 * i + 5) % tiny.VOCABULARY for i in range(40)]])


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
def run(target: DecoderTarget) -> tuple[Hidden, Tensor]:
    """What drafters see, and the target's own logits."""
    caches = [torch.zeros(spec.sizes(1, CAPACITY)) for spec in target.states]
    window = target.window(torch.tensor([0]), TOKENS, torch.arange(CAPACITY))
    hidden, _ = target(TOKENS, window, layer_caches(caches), taps=(1, 2))
    return hidden, target.own_logits(hidden.normed)


def assert_close(value: Tensor, expected: Tensor) -> None:
    """Up to float32's rounding of sums of values as large as these."""
    assert (value - expected).abs().max() < 1e-4 * expected.abs().max()


def in_int8(x: Tensor, weight: Tensor, bound: float = 0.0) -> Tensor:
    """What the int8 encoding computes, from its definition."""
    step = weight.abs().amax(1, keepdim=True) / 127
    largest = torch.tensor(bound / 127) if bound else x.abs().amax(-1, keepdim=True) / 127
    return torch.nn.functional.linear((x / largest).round().clamp(-128, 127) * largest, (weight / step).round() * step)


@pytest.mark.parametrize(
    ("save", "changes"),
    [
        (tiny.save_llama, {}),
        (tiny.save_llama, {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
        (tiny.save_llama, {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}),
        (tiny.save_qwen3, {}),
    ],
)
def test_the_model_is_the_same_and_so_is_what_drafters_see(tmp_path: Path, save: Any, changes: dict[str, Any]) -> None:
    target = load(with_outliers(save(tmp_path, layers=3, **changes)))
    embedding = target.embedding.weight.clone()
    before, logits = run(target)
    assert before.taps is not None
    rotate(target)
    after, turned = run(target)
    assert after.taps is not None
    assert_close(turned, logits)
    assert_close(after.taps, before.taps)
    assert_close(after.final, before.final)
    # A draft reads the target's embedding and head with hidden states of its own making.
    assert_close(target.logits(before.final), logits)
    assert torch.equal(target.embedding.weight, embedding)
    assert torch.equal(target.embed(TOKENS), embedding[TOKENS])


def test_rows_end_within_the_bound_that_weights_are_told_of(tmp_path: Path) -> None:
    target = load(with_outliers(tiny.save_llama(tmp_path, layers=3)))
    seen: list[Tensor] = []
    rotate(target)
    readers = [target.head] + [m for layer in target.layers for m in (layer.attention.qkv, layer.mlp.gate_up)]
    for reader in readers:
        assert reader is not None
        assert reader.bound == BOUND
        reader.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run(target)
    assert len(seen) == len(readers)
    for rows in seen:
        torch.testing.assert_close(rows.pow(2).mean(-1), torch.ones(rows.shape[:-1]), rtol=1e-3, atol=1e-3)
        assert (rows.abs() > BOUND).float().mean() < 1e-3
    assert all(layer.attention.output.bound == 0 == layer.mlp.down.bound for layer in target.layers)


def test_less_is_lost_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(with_outliers(tiny.save_llama(tmp_path, layers=3)))
    exact = run(target)[1]
    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear", in_int8)
        before = (run(target)[1] - exact).abs().mean()
    rotate(target)
    monkeypatch.setattr(ops, "linear", in_int8)
    after = (run(target)[1] - exact).abs().mean()
    assert after < before / 3


def test_a_channel_that_the_last_norm_drops_is_dropped(tmp_path: Path) -> None:
    path = tiny.save_llama(tmp_path, layers=3)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][5] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    target = load(path)
    before, logits = run(target)
    rotate(target)
    after, turned = run(target)
    assert_close(turned, logits)
    assert_close(after.final, before.final)
    assert target.logits(before.final).isfinite().all()
