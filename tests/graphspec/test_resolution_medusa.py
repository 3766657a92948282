"""Pairs with Medusa heads: what is in the file decides how many tokens they propose, and whether they fit."""

from __future__ import annotations

import pytest
from headers import Header, refusal, target_header

from graphspec.errors import ConfigError
from graphspec.registry import registered
from graphspec.resolution import complete_config, default_num_draft_tokens, resolve
from graphspec.speculative_config import SpeculativeConfig

PUBLISHED = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}


def heads(count: int = 5, *, hidden: int = 64, vocabulary: int = 128, prefix: str = "") -> Header:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(count):
        shapes[f"{prefix}{head}.0.linear.weight"] = (hidden, hidden)
        shapes[f"{prefix}{head}.0.linear.bias"] = (hidden,)
        shapes[f"{prefix}{head}.1.weight"] = (vocabulary, hidden)
    return Header("heads", PUBLISHED, shapes)


@pytest.mark.parametrize("method", [None, "medusa"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_heads_resolve_with_either_target(method: str | None, prefix: str) -> None:
    qwen, draft = target_header("Qwen3ForCausalLM", "qwen3"), heads(prefix=prefix)
    assert resolve(target_header(), draft, method, None, registered()).architecture.name.endswith(
        "MedusaLlama3ForCausalLM"
    )
    assert resolve(qwen, draft, method, None, registered()).architecture.name == "UnifiedMedusaQwen3ForCausalLM"


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_every_head_drafts_a_token_whatever_the_config_says(prefix: str) -> None:
    resolution = resolve(target_header(), heads(5, prefix=prefix), None, None, registered())
    assert default_num_draft_tokens(resolution) == 5
    assert complete_config(SpeculativeConfig(), resolution).draft_width == 5


def test_fewer_tokens_than_heads_may_be_asked_for_and_more_may_not() -> None:
    resolution = resolve(target_header(), heads(5), None, None, registered())
    for count in (1, 3, 5):
        asked = SpeculativeConfig(speculative_method="medusa", num_speculative_tokens=count)
        assert complete_config(asked, resolution).draft_width == count
    asked = SpeculativeConfig(speculative_method="medusa", num_speculative_tokens=6)
    with pytest.raises(ConfigError, match="num_speculative_tokens 6: draft 'heads' can propose 5 at most"):
        complete_config(asked, resolution)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (heads(hidden=32), "its 0.0.linear.weight has 32 rows and the target's hidden_size is 64"),
        (heads(vocabulary=100), "its 0.1.weight has 100 rows and the target's vocab_size is 128"),
        (heads(0), "it has no 0.0.linear.weight, with which Medusa heads begin"),
        (Header("heads", PUBLISHED, {"blocks.0.layers.0.weight": (64, 64)}), "it has no 0.0.linear.weight"),
    ],
)
def test_heads_of_another_target_are_refused_with_the_numbers(draft: Header, says: str) -> None:
    message = refusal(draft, "medusa")
    assert message.startswith("draft 'heads' does not belong to target 'target' as UnifiedMedusaLlama3ForCausalLM")
    assert says in message
