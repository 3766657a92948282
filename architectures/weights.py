"""Checkpoint tensors → module parameters, checked both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from graphspec.checkpoints import Checkpoint, check_tensors, fields
from graphspec.checkpoints.listing import listed
from graphspec.detection import draft_body, target_body
from graphspec.errors import CheckpointError, UnsupportedError

_INTEGERS = re.compile(r"[IU]\d+|BOOL")
"""Names of dtypes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter comes from: checkpoint tensors stacked along their first dimension."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    """First dimension of each."""


def one(name: str) -> Source:
    """A parameter that is one checkpoint tensor."""
    return Source((name,), ())


def load_parameters(
    module: nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    *,
    ignored: Callable[[str], bool] = lambda _: False,
) -> None:
    """Fills every parameter of `module` that `sources` names, in float32.

    Raises CheckpointError naming every missing, unexpected (unless ignored) or wrongly shaped tensor, or else every
    one that holds integers or a value that is not finite in float32.
    """
    parameters = dict(module.named_parameters())
    unnamed = parameters.keys() ^ sources.keys()
    assert not unnamed, f"parameters and sources differ: {sorted(unnamed)}"
    expected = {
        name: (rows, *parameters[parameter].shape[1:]) if source.rows else tuple(parameters[parameter].shape)
        for parameter, source in sources.items()
        for name, rows in zip(source.names, source.rows or (0,), strict=True)
    }
    _refuse_quantised(checkpoint)
    check_tensors(checkpoint, expected, ignored)
    _refuse_integers(checkpoint, expected)
    # One pass over all of them: an error names every bad tensor, not only those of one parameter.
    loaded = checkpoint.load(name for source in sources.values() for name in source.names)
    for parameter, source in sources.items():
        tensors = [tensor.float() for _, tensor in islice(loaded, len(source.names))]
        value = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        owner, _, attribute = parameter.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    """What a quantised checkpoint stores is not its weights, whatever shape it has."""
    for place in (checkpoint.config, target_body(checkpoint.config), draft_body(checkpoint.config)):
        for key in ("quantization_config", "compression_config"):
            settings = fields.section(place, key)
            method = settings.get("quant_method")
            # What bitsandbytes leaves behind when neither of its types is used.
            unused = method == "bitsandbytes" and not settings.get("load_in_4bit") and not settings.get("load_in_8bit")
            if settings and not unused:
                raise UnsupportedError(
                    f"checkpoint {checkpoint.name} is quantised ({key} of config.json: {method or 'no quant_method'}), "
                    "and is read only as GGUF; use that or the unquantised one"
                )


def _refuse_integers(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Integers as weights are codes of a quantisation whose scales nothing here knows."""
    coded = [f"{name} ({dtype})" for name in names if _INTEGERS.fullmatch(dtype := checkpoint.tensors[name].dtype)]
    if coded:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} holds integers where weights belong: {listed(coded)}; a quantised "
            "checkpoint is read only as GGUF, so use that or the unquantised one"
        )
