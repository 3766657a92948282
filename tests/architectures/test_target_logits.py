"""A target run through its caches, in chunks, says what transformers says of the whole sequence at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from torch import Tensor
from twins import CAPACITY, Twin, load_twin

from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.state import layer_caches
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.registry import target_kind

TOKENS = tuple((7 * i * i + 3 * i + 5) % tiny.VOCABULARY for i in range(41))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # kept, blended and divided frequencies with heads of 16
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "another theta": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 of unknown length": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    "yarn": YARN,
    "yarn of unknown length": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    "yarn with betas": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn with attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4},
}
LLAMAS: dict[str, dict[str, Any]] = {
    "as Llama 3": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "multi-head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "heads wider than the hidden size": {"head_dim": 32},
    "another eps": {"rms_norm_eps": 0.1},
}
QWENS: dict[str, dict[str, Any]] = {
    "as Qwen3": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "yarn": {"rope_parameters": YARN},
}


def chunked_logits(target: DecoderTarget, chunk: int) -> Tensor:
    """Logits of TOKENS, f32[n, V], from two rows of caches of which the second starts five tokens later."""
    caches = layer_caches(
        [
            torch.full((2, *(CAPACITY if dim == "capacity" else int(dim) for dim in spec.shape[1:])), 3.0)
            for spec in target.states
        ]
    )
    logits = []
    for start in range(0, len(TOKENS), chunk):
        tokens = torch.tensor([TOKENS[start : start + chunk]] * 2)
        starts = torch.tensor([start, start])
        window = target.window(starts, tokens, torch.arange(start + tokens.shape[1] + 1))
        hidden, caches = target(tokens, window, caches)
        logits.append(target.logits(hidden.final))
    both = torch.cat(logits, dim=1)
    assert torch.equal(both[0], both[1])
    return both[0]


def check(twin: Twin, *chunks: int) -> None:
    """Every logit is within 1e-4 of transformers', relative to the largest of its position."""
    with torch.no_grad():
        wanted = twin.model(torch.tensor([TOKENS])).logits[0]
        for chunk in chunks:
            error = (chunked_logits(twin.target, chunk).double() - wanted).abs().amax(dim=-1)
            assert bool((error <= 1e-4 * wanted.abs().amax(dim=-1)).all()), f"chunks of {chunk}: {error.max()}"


def edit_config(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def respell(config: dict[str, Any]) -> None:
    """rope_parameters → rope_theta and rope_scaling, as configs said it before transformers 5."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}


@pytest.mark.parametrize("kind", LLAMAS)
def test_llama(tmp_path: Path, kind: str) -> None:
    check(load_twin(tiny.save_llama(tmp_path, layers=3, **LLAMAS[kind])), 7, len(TOKENS))


@pytest.mark.parametrize("kind", QWENS)
def test_qwen3(tmp_path: Path, kind: str) -> None:
    check(load_twin(tiny.save_qwen3(tmp_path, layers=3, **QWENS[kind])), 7, len(TOKENS))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 20, 40])
def test_chunks_of_any_size_agree(llama: Twin, qwen3: Twin, chunk: int) -> None:
    check(llama, chunk)
    check(qwen3, chunk)


@pytest.mark.parametrize("old_spelling", [False, True])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_in_both_spellings(tmp_path: Path, kind: str, old_spelling: bool) -> None:
    tiny.save_llama(tmp_path, layers=2, rope_parameters=dict(ROPES[kind]))
    if old_spelling:
        edit_config(tmp_path, respell)
    check(load_twin(tmp_path), 8)


OTHER_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 321.0}


@pytest.mark.parametrize("theta", [None, 777.0])
@pytest.mark.parametrize("inner", [None, 555.0], ids=["no theta inside", "theta inside"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "nothing"])
def test_of_two_rope_fields_the_one_that_transformers_reads_holds(
    tmp_path: Path, kind: str, inner: float | None, theta: float | None
) -> None:
    scaling = {key: value for key, value in ROPES.get(kind, {}).items() if key != "rope_theta"}
    if inner is not None and scaling:
        scaling["rope_theta"] = inner
    tiny.save_llama(tmp_path, layers=2, rope_parameters=dict(OTHER_ROPE))
    edit_config(tmp_path, lambda config: config.update(rope_scaling=scaling or None))
    if theta is not None:
        edit_config(tmp_path, lambda config: config.update(rope_theta=theta))
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["factor"] == 4.0
    check(load_twin(tmp_path), 8)


def test_a_head_dimension_that_is_not_given_is_hidden_over_heads(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path, layers=2)
    edit_config(tmp_path, lambda config: config.pop("head_dim"))
    check(load_twin(tmp_path), 8)


def test_key_heads_that_are_not_given_are_the_query_heads(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path, layers=2, num_key_value_heads=4)
    edit_config(tmp_path, lambda config: config.pop("num_key_value_heads"))
    check(load_twin(tmp_path), 8)


def test_shards_are_read_as_one_checkpoint(tmp_path: Path, llama: Twin) -> None:
    llama.model.float().save_pretrained(tmp_path, max_shard_size="100KB")
    llama.model.double()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = target_kind(open_checkpoint(tmp_path)).load(open_checkpoint(tmp_path), capacity=CAPACITY)
    assert torch.equal(chunked_logits(target, 8), chunked_logits(llama.target, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_compute_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny.save_llama(tmp_path / "full", layers=2)
    reference.load_model(tmp_path / "full").to(dtype).save_pretrained(tmp_path / "half")
    check(load_twin(tmp_path / "half"), 8)


def test_taps_are_the_states_that_enter_their_layers(llama: Twin) -> None:
    states = reference.target_states(llama.model, TOKENS)
    taps = (0, 3, 8)
    caches = [torch.zeros(1, 2, CAPACITY, 16) for _ in llama.target.states]
    tokens = torch.tensor([TOKENS])
    window = llama.target.window(torch.tensor([0]), tokens, torch.arange(len(TOKENS)))
    hidden, _ = llama.target(tokens, window, layer_caches(caches), taps)
    wanted = torch.cat([states.entering[tap] for tap in taps], dim=-1)
    assert hidden.taps is not None
    torch.testing.assert_close(hidden.taps[0].double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(hidden.final[0].double(), states.final, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tiny.save_llama(tmp_path, layers=2)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    with pytest.raises(UnsupportedError, match=said):
        DecoderConfig.read(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "128"}, "vocab_size is '128'"),
        ({"rope_parameters": {"rope_type": "linear"}}, " factor is null"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor is null"),
    ],
)
def test_a_size_that_is_none_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tiny.save_llama(tmp_path, layers=2)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=said):
        DecoderConfig.read(config)


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path, layers=2)
    edit_config(tmp_path, lambda config: config.pop("intermediate_size"))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no intermediate_size"):
        target_kind(checkpoint).load(checkpoint, capacity=CAPACITY)
