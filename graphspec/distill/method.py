"""What a method of drafting is to training: the training itself knows none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from graphspec.architectures.target import DecoderTarget
from graphspec.errors import ConfigError

from .batch import Batch, Hits
from .recipe import DraftShape, Recipe


class Loss(Protocol):
    """What a batch teaches."""

    def __call__(
        self,
        drafter: Any,
        target: DecoderTarget,
        batch: Batch,
        recipe: Recipe,
        generator: torch.Generator,
        *,
        hits: Hits | None = None,
    ) -> Tensor:
        """The loss, a scalar that may need no gradient where nothing is to be learnt; adds to `hits` if given.

        What is drawn comes from `generator`, so that a training that goes on draws as one that never stopped.
        """
        ...


class NewDrafter(Protocol):
    """A drafter before its training."""

    def __call__(self, target: DecoderTarget, config: Mapping[str, Any], kept: Tensor, *, seed: int) -> Any:
        """The module of config.json `config` that says the target's tokens i64[Vd] `kept`. It has
        `taps`, the target's layers whose input it reads; its parameters are trained."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How drafts of one kind are trained. A drafter is of the class that `new_drafter` makes."""

    name: str
    """As in --method and --speculative-method, and of the DrafterKind that builds it."""
    options: frozenset[str]
    """Of those that not every method has (`refuse_unused`), the ones it reads. Without --draft-vocab-size its
    drafts say every token of the target."""
    draft_config: Callable[[Mapping[str, Any], DraftShape, int, int], dict[str, Any]]
    """`draft_config(target's config.json, shape, size of the draft's vocabulary, depth)`: the draft's config.json.
    Raises UnsupportedError for a target that cannot have such drafts."""
    new_drafter: NewDrafter
    loss: Loss
    save: Callable[[Path, Any, Mapping[str, Any]], None]
    """`save(folder, drafter, config)`: the checkpoint as other servers read it."""

    def refuse_unused(self, given: Mapping[str, object]) -> None:
        """Raises ConfigError for an option, by the flag's name, that is not None and that no draft of this kind has."""
        if unused := sorted(name for name, value in given.items() if value is not None and name not in self.options):
            flags = sorted(name for name in self.options if name.startswith("--"))
            known = f"; it has {', '.join(flags)}" if flags else ""
            raise ConfigError(f"{', '.join(unused)} cannot be set for drafts of --method {self.name}{known}")
