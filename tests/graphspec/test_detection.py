"""Target and draft kinds from config.json and tensor names and shapes; every fixture of checkpoints.md §9."""

from collections.abc import Mapping
from typing import Any

import pytest

from graphspec.architecture import Facts
from graphspec.checkpoints import TensorInfo
from graphspec.detection import classify_draft, classify_target, draft_body, has_mtp, target_body

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
LAYER = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
    "post_attention_layernorm.weight": (64,),
}
MODEL = {
    "model.embed_tokens.weight": (128, 64),
    **{f"model.layers.0.{name}": shape for name, shape in LAYER.items()},
    "model.layers.0.input_layernorm.weight": (64,),
    "model.norm.weight": (64,),
    "lm_head.weight": (128, 64),
}
EAGLE = {"fc.weight": (64, 128), **{f"layers.0.{name}": shape for name, shape in LAYER.items()}}
EAGLE3 = {
    "fc.weight": (64, 192),
    **{f"midlayer.{name}": shape for name, shape in LAYER.items()},
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.input_layernorm.weight": (64,),
    "norm.weight": (64,),
    "lm_head.weight": (32, 64),
    "d2t": (32,),
    "t2d": (128,),
}
EAGLE3_LAYERS = {name.replace("midlayer.", "layers.0."): shape for name, shape in EAGLE3.items()}
DFLASH_BODY = {
    "fc.weight": (64, 128),
    "hidden_norm.weight": (64,),
    "norm.weight": (64,),
    **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
}
DFLASH_CONFIG = {
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 8,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 5]},
}


