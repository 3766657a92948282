"""What the config.json of a DFlash draft says of its blocks, as z-lab and as speculators write it; imports no torch.

z-lab nests its keys in dflash_config (some files have them at the top) and names the layer that a state leaves;
speculators has them at the top and names the layer that a state enters (checkpoints.md §0.1, §4.6, §5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphspec.checkpoints import fields

from .switches import is_speculators

BLOCK_FIELD = "block_size"
MASK_FIELD = "mask_token_id"
ENTERED_FIELD = "aux_hidden_state_layer_ids"
LEFT_FIELD = "target_layer_ids"
_FEWEST_LAYERS = 4
"""Of a target, so that the rule for a config without layers names some of it."""
_OFF = ("causal", "use_swa", "attention_sink_bias", "add_swa_attention_sink_bias", "sample_from_anchor", "shift_label")
_NEUTRAL = ("attention_value_scale", "input_embedding_scale", "output_multiplier")


def block_size(config: Mapping[str, Any]) -> int | None:
    """Tokens of a block, the pending one included; None if the config does not say."""
    return next((size for place in _places(config) if (size := fields.size_or(place, BLOCK_FIELD, None))), None)


def mask_token(config: Mapping[str, Any]) -> int | None:
    """The id whose embedding stands where a token is to be drafted; None if the config does not say."""
    for place in _places(config):
        value = place.get(MASK_FIELD)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if value is not None:
            raise fields.wrong(MASK_FIELD, value, "a token id")
    return None


def tap_field(config: Mapping[str, Any]) -> str:
    """Where this layout names the target's layers."""
    return ENTERED_FIELD if is_speculators(config) else LEFT_FIELD


def entered_layers(config: Mapping[str, Any], *, target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The target layers whose input a block reads. Without a list: z-lab's rule, evenly from the second layer to the
    last but three; empty if the target is too shallow for it."""
    key = tap_field(config)
    listed = next((ids for place in _places(config) if (ids := fields.whole_numbers(place, key))), None)
    if listed is not None:
        return tuple(listed) if is_speculators(config) else tuple(layer + 1 for layer in listed)
    if target_layers < _FEWEST_LAYERS:
        return ()
    if draft_layers == 1:
        return (target_layers // 2 + 1,)
    span = target_layers - 4
    return tuple(round(1 + index * span / (draft_layers - 1)) + 1 for index in range(draft_layers))


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """The switches that ask for another block than the one here, as `key: value`."""
    asked = [f"{key}: true" for place in _places(config) for key in _OFF if fields.switch(place, key)]
    for place in _places(config):
        scales = ((key, fields.number_or(place, key, 1.0, above=float("-inf"))) for key in _NEUTRAL)
        asked += [f"{key}: {scale:g}" for key, scale in scales if scale != 1]
        if not fields.switch(place, "is_neox_style", True):
            asked.append("is_neox_style: false")
    return asked


def _places(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    yield fields.section(config, "dflash_config")
