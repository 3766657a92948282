"""What a training begins with: a new draft, or one that exists and goes on with other data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphspec.architecture import Resolution
from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.target import DecoderTarget
from graphspec.checkpoints.listing import listed
from graphspec.errors import ConfigError, UnsupportedError
from graphspec.resolution import most_num_draft_tokens, trained_num_draft_tokens
from graphspec.speculative_config import SpeculativeConfig

from .method import Method
from .recipe import DraftShape

_OF_USE = frozenset({"num_draft_tokens", "training"})
"""Attributes that say how a draft is used, not what it is."""


class Beginning(NamedTuple):
    """A drafter before its training."""

    drafter: Any
    """The method's."""
    config: dict[str, Any]
    """Its config.json."""
    kept: Tensor
    """i64[Vd]: the target's tokens that it can say."""


def begin_anew(
    method: Method, pair: Resolution, target: DecoderTarget, shape: DraftShape, kept: Tensor, *, depth: int, seed: int
) -> Beginning:
    """A new draft. Raises UnsupportedError for a target that cannot have one."""
    config = method.draft_config(pair.target.config, shape, len(kept), depth)
    return Beginning(method.new_drafter(target, config, kept, seed=seed), config, kept)


def go_on(method: Method, pair: Resolution, target: DecoderTarget, *, depth: int) -> Beginning:
    """The pair's draft: its sizes, its vocabulary, its weights.

    Raises UnsupportedError for one that differs from what the method makes in more than these, CheckpointError for
    one that does not fit the target.
    """
    assert pair.draft is not None
    use = SpeculativeConfig.parse({"speculative_method": method.name, "num_speculative_tokens": depth})
    given: Any = pair.load_drafter(target, use)
    pruned = getattr(given, "pruned", False)
    kept = given.says if pruned else torch.arange(target.config.vocabulary)
    begun = begin_anew(method, pair, target, _shape(given), kept, depth=depth, seed=0)
    if differing := _differing(given, begun.drafter):
        raise UnsupportedError(
            f"draft '{pair.draft.name}' is not built as --method {method.name} builds its drafts, and cannot be "
            f"trained on: {listed(differing)}; leave out --draft-model-path to train a new one"
        )
    begun.drafter.load_state_dict(given.state_dict())
    return begun


def check_depth(pair: Resolution, depth: int) -> None:
    """Raises ConfigError where the pair's draft proposes another number of tokens: what is trained on has the block,
    or the heads, that it had."""
    own = trained_num_draft_tokens(pair) or most_num_draft_tokens(pair)
    if pair.draft is not None and own is not None and own != depth:
        raise ConfigError(f"--depth {depth}: draft '{pair.draft.name}' proposes {own} tokens; give --depth {own}")


def _shape(drafter: Any) -> DraftShape:
    """Medusa's heads have the sizes of their target."""
    sizes: DecoderConfig | None = getattr(drafter, "config", None)
    if sizes is None:
        return DraftShape()
    return DraftShape(intermediate=sizes.intermediate, heads=sizes.heads, kv_heads=sizes.kv_heads, layers=sizes.layers)


def _differing(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of the parameters, buffers and switches that only one of the two has, or has otherwise."""
    left, right = _facts(one), _facts(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _facts(module: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    # Buffers are not trained: rotary tables and d2t are what config.json and the vocabulary say.
    facts |= {name: (tuple(buffer.shape), buffer.numpy().tobytes()) for name, buffer in module.named_buffers()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, bool | int | float | str | tuple) and name not in _OF_USE and name[0] != "_":
                facts[f"{path}.{name}".lstrip(".")] = value
    return facts
