"""What new drafts and their checkpoints have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphspec.architectures.blocks.decoder import Attention, DecoderConfig
from graphspec.architectures.blocks.rope import rope_theta
from graphspec.architectures.drafters.dflash import DFlashDrafter
from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.ends import TappingDrafter
from graphspec.architectures.target import DecoderTarget
from graphspec.architectures.weights import Source
from graphspec.errors import UnsupportedError

from .files import whole_file
from .recipe import DraftShape
from .vocabulary import target_to_draft

CONFIG_FILE = "config.json"
WEIGHTS_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Of drafts made here, by one method or another."""
_CARRIED = ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id")
"""Config keys that a draft has from its target."""
_FEWEST_LAYERS = 4


def taps(layers: int, *, reader: str) -> tuple[int, int, int]:
    """`usual_taps`; raises UnsupportedError, naming `reader`, for a target too shallow."""
    if (usual := usual_taps(layers)) is None:
        raise UnsupportedError(f"{reader} reads three layers, and a target of {layers} has too few between its ends")
    return usual


def usual_taps(layers: int) -> tuple[int, int, int] | None:
    """Layers whose input a draft reads, as vLLM counts them; None: the target is too shallow. In a deep target those
    that every server takes when an EAGLE-3 config names none; they would meet in a shallow one. Methods that read the
    same share features."""
    if layers < _FEWEST_LAYERS:
        return None
    deep = (2, layers // 2, layers - 3)
    return deep if deep[0] < deep[1] < deep[2] else (1, layers // 2, layers - 1)


def layers_config(target: Mapping[str, Any], shape: DraftShape, layers: int) -> dict[str, Any]:
    """What config.json says of `layers` decoder layers beside those of the target."""
    sizes = DecoderConfig.read(target)
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": shape.intermediate or sizes.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads or sizes.heads,
        "num_key_value_heads": shape.kv_heads or sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": sizes.vocabulary,
        "rope_theta": rope_theta(target),  # not its scaling (checkpoints.md §4.2)
        **{key: target[key] for key in _CARRIED if target.get(key) is not None},
    }


def fill_randomly(drafter: nn.Module, generator: torch.Generator) -> None:
    """Norms at one, matrices at a scale that keeps what they read."""
    for name, parameter in list(drafter.named_parameters()):
        shape = tuple(parameter.shape)
        value = torch.ones(shape)
        if len(shape) == 2:
            value = torch.randn(shape, generator=generator) * (0.1 * shape[1] ** -0.5)
        set_parameter(drafter, name, value)


def set_parameter(drafter: nn.Module, name: str, value: Tensor) -> None:
    """Gives a parameter a value, from which it is trained on."""
    owner, _, attribute = name.rpartition(".")
    setattr(drafter.get_submodule(owner), attribute, nn.Parameter(value))


def copy_ends(target: DecoderTarget, drafter: DFlashDrafter | Eagle3Drafter, kept: Tensor) -> None:
    """The target's norm, the rows of its head for the tokens i64[Vd] `kept`, and its last tap as the feature."""
    assert drafter.head is not None
    drafter.norm.weight.copy_(target.norm.weight)
    drafter.head.weight.copy_(target.head_weight[kept])
    drafter.fc.weight[:, -target.config.hidden :].add_(torch.eye(target.config.hidden))


def same_heads(one: Attention, other: Attention) -> bool:
    """Whether two attentions have heads in the same numbers."""
    return (one.heads, one.kv_heads) == (other.heads, other.kv_heads)


def stored_tensors(drafter: nn.Module, sources: Mapping[str, Source]) -> dict[str, Tensor]:
    """The drafter's parameters in float16 under the names they are loaded by, packed ones in their parts."""
    parameters = dict(drafter.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, source in sources.items():
        value = parameters[name].detach()
        parts = torch.split(value, list(source.rows)) if source.rows else (value,)
        tensors |= {stored: part.half() for stored, part in zip(source.names, parts, strict=True)}
    return tensors


def vocabulary_tensors(drafter: TappingDrafter) -> dict[str, Tensor]:
    """d2t and t2d of a pruned draft."""
    return {"d2t": drafter.offsets, "t2d": target_to_draft(drafter.says, drafter.config.vocabulary)}


def write_draft(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, file: str = WEIGHTS_FILES[0]
) -> None:
    """config.json and the weights in `file`."""
    with whole_file(folder / file) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    with whole_file(folder / CONFIG_FILE) as partial:
        partial.write_text(json.dumps(config, indent=2) + "\n")
