"""A target whose next token depends on the last one alone: its distributions are known without running it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

VOCABULARY = 12
EPS = 1e-5


def save_bigram(path: Path) -> Path:
    """A Llama of one layer that adds nothing: logits = head · norm(embedding of the last token)."""
    tiny.save_llama(path, layers=1, vocab_size=VOCABULARY, initializer_range=0.15)
    tensors = load_file(path / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def distributions(
    path: Path, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """f64[V, V]: row t is the distribution after token t, filtered as the OpenAI and vLLM documents say."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(path / "model.safetensors").items()}
    embedded = tensors["model.embed_tokens.weight"]
    normed = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True) + EPS) * tensors["model.norm.weight"]
    logits = normed @ tensors["lm_head.weight"].T / temperature
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows = [_filtered(row / row.sum(), top_k or VOCABULARY, top_p, min_p) for row in weights]
    return np.array(rows)


def _filtered(p: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    kept = np.argsort(-p)[:top_k]
    mass, nucleus = 0.0, list[int]()
    for token in kept:
        if mass < top_p:
            nucleus.append(int(token))
        mass += p[token] / p[kept].sum()
    nucleus = [token for token in nucleus if p[token] >= min_p * p.max()]
    filtered = np.zeros_like(p)
    filtered[nucleus] = p[nucleus] / p[nucleus].sum()
    return filtered
