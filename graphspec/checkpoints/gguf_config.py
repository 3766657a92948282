"""config.json keys out of GGUF metadata."""

from __future__ import annotations

from typing import Any

from graphspec.errors import CheckpointError

from .gguf_header import GgufHeader

# general.architecture → (model_type is the same word) the class transformers would load it with.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_DEFAULT_ROPE_THETA = 10000.0


def make_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json that the checkpoint would have under Hugging Face.

    Llama 3 files carry a tensor rope_freqs.weight in place of rope_scaling; whoever made this header reads
    it into `graphspec_rope_freq_factors`. Raises CheckpointError for an architecture, or a variant of one,
    that cannot be expressed."""
    arch = _architecture(header)
    hidden_size = header.integer(f"{arch}.embedding_length")
    num_heads = header.integer(f"{arch}.attention.head_count")
    head_dim = _head_dim(header, arch, hidden_size, num_heads)
    epsilon = header.get_number(f"{arch}.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise CheckpointError(f"{header.path} has no metadata field {arch}.attention.layer_norm_rms_epsilon")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden_size,
        "intermediate_size": header.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer(f"{arch}.attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_theta": header.get_number(f"{arch}.rope.freq_base") or _DEFAULT_ROPE_THETA,
        "rope_scaling": _rope_scaling(header, arch),
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "vocab_size": _vocab_size(header),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
    }
    return config | token_ids(header)


def token_ids(header: GgufHeader) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id, those there are. The end-of-turn token, where a chat
    model has its own, ends generation as the end-of-text token does: eos_token_id is then a list."""
    ids: dict[str, int | list[int]] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = header.get_integer(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[f"{name}_token_id"] = value
    end_of_turn = header.get_integer("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn != (eos := ids.get("eos_token_id")):
        ids["eos_token_id"] = [eos, end_of_turn] if isinstance(eos, int) else end_of_turn
    return ids


def _architecture(header: GgufHeader) -> str:
    arch = header.get_text("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture is {arch!r}; GGUF files of {' and '.join(ARCHITECTURES)} "
            "are supported"
        )
    num_parts = header.get_integer("split.count") or 1
    if num_parts > 1:
        raise CheckpointError(
            f"{header.path} is one of {num_parts} parts of a split GGUF; join them with llama-gguf-split --merge"
        )
    if header.get_integer(f"{arch}.expert_count"):
        raise CheckpointError(f"{header.path} is a mixture of experts, which is not supported from GGUF")
    return arch


def _head_dim(header: GgufHeader, arch: str, hidden_size: int, num_heads: int) -> int:
    rotary = header.get_integer(f"{arch}.rope.dimension_count")
    key = header.get_integer(f"{arch}.attention.key_length")
    value = header.get_integer(f"{arch}.attention.value_length")
    head_dim = key or hidden_size // num_heads  # llama.cpp's default too, whatever the rotary part
    if (rotary or head_dim) != head_dim or (value or head_dim) != head_dim:
        raise CheckpointError(
            f"{header.path}: keys of {head_dim}, values of {value or head_dim} and a rotary part of "
            f"{rotary or head_dim} dimensions; only heads with all three alike are supported"
        )
    return head_dim


def _vocab_size(header: GgufHeader) -> int:
    """The rows of the embedding, which may be padded past the tokenizer's tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.info.shape) != 2:
        raise CheckpointError(f"{header.path} has no two-dimensional tensor token_embd.weight")
    return embedding.info.shape[0]


def _rope_scaling(header: GgufHeader, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = header.get_text(f"{prefix}.type")
    factor = header.get_number(f"{prefix}.factor")
    if kind is None:
        # Files of 2023 have this one key.
        old_factor = header.get_number(f"{arch}.rope.scale_linear")
        kind, factor = ("linear", old_factor) if old_factor not in (None, 1.0) else ("none", None)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{header.path}: {prefix}.type {kind!r} is not supported; linear and yarn are")
    if not factor:
        raise CheckpointError(f"{header.path}: {prefix}.type is {kind} but {prefix}.factor is missing")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _yarn(header, prefix)
    return scaling


def _yarn(header: GgufHeader, prefix: str) -> dict[str, float]:
    for name in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor"):
        # Hugging Face's attention_factor has another meaning, so a value cannot be passed on.
        if header.get_number(f"{prefix}.{name}") not in (None, 1.0):
            raise CheckpointError(f"{header.path}: {prefix}.{name} other than 1 is not supported")
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    values = {name: header.get_number(f"{prefix}.{key}") for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}
