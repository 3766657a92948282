"""What a checkpoint is, from its raw config.json and its tensor names and shapes: never from its path.

Raw JSON, because AutoConfig renames and drops keys between releases. Follows checkpoints.md §1.2 and §1.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphspec.architecture import Facts


@dataclass(frozen=True, slots=True)
class Family:
    """A target family by the names its config.json goes by."""

    label: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]


TARGET_FAMILIES: Mapping[str, Family] = {
    "llama3": Family("Llama 3", ("LlamaForCausalLM",), ("llama",)),
    "qwen3": Family("Qwen3", ("Qwen3ForCausalLM",), ("qwen3",)),
    "gemma4": Family("Gemma 4", ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"), ("gemma4", "gemma4_text")),
    "gemma4_unified": Family(
        "Gemma 4 12B",
        ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"),
        ("gemma4_unified", "gemma4_unified_text"),
    ),
    "deepseek_v3": Family("DeepSeek V3", ("DeepseekV3ForCausalLM",), ("deepseek_v3",)),
    "glm_moe_dsa": Family("GLM-5", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",)),
    "kimi_k25": Family(
        "Kimi K2.5",
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ("kimi_k25",),
    ),
    "inkling": Family(
        "Inkling",
        ("InklingForConditionalGeneration", "InklingForCausalLM"),
        ("inkling_mm_model", "inkling_text"),
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5", "qwen3_5_moe"),
    ),
}
DRAFT_LABELS: Mapping[str, str] = {
    "eagle": "an EAGLE-1/2 head",
    "eagle3": "an EAGLE-3 head",
    "eagle3_mla": "an EAGLE-3 head with latent attention",
    "peagle": "a P-EAGLE head",
    "gemma4_assistant": "a Gemma 4 assistant",
    "dflash": "a DFlash draft",
    "dflash2": "a DFlash2 draft",
    "domino": "a Domino draft",
    "dspark": "a DSpark draft",
    "dspark_v4": "a DeepSeek V4 in-checkpoint DSpark draft",
    "mtp": "an MTP head",
    "medusa": "Medusa heads",
    "standalone": "a language model",
}
SPECULATORS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "peagle",
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "mtp": "mtp",
}
# Searched in this order: EAGLE-1/2 takes what EAGLE-3 left, for example EagleQwen3ForCausalLM.
_DRAFT_NAMES: tuple[tuple[str, str], ...] = (
    ("eagle3_mla", r"Eagle3DeepseekV[23]ForCausalLM"),
    ("eagle3", r"Eagle3\w+ForCausalLM|\w+Eagle3|\w+Eagle3Model|Eagle3Speculator|Eagle3DraftModel"),
    ("eagle", r"\w+ForCausalLMEagle|Eagle\w*ForCausalLM"),
    ("peagle", r"PEagleDraftModel|PeagleLlamaForCausalLM|PeagleQwen3ForCausalLM"),
    ("gemma4_assistant", r"Gemma4(Unified)?AssistantForCausalLM"),
    ("dflash2", r"DFlash2DraftModel|DFlash2BeamDraftModel|DFlash2\w*ForCausalLM"),
    ("dflash", r"DFlashDraftModel|MuseGlimmerAssistantModel|DFlash\w*ForCausalLM"),
    ("domino", r"DominoDraftModel"),
    ("dspark", r"(Qwen3|Gemma4|Qwen3Omni|K3|MuseSpark)DSparkModel"),
    ("dspark_v4", r"DSparkDraftModel"),
    ("mtp", r"DeepseekV3ForCausalLMNextN|DeepSeekMTPModel"),
    ("medusa", r"MedusaModel"),
)
TAP_FIELD = "eagle_aux_hidden_state_layer_ids"
"""Where an EAGLE-3 draft names the target layers it reads."""
_MEDUSA_HEAD = re.compile(r"\d+\.0\.linear\.weight")


def classify_target(target: Facts) -> str | None:
    """The family of a target checkpoint, a key of TARGET_FAMILIES; None if it is of none, or is a draft."""
    named = architecture_name(target.config)
    types = {target.config.get("model_type"), target_body(target.config).get("model_type")}
    for name, family in TARGET_FAMILIES.items():
        is_member = named in family.architectures if named else not types.isdisjoint(family.model_types)
        if is_member:
            return None if looks_like_draft(target) else name
    return None


def classify_draft(target: Facts | None, draft: Facts) -> str | None:
    """The kind of a draft checkpoint, a key of DRAFT_LABELS; None if it is not recognised."""
    if (speculators := draft.config.get("speculators_model_type")) is not None:
        return SPECULATORS.get(str(speculators))
    named = architecture_name(draft.config)
    if _is_latent_attention_eagle(draft.config):
        return "eagle3_mla"
    for kind, pattern in _DRAFT_NAMES:
        if named and re.fullmatch(pattern, named):
            return _refine_block_draft(kind, draft.config)
    return _classify_by_tensors(target, draft)


def looks_like_draft(facts: Facts) -> bool:
    """Whether a checkpoint that calls itself a Llama or Qwen3 is really a draft head."""
    keys = ("draft_vocab_size", "dflash_config", "speculators_model_type", "medusa_num_heads")
    return "fc.weight" in plain_names(facts) or any(facts.config.get(key) is not None for key in keys)


def has_mtp(target: Facts) -> bool:
    """Whether the target checkpoint carries multi-token-prediction layers: declared and stored."""
    config, body = target.config, target_body(target.config)
    places = (config, body, mapping(config.get("mtp_config")))
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    if not any((number(place, key) or 0) > 0 for place in places for key in keys):
        return False
    extra_layer = f"layers.{number(body, 'num_hidden_layers')}."
    return any(extra_layer in name or name.startswith(("mtp.", "model.mtp.")) for name in target.tensors)


def describe(facts: Facts) -> str:
    """What a checkpoint says of itself, for an error message."""
    said = [f"architecture {architecture_name(facts.config) or 'not given'}"]
    for key in ("model_type", "speculators_model_type"):
        if (value := facts.config.get(key)) is not None:
            said.append(f"{key} {value}")
    if (fc := plain_names(facts).get("fc.weight")) is not None:
        said.append(f"fc.weight {list(fc)}")
    return ", ".join(said)


def architecture_name(config: Mapping[str, Any]) -> str | None:
    """The first of a config's architectures."""
    named = config.get("architectures")
    if isinstance(named, str):
        return named
    first = named[0] if isinstance(named, list | tuple) and named else None
    return first if isinstance(first, str) else None


