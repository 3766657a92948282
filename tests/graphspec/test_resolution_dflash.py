"""DFlash drafts resolve by their blocks: their length is K, and what they read must be there."""

from __future__ import annotations

from typing import Any

import pytest
from headers import Header, refusal, target_header

from graphspec.architecture import Architecture
from graphspec.errors import ConfigError
from graphspec.registry import registered
from graphspec.resolution import complete_config, default_num_draft_tokens, resolve
from graphspec.speculative_config import SpeculativeConfig

ARCHITECTURES: tuple[Architecture, ...] = registered()


SIZES = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2}
SHAPES: dict[str, tuple[int, ...]] = {"fc.weight": (64, 128), "hidden_norm.weight": (64,)}
BLOCK = {"mask_token_id": 127, "target_layer_ids": [1, 5]}


def z_lab(*, shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Header:
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **SIZES, "block_size": 16}
    return Header("draft", {**config, "dflash_config": BLOCK, **changes}, shapes or SHAPES)


def speculators(**changes: Any) -> Header:
    config = {
        "speculators_model_type": "dflash",
        "block_size": 8,
        "draft_vocab_size": 32,
        "mask_token_id": 127,
        "aux_hidden_state_layer_ids": [2, 8],
        "transformer_layer_config": {**SIZES, "model_type": "qwen3"},
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
    }
    return Header("draft", {**config, **changes}, {**SHAPES, "lm_head.weight": (32, 64), "d2t": (32,)})


@pytest.mark.parametrize("method", [None, "dflash"])
def test_a_block_draft_resolves_with_either_target(method: str | None) -> None:
    qwen = target_header("Qwen3ForCausalLM", "qwen3")
    assert (
        resolve(target_header(), z_lab(), method, None, ARCHITECTURES).architecture.name
        == "UnifiedDflashLlama3ForCausalLM"
    )
    assert resolve(qwen, z_lab(), method, None, ARCHITECTURES).architecture.name == "UnifiedDflashQwen3ForCausalLM"


@pytest.mark.parametrize(
    ("draft", "tokens"),
    [
        (z_lab(), 15),
        (z_lab(block_size=None, dflash_config={**BLOCK, "block_size": 10}), 9),
        (speculators(), 7),
        (speculators(speculators_config={"proposal_methods": [{"speculative_tokens": 5}]}), 7),
    ],
)
def test_a_block_without_its_first_token_is_what_is_drafted(draft: Header, tokens: int) -> None:
    resolution = resolve(target_header(), draft, None, None, ARCHITECTURES)
    assert default_num_draft_tokens(resolution) == tokens
    assert complete_config(SpeculativeConfig(), resolution).draft_width == tokens
    asked = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=tokens)
    assert complete_config(asked, resolution).draft_width == tokens


@pytest.mark.parametrize("count", [1, 14, 16])
def test_another_number_than_the_blocks_is_refused(count: int) -> None:
    """The rows of a block see each other: those of a shorter one would say something else."""
    asked = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=count)
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens {count}: draft 'draft' was trained .* 15 tokens"):
        complete_config(asked, resolve(target_header(), z_lab(), None, None, ARCHITECTURES))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (z_lab(block_size=None), "does not say how many tokens a block has (block_size)"),
        (z_lab(block_size=1), "its blocks have 1 tokens (block_size): 2 to 129 are possible"),
        (z_lab(block_size=200), "its blocks have 200 tokens"),
        (z_lab(block_size="16"), "its config.json says block_size is '16'"),
        (z_lab(dflash_config={"target_layer_ids": [1, 5]}), "does not say which token stands for a mask"),
        (z_lab(dflash_config={**BLOCK, "mask_token_id": 128}), "mask_token_id is 128 and the target's vocabulary ends"),
        (z_lab(dflash_config={**BLOCK, "mask_token_id": -1}), "says mask_token_id is -1"),
        (z_lab(dflash_config={**BLOCK, "target_layer_ids": [1, 8]}), "reads what enters layers [9] (target_layer_ids)"),
        (z_lab(dflash_config={**BLOCK, "target_layer_ids": [1]}), "its fc reads 128 values, and the 1 layers it reads"),
        (z_lab(dflash_config={**BLOCK, "target_layer_ids": "all"}), "says target_layer_ids is 'all'"),
        (z_lab(shapes={"hidden_norm.weight": (64,)}), "it has no fc.weight that joins target layers"),
        (z_lab(hidden_size=32), "its hidden size is 32 and the target's is 64"),
        (z_lab(vocab_size=100), "its vocabulary has 100 tokens and the target's 128"),
        (speculators(draft_vocab_size=31), "its draft vocabulary has 31 tokens and its d2t 32 rows"),
        (speculators(aux_hidden_state_layer_ids=[2, 9]), "enters layers [9] (aux_hidden_state_layer_ids)"),
        (
            speculators(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}}),
            "it was trained for a Qwen3ForCausalLM and the target is a LlamaForCausalLM",
        ),
    ],
)
def test_a_block_draft_of_another_target_is_refused_with_the_numbers(draft: Header, says: str) -> None:
    message = refusal(draft, "dflash")
    assert message.startswith("draft 'draft' does not belong to target 'target' as UnifiedDflashLlama3ForCausalLM")
    assert says in message