def facts(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> Facts:
    return Facts(config=config, tensors={n: TensorInfo(shape=s, dtype="F32") for n, s in (tensors or {}).items()})


def named(name: str, **config: Any) -> dict[str, Any]:
    return {"architectures": [name], **config}


TARGET = facts(named("LlamaForCausalLM", **LLAMA, num_hidden_layers=8), MODEL)

DRAFTS: dict[str, tuple[str | None, dict[str, Any], Mapping[str, tuple[int, ...]]]] = {
    "EAGLE-1 plain": (
        "eagle",
        named("LlamaForCausalLM", **LLAMA, num_hidden_layers=1, bias=False, torch_dtype="float16"),
        EAGLE,
    ),
    "EAGLE-1 with the target's embedding": (
        "eagle",
        named("LlamaForCausalLM", **LLAMA, num_hidden_layers=1),
        {**EAGLE, "embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "fc.bias": (64,)},
    ),
    "EAGLE-1 with prefixed names": (
        "eagle",
        named("LlamaForCausalLM", **LLAMA),
        {f"model.{name}": shape for name, shape in EAGLE.items()},
    ),
    "EAGLE-1 named": ("eagle", named("LlamaForCausalLMEagle", **LLAMA), EAGLE),
    "EAGLE-1 of vLLM": ("eagle", named("EagleLlamaForCausalLM", model_type="eagle", model=LLAMA), EAGLE),
    "EAGLE-1 on Qwen3": ("eagle", named("EagleQwen3ForCausalLM"), EAGLE),
    "EAGLE-3 reference style": ("eagle3", named("LlamaForCausalLM", **LLAMA, draft_vocab_size=32), EAGLE3),
    "EAGLE-3 reference style, two taps": (
        "eagle3",
        named("LlamaForCausalLM", **LLAMA),
        {"fc.weight": (64, 128), "midlayer.hidden_norm.weight": (64,), "d2t": (32,)},
    ),
    "EAGLE-3 whole vocabulary, canonical layer names": (
        "eagle3",
        named("LlamaForCausalLM", **LLAMA),
        {name: shape for name, shape in EAGLE3_LAYERS.items() if name not in ("d2t", "t2d")},
    ),
    "EAGLE-3 told by fc alone": ("eagle3", named("LlamaForCausalLM", **LLAMA), {"fc.weight": (48, 256)}),
    "EAGLE-3 SGLang style": (
        "eagle3",
        named(
            "LlamaForCausalLMEagle3",
            **LLAMA,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        ),
        EAGLE3,
    ),
    "EAGLE-3 of DeepSpec": ("eagle3", named("Qwen3Eagle3Model"), EAGLE3),
    "EAGLE-3 of vLLM for Qwen3": ("eagle3", named("Eagle3Qwen3ForCausalLM"), EAGLE3),
    "EAGLE-3 of vLLM": ("eagle3", named("Eagle3LlamaForCausalLM"), EAGLE3),
    "EAGLE-3 speculators": (
        "eagle3",
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 32,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "transformer_layer_config": LLAMA,
            "speculators_config": {
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["LlamaForCausalLM"]},
            },
        },
        EAGLE3_LAYERS,
    ),
    "EAGLE-3 MLA by name": ("eagle3_mla", named("Eagle3DeepseekV2ForCausalLM"), {}),
    "EAGLE-3 MLA by config": (
        "eagle3_mla",
        named(
            "LlamaForCausalLMEagle3",
            model_type="kimi_k2",
            num_hidden_layers=1,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        ),
        {},
    ),
    "P-EAGLE": ("peagle", named("PeagleLlamaForCausalLM"), {}),
    "P-EAGLE speculators": ("peagle", {"speculators_model_type": "peagle"}, {}),
    "MTP export": ("mtp", named("DeepseekV3ForCausalLMNextN"), {}),
    "Gemma assistant": (
        "gemma4_assistant",
        named("Gemma4AssistantForCausalLM", model_type="gemma4_assistant", backbone_hidden_size=64),
        {},
    ),
    "Gemma 12B assistant": ("gemma4_assistant", named("Gemma4UnifiedAssistantForCausalLM"), {}),
    "DFlash": ("dflash", named("DFlashDraftModel", **DFLASH_CONFIG), DFLASH_BODY),
    "DFlash under a plain name": ("dflash", named("Qwen3ForCausalLM", **DFLASH_CONFIG), DFLASH_BODY),
    "DFlash with three taps under a plain name": (
        "dflash",
        named("Qwen3ForCausalLM", **DFLASH_CONFIG),
        {**DFLASH_BODY, "fc.weight": (64, 192)},
    ),
    "DFlash of transformers": ("dflash", named("MuseGlimmerAssistantModel"), {}),
    "DFlash2": (
        "dflash2",
        named(
            "DFlash2DraftModel",
            **DFLASH_CONFIG | {"dflash_config": {"conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 4}},
        ),
        {},
    ),
    "DFlash2 under the name of DFlash": (
        "dflash2",
        named("DFlashDraftModel", dflash_config={"selector_rank": 8}),
        {},
    ),
    "DFlash with its DFlash2 options at zero": (
        "dflash",
        named("DFlashDraftModel", dflash_config={"selector_rank": 0, "conv_kernel_size": 0}),
        {},
    ),
    "DSpark DeepSpec": (
        "dspark",
        named("Qwen3DSparkModel", block_size=4, target_layer_ids=[1, 5], markov_rank=8),
        {},
    ),
    "DSpark SpecForge": (
        "dspark",
        named("DSparkDraftModel", model_type="qwen3", dflash_config={"projector_type": "dspark"}),
        {},
    ),
    "DSpark speculators": (
        "dspark",
        {"speculators_model_type": "dspark", "block_size": 5, "architectures": ["DSparkDraftModel"]},
        {},
    ),
    "DSpark inside DeepSeek V4": ("dspark_v4", named("DSparkDraftModel", model_type="deepseek_v4"), {}),
    "Medusa": (
        "medusa",
        {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"},
        {"0.0.linear.weight": (64, 64), "0.0.linear.bias": (64,), "0.1.weight": (128, 64)},
    ),
    "Medusa without a config": ("medusa", {}, {"medusa_head.0.0.linear.weight": (64, 64)}),
    "Domino": ("domino", named("DominoDraftModel"), {}),
    "Domino under the name of DFlash": (
        "domino",
        named("DFlashDraftModel", dflash_config={"projector_type": "domino"}),
        {},
    ),
    "a Llama": ("standalone", named("LlamaForCausalLM", **LLAMA, num_hidden_layers=1), MODEL),
    "a Qwen3": ("standalone", named("Qwen3ForCausalLM", **LLAMA), MODEL),
    "a Llama with tied embeddings": (
        "standalone",
        named("LlamaForCausalLM", **LLAMA),
        {name: shape for name, shape in MODEL.items() if name != "lm_head.weight"},
    ),
    "an EAGLE-1 head whose fc is missing": (
        None,
        named("LlamaForCausalLM", **LLAMA),
        {name: shape for name, shape in EAGLE.items() if name != "fc.weight"},
    ),
    "an fc of no known shape": (None, named("LlamaForCausalLM", **LLAMA), {"fc.weight": (64, 200)}),
    "a new speculators type": (
        None,
        {"speculators_model_type": "new", "architectures": ["LlamaForCausalLMEagle"]},
        EAGLE,
    ),
    "nothing": (None, {}, {}),
    "nonsense": (
        None,
        {"architectures": 3, "dflash_config": [], "eagle_config": 1, "num_hidden_layers": "one"},
        {"fc.weight": ()},
    ),
}


@pytest.mark.parametrize("fixture", DRAFTS)
def test_a_draft_is_recognised(fixture: str) -> None:
    kind, config, tensors = DRAFTS[fixture]
    assert classify_draft(TARGET, facts(config, tensors)) == kind


def test_a_draft_is_recognised_without_its_target() -> None:
    kind, config, tensors = DRAFTS["EAGLE-3 reference style"]
    assert classify_draft(None, facts(config, tensors)) == kind
    kind, config, tensors = DRAFTS["EAGLE-1 plain"]
    assert classify_draft(None, facts(config, tensors)) == kind


def test_a_name_in_the_config_that_is_only_a_path_decides_nothing() -> None:
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        config = named("LlamaForCausalLM", **LLAMA, _name_or_path=f"models/{word}")
        assert classify_draft(TARGET, facts(config, MODEL)) == "standalone"


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (named("LlamaForCausalLM", model_type="llama"), "llama3"),
        ({"model_type": "llama"}, "llama3"),
        (named("Qwen3ForCausalLM", model_type="qwen3"), "qwen3"),
        (named("Gemma4ForConditionalGeneration", text_config={"model_type": "gemma4_text"}), "gemma4"),
        (named("Gemma4ForCausalLM"), "gemma4"),
        (named("Gemma4UnifiedForConditionalGeneration"), "gemma4_unified"),
        ({"text_config": {"model_type": "gemma4_unified_text"}}, "gemma4_unified"),
        (named("DeepseekV3ForCausalLM"), "deepseek_v3"),
        (named("GlmMoeDsaForCausalLM", num_nextn_predict_layers=0), "glm_moe_dsa"),
        (named("KimiK25ForConditionalGeneration", text_config={"model_type": "kimi_k2"}), "kimi_k25"),
        (named("Kimi_K25ForConditionalGeneration", text_config={"model_type": "deepseek_v3"}), "kimi_k25"),
        (named("InklingForConditionalGeneration"), "inkling"),
        (named("Qwen3_5MoeForConditionalGeneration"), "qwen3_5"),
        (named("MistralForCausalLM", model_type="llama"), None),
        (named("Qwen2ForCausalLM", model_type="qwen2"), None),
        ({}, None),
    ],
)
def test_a_target_is_recognised(config: dict[str, Any], family: str | None) -> None:
    assert classify_target(facts(config)) == family


@pytest.mark.parametrize(
    "fixture",
    ["EAGLE-1 plain", "EAGLE-3 reference style", "DFlash under a plain name", "EAGLE-1 with prefixed names"],
)
def test_a_draft_that_calls_itself_a_llama_is_no_target(fixture: str) -> None:
    _, config, tensors = DRAFTS[fixture]
    assert classify_target(facts(config, tensors)) is None


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        ({"num_nextn_predict_layers": 1, "num_hidden_layers": 3}, "model.layers.3.eh_proj.weight"),
        ({"num_mtp_layers": 1, "num_hidden_layers": 3}, "model.layers.3.eh_proj.weight"),
        ({"mtp_config": {"num_nextn_predict_layers": 2}}, "model.mtp.layers.0.input_proj.weight"),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, "mtp.fc.weight"),
    ],
)
def test_mtp_layers_count_in_every_spelling_if_they_are_stored(config: dict[str, Any], tensor: str) -> None:
    assert has_mtp(facts(config, {tensor: (1, 1)}))
    assert not has_mtp(facts(config, {"model.layers.2.mlp.up_proj.weight": (1, 1)}))


def test_a_target_that_declares_no_mtp_layers_has_none() -> None:
    glm = facts(
        named("GlmMoeDsaForCausalLM", num_nextn_predict_layers=0, num_hidden_layers=3),
        {"model.layers.3.eh_proj.weight": (1, 1)},
    )
    assert not has_mtp(glm)


def test_sizes_are_found_where_each_format_nests_them() -> None:
    assert target_body({"text_config": {"hidden_size": 5}})["hidden_size"] == 5
    assert target_body({"hidden_size": 5})["hidden_size"] == 5
    for key in ("transformer_layer_config", "text_config", "model"):
        assert draft_body({key: {"hidden_size": 7}, "hidden_size": 1})["hidden_size"] == 7
    assert draft_body({"hidden_size": 5, "transformer_layer_config": None})["hidden_size"] == 5
