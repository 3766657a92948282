"""What training knows of its methods: their names, and the options that each has."""

from __future__ import annotations

import pytest

from graphspec.architecture import DrafterKind
from graphspec.architectures.drafters import declarations
from graphspec.distill.methods import METHODS, find_method
from graphspec.distill.pipeline import DistillOptions
from graphspec.distill.recipe import DraftShape
from graphspec.errors import ConfigError


def test_a_method_is_called_as_the_drafters_it_trains() -> None:
    kinds = {kind.name: kind for kind in vars(declarations).values() if isinstance(kind, DrafterKind)}
    for name in METHODS:
        assert find_method(name).name == name
        assert name in kinds[name].methods


@pytest.mark.parametrize("name", METHODS)
def test_an_option_that_a_method_does_not_have_is_refused(name: str) -> None:
    method = METHODS[name]
    method.refuse_unused({"--of-another": None, **dict.fromkeys(method.options, 1)})
    with pytest.raises(ConfigError, match=f"^--of-another cannot be set for drafts of --method {name}") as caught:
        method.refuse_unused({"--of-another": 1})
    *_, flags = str(caught.value).partition("; it has ")
    assert all(flag.startswith("--") for flag in flags.split(", ") if flag)


def test_the_options_of_a_distillation_are_checked_when_they_are_made() -> None:
    DistillOptions(method="eagle3", draft_vocabulary=10, shape=DraftShape(intermediate=8, heads=2, kv_heads=1))
