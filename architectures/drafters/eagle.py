"""EAGLE-1 and EAGLE-2 heads as a chain (arXiv 2401.15077, 2406.16858; checkpoints.md §4.1).

One decoder layer imitates the target's final hidden state: it reads the embedding of token x_{p+1} beside the
target's state of position p, and the target's head reads its output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from graphspec.checkpoints import Checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

from .. import ops
from ..blocks.decoder import DecoderConfig, DecoderLayer, DecoderLayers, LayerCache, Linear, Norm
from ..blocks.decoder_weights import layer_sources
from ..blocks.rope import RotaryTable
from ..state import StateSpec, cache_specs, flatten, layer_caches
from ..step import Verified
from ..target import DecoderTarget, draft_window, window
from ..weights import Source, load_parameters, one
from .names import RenamedCheckpoint
from .switches import biases, body, is_on, refuse, stated


class EagleDrafter(nn.Module):
    """x = fc([embed(x_{p+1}) | feature_p]); layers; the target's head. The output is the next feature."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        *,
        capacity: int,
        num_draft_tokens: int,
        fc_bias: bool,
        first_input_norm: bool,
        last_norm: bool,
    ) -> None:
        super().__init__()
        self.config, self.num_draft_tokens = config, num_draft_tokens
        self.fc = Linear(2 * config.hidden, config.hidden, bias=fc_bias)
        self.layers = DecoderLayers(
            DecoderLayer(config, input_norm=first_input_norm or layer > 0) for layer in range(config.layers)
        )
        self.norm = Norm(config.hidden, config.eps) if last_norm else None
        self.rotary = RotaryTable(config.rope, capacity)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The head's own caches: entries come from true target features only."""
        return cache_specs("draft", self.config)

    def propose(self, target: DecoderTarget, verified: Verified, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        following = verified.tokens[:, 1:]  # x_{p+1} beside the feature of p
        at = window(self.rotary, verified.kv_len, following.shape[1], verified.key_positions)
        x = self.fuse(target.embed(following), verified.hidden.final)
        caches = []
        for layer, cache in zip(self.layers, layer_caches(states), strict=True):
            x, cache = layer(x, at, cache)
            caches.append(cache)
        feature = self.feature(ops.take_rows(x, verified.last.unsqueeze(1)))
        drafts = [target.logits(feature).argmax(dim=-1)]
        drafted: list[LayerCache | None] = [None] * len(caches)
        for step in range(1, self.num_draft_tokens):
            position = verified.next_kv_len - 1 + step
            at = draft_window(self.rotary, position, verified.next_kv_len, verified.key_positions)
            x = self.fuse(target.embed(drafts[-1]), feature)
            for index, layer in enumerate(self.layers):
                x, drafted[index] = layer.draft(x, at, caches[index], drafted[index])
            feature = self.feature(x)
            drafts.append(target.logits(feature).argmax(dim=-1))
        return torch.cat(drafts, dim=1), flatten(caches)

    def fuse(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What the layers read, [B, T, H] each."""
        return self.fc(torch.cat((embedded, feature), dim=-1))

    def feature(self, x: Tensor) -> Tensor:
        """Of the last layer's output: what the target's head and the next draft read."""
        return x if self.norm is None else self.norm(x)


def load_drafter(
    target: DecoderTarget, draft: Checkpoint, num_draft_tokens: int, config: SpeculativeConfig
) -> EagleDrafter:
    """The head with its weights; embedding and lm_head are the target's.

    Raises CheckpointError for missing, unexpected or wrongly shaped tensors, or another hidden size;
    UnsupportedError for a head that says it does what none does here.
    """
    refuse(draft, "an EAGLE-1/2 head", on=("use_aux_hidden_state",))
    renamed = RenamedCheckpoint(draft)
    shape = DecoderConfig.read({"vocab_size": target.config.vocabulary, **body(draft)})
    shape = replace(shape, **biases(draft, renamed))
    if shape.hidden != target.config.hidden:
        raise CheckpointError(
            f"draft '{draft.name}' has hidden size {shape.hidden} and the target {target.config.hidden}: "
            "an EAGLE head needs the target's hidden size"
        )
    first_norm = stated(draft, "use_input_layernorm_in_first_layer")
    drafter = EagleDrafter(
        shape,
        capacity=target.capacity,
        num_draft_tokens=num_draft_tokens,
        fc_bias="fc.bias" in renamed,
        # What the config promises and the file lacks must be missed; what it denies and the file has, refused.
        first_input_norm="layers.0.input_layernorm.weight" in renamed if first_norm is None else first_norm,
        last_norm=is_on(draft, "use_last_layernorm"),
    )
    load_parameters(drafter, renamed, sources(drafter), ignored=_is_copy)
    if is_on(draft, "has_lm_head"):
        _check_head(renamed, target)
    return drafter


def _check_head(renamed: RenamedCheckpoint, target: DecoderTarget) -> None:
    """A head that says it has an output head of its own must have the target's: that is the one that is used."""
    if "lm_head.weight" not in renamed:
        raise CheckpointError(f"draft '{renamed.name}' says has_lm_head and has no lm_head.weight")
    ((_, own),) = renamed.load(["lm_head.weight"])
    shared = target.head_weight
    if own.shape != shared.shape or not torch.equal(own, shared.to(own.dtype)):
        raise UnsupportedError(
            f"draft '{renamed.name}' has an output head of its own (has_lm_head), and an EAGLE-1/2 head is run with "
            "the target's here"
        )


def sources(drafter: EagleDrafter) -> dict[str, Source]:
    """Where every parameter of a head comes from, in canonical names; training writes them back there."""
    found = {f"fc.{part}": one(f"fc.{part}") for part, _ in drafter.fc.named_parameters()}
    for index, layer in enumerate(drafter.layers):
        name = f"layers.{index}"
        found |= layer_sources(name, name, drafter.config, input_norm=layer.input_norm is not None)
    if drafter.norm is not None:
        found["norm.weight"] = one("norm.weight")
    return found


def _is_copy(name: str) -> bool:
    """Copies of the target's own tensors, and what the module computes (checkpoints.md §2.4, §7.5)."""
    return name in ("embed_tokens.weight", "lm_head.weight", "norm.weight") or name.endswith("inv_freq")
