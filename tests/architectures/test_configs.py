"""Every value of a config.json is checked when it is read: a wrong one is named, none is guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.blocks.rope import rope_from_config
from graphspec.errors import CheckpointError, GraphspecError, UnsupportedError

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 5e5,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1e400, float("nan"), "x", "false", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["factor", "rope_type"]), inner),
    max_leaves=3,
)


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.read({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", "linear"),
        ("rope_scaling", ["linear"]),
        ("rope_parameters", "default"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("max_position_embeddings", "x"),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", 256.0),
        ("head_dim", "16"),
        ("head_dim", -16),
        ("head_dim", 15),
        ("num_key_value_heads", 0.5),
        ("num_key_value_heads", -2),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", True),
        ("rope_theta", 0),
        ("rope_theta", -1e4),
        ("rope_theta", "10000"),
        ("rope_theta", float("inf")),
        ("partial_rotary_factor", [1]),
        ("tie_word_embeddings", "false"),
        ("attention_bias", 1),
        ("mlp_bias", "no"),
        ("use_sliding_window", "false"),
        ("layer_types", "full_attention"),
        ("layer_types", [["full_attention"]]),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_field(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key) as caught:
        read(**{key: value})
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({**LLAMA3, "factor": None}, "factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": "8192"}, "original_max_position_embeddings"),
        ({**LLAMA3, "rope_theta": 0}, "rope_theta"),
        ({**LLAMA3, "partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({**YARN, "beta_fast": "x"}, "beta_fast"),
        ({**YARN, "beta_slow": -1}, "beta_slow"),
        ({**YARN, "attention_factor": "x"}, "attention_factor"),
        ({**YARN, "attention_factor": 0}, "attention_factor"),
        ({**YARN, "mscale": "x"}, "mscale"),
        ({**YARN, "mscale_all_dim": [1]}, "mscale_all_dim"),
        ({**YARN, "truncate": "false"}, "truncate"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_value_of_a_scaling_is_named(spelling: str, scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(**{"rope_scaling": None, spelling: scaling})


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON, min_size=1, max_size=2), st.booleans())
def test_no_value_ends_in_anything_but_a_config_or_a_line(changes: dict[str, Any], scaled: bool) -> None:
    scaling = {"rope_scaling": {**YARN, **changes}} if scaled else {}
    try:
        config = read(**changes, **({} if "rope_scaling" in changes else scaling))
    except GraphspecError:
        return
    assert bool(torch.isfinite(config.rope.inverse_frequencies).all())


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3, YARN], ids=lambda s: str(s["rope_type"]))
def test_a_rope_for_each_kind_of_layer_is_read_for_the_kind_there_is(scaling: dict[str, Any]) -> None:
    inner = {**scaling, "rope_theta": 1e6}
    nested = {"full_attention": inner, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rope_scaling")}
    found = rope_from_config({**config, "rope_parameters": nested}, 16)
    expected = rope_from_config({**config, "rope_parameters": inner}, 16)
    assert torch.equal(found.inverse_frequencies, expected.inverse_frequencies)
    assert found.attention_factor == expected.attention_factor
    assert found.inverse_frequencies[-1] < 1e-4  # of 1e6, not of the default


def test_a_rope_for_other_layers_only_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="for layers of sliding_attention, not full_attention"):
        read(rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + ["x"], [1.0] * 7 + [0], "x", {"a": 1}])
def test_factors_of_frequencies_are_one_number_for_each(factors: object) -> None:
    with pytest.raises(CheckpointError, match="graphspec_rope_freq_factors"):
        read(graphspec_rope_freq_factors=factors)