def target_body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a target's language model sizes are: the text_config of a multimodal model, else the config."""
    return mapping(config.get("text_config")) or config


def draft_body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a draft's layer sizes are: speculators and older vLLM conversions nest them."""
    for key in ("transformer_layer_config", "text_config", "model"):
        if inner := mapping(config.get(key)):
            return inner
    return config


def mapping(value: object) -> Mapping[str, Any]:
    """A nested part of a config; empty if it is missing or something else."""
    return value if isinstance(value, Mapping) else {}


def number(config: Mapping[str, Any], key: str) -> int | None:
    """An integer of a config; None if it is missing, null or something else."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def plain_names(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by plain name."""
    return {plain_name(name): info.shape for name, info in facts.tensors.items()}


def plain_name(name: str) -> str:
    """A tensor's name without the prefix that some exports add."""
    return name.removeprefix("model.").removeprefix("medusa_head.")


def verifier_architecture(draft: Facts) -> str | None:
    """The target architecture a speculators draft was trained for."""
    verifier = mapping(mapping(draft.config.get("speculators_config")).get("verifier"))
    return architecture_name(verifier)


def tap_ids(config: Mapping[str, Any]) -> list[object] | None:
    """The target layers an EAGLE-3 draft reads, as its config writes them; None if it names none."""
    nested = mapping(config.get("eagle_config")).get(TAP_FIELD)
    listed = config.get(TAP_FIELD) or nested
    return list(listed) if isinstance(listed, list | tuple) and listed else None


def other_tap_field(config: Mapping[str, Any]) -> str | None:
    """The field in which an EAGLE-3 draft names its target layers as block drafts do; None if there is none."""
    for place in ("", "eagle_config", "dflash_config"):
        inner = mapping(config.get(place)) if place else config
        if inner.get("target_layer_ids") is not None:
            return f"{place}.target_layer_ids".lstrip(".")
    return None


def _refine_block_draft(kind: str, config: Mapping[str, Any]) -> str:
    """DFlash descendants keep its architecture name and differ in dflash_config."""
    options = mapping(config.get("dflash_config"))
    projector = options.get("projector_type")
    if kind == "dspark_v4":
        dense = config.get("model_type") == "qwen3" or projector == "dspark"
        return "dspark" if dense else kind
    if kind not in ("dflash", "dflash2"):
        return kind
    if projector in ("domino", "dspark"):
        return str(projector)
    is_second = any((number(options, key) or 0) > 0 for key in ("conv_kernel_size", "selector_rank"))
    return "dflash2" if is_second else kind


def _classify_by_tensors(target: Facts | None, draft: Facts) -> str | None:
    """Kinds that call themselves LlamaForCausalLM or Qwen3ForCausalLM, or nothing at all."""
    shapes = plain_names(draft)
    fc = shapes.get("fc.weight")
    has_middle = any(name.startswith("midlayer.") for name in shapes)
    has_hidden_norm = any("hidden_norm." in name for name in shapes)
    if fc and len(fc) == 2 and fc[1] == 2 * fc[0] and not (has_middle or has_hidden_norm or "d2t" in shapes):
        return "eagle"
    if "d2t" in shapes or has_middle:
        return "eagle3"
    # Before EAGLE-3's last sign: a DFlash fc reads a multiple of the target's hidden size too.
    if fc and "hidden_norm.weight" in shapes and "dflash_config" in draft.config:
        return _refine_block_draft("dflash", draft.config)
    if fc and _reads_target_layers(fc, target, draft, at_least=2 if has_hidden_norm else 3):
        return "eagle3"
    if "medusa_num_heads" in draft.config or any(_MEDUSA_HEAD.fullmatch(name) for name in shapes):
        return "medusa"
    parts = ("embed_tokens.weight", "norm.weight")
    is_model = all(part in shapes for part in parts) and any(n.startswith("layers.0.") for n in shapes)
    return "standalone" if is_model and not looks_like_draft(draft) else None


def _reads_target_layers(fc: tuple[int, ...], target: Facts | None, draft: Facts, *, at_least: int) -> bool:
    body = target_body(target.config) if target else draft_body(draft.config)
    hidden = number(body, "hidden_size")
    if not hidden or len(fc) != 2:
        return False
    count, rest = divmod(fc[1], hidden)
    return rest == 0 and count >= at_least


def _is_latent_attention_eagle(config: Mapping[str, Any]) -> bool:
    """nvidia's Kimi heads: a one-layer kimi_k2 with an eagle_config, whatever the architecture says."""
    return (
        config.get("model_type") in ("kimi_k2", "deepseek_v3")
        and bool(mapping(config.get("eagle_config")))
        and number(config, "num_hidden_layers") == 1
    )
