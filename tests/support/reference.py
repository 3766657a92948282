"""What drafts should be, from the formulas of the papers: float64, whole sequences, no caches.

Written from the documents (checkpoints.md §2.2, §4.1, §4.2, §4.11), not from the code under test. A chain takes
the committed tokens x_0 … x_n, of which the target has run all but the last, and what the target computed for
them; n counts those it has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

Tensors = Mapping[str, Tensor]


def load_model(path: Path) -> Any:
    """The transformers model of a directory, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    return model.eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy continuation of a prompt."""
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return [int(token) for token in answer[0, len(prompt) :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """One pass of the target over a whole sequence, n tokens."""

    logits: Tensor
    """f64[n, V]."""
    final: Tensor
    """f64[n, H]: output of the last norm."""
    entering: tuple[Tensor, ...]
    """Raw residual stream: [i] enters layer i, the last one leaves the last layer; f64[n, H] each."""


def target_states(model: Any, tokens: Sequence[int]) -> TargetStates:
    """transformers' hidden states, with the raw output of the last layer, which it gives normed only."""
    raw: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    *entering, final = (states[0] for states in output.hidden_states)
    return TargetStates(logits=output.logits[0], final=final, entering=(*entering, raw[0][0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a draft head's layers."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 1
    eps: float = 1e-5
    theta: float = 10000.0
    position_scale: float = 1.0
    """1 / factor of linear rope scaling."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, shape: HeadShape) -> Tensor:
    """x [n, heads, D] at positions 0 … n-1: the pair (i, i + D/2) is a complex number, turned by p · θ^(-2i/D)."""
    half = shape.head_dim // 2
    frequencies = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = shape.position_scale * torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(x: Tensor, tensors: Tensors, shape: HeadShape) -> Tensor:
    """Causal grouped-query attention over a whole sequence x [n, inputs]; norms and biases where there are any."""

    def project(name: str, heads: int) -> Tensor:
        y = x @ tensors[f"{name}_proj.weight"].T + tensors.get(f"{name}_proj.bias", torch.tensor(0.0))
        return y.reshape(len(x), heads, shape.head_dim)

    q, k, v = project("q", shape.heads), project("k", shape.kv_heads), project("v", shape.kv_heads)
    if "q_norm.weight" in tensors:
        q, k = norm(q, tensors["q_norm.weight"], shape.eps), norm(k, tensors["k_norm.weight"], shape.eps)
    q, k = rotate(q, shape), rotate(k, shape)
    future = torch.triu(torch.full((len(x), len(x)), float("-inf"), dtype=torch.float64), diagonal=1)
    mixed = []
    for head in range(shape.heads):
        read = head * shape.kv_heads // shape.heads
        scores = q[:, head] @ k[:, read].T / shape.head_dim**0.5 + future
        mixed.append(torch.softmax(scores, dim=-1) @ v[:, read])
    y = torch.cat(mixed, dim=-1) @ tensors["o_proj.weight"].T
    return y + tensors.get("o_proj.bias", torch.tensor(0.0))


def mlp(x: Tensor, tensors: Tensors) -> Tensor:
    """SwiGLU."""
    gate = functional.silu(x @ tensors["gate_proj.weight"].T)
    return (gate * (x @ tensors["up_proj.weight"].T)) @ tensors["down_proj.weight"].T


def within(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, in float64, without it."""
    return {name.removeprefix(prefix): value.double() for name, value in tensors.items() if name.startswith(prefix)}


def layer(x: Tensor, tensors: Tensors, prefix: str, shape: HeadShape) -> Tensor:
    """One decoder layer; no norm before attention where the checkpoint has none."""
    own = within(tensors, prefix)
    before = own.get("input_layernorm.weight")
    mixed = attention(x if before is None else norm(x, before, shape.eps), within(own, "self_attn."), shape)
    x = x + mixed
    return x + mlp(norm(x, own["post_attention_layernorm.weight"], shape.eps), within(own, "mlp."))


def eagle_logits(
    tokens: Sequence[int],
    states: TargetStates,
    *,
    tensors: Tensors,
    embedding: Tensor,
    head: Tensor,
    count: int,
    shape: HeadShape | None = None,
) -> Tensor:
    """EAGLE-1/2 (§4.1): the logits of `count` drafts after tokens x_0 … x_n, f64[count, V]."""
    shape = shape or HeadShape()
    n = len(tokens) - 1
    following, features, logits = list(tokens[1:]), states.final[:n], []
    bias = tensors.get("fc.bias", torch.tensor(0.0)).double()
    for _ in range(count):
        x = torch.cat((embedding[following], features), dim=-1) @ tensors["fc.weight"].double().T + bias
        for index in range(shape.layers):
            x = layer(x, tensors, f"layers.{index}.", shape)
        if "norm.weight" in tensors:
            x = norm(x, tensors["norm.weight"].double(), shape.eps)
        logits.append(x[-1] @ head.T)
        following.append(int(logits[-1].argmax()))
        features = torch.cat((features, x[-1:]))
    return torch.stack(logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Rules:
    """What an EAGLE-3 checkpoint's config says; the rest is in its tensors."""

    taps: tuple[int, ...] = (2, 4, 5)
    """Layers whose entering state is read."""
    prefix: str = "midlayer."
    norm_before_residual: bool = False
    norm_output: bool = False


def eagle3_logits(
    tokens: Sequence[int],
    states: TargetStates,
    *,
    tensors: Tensors,
    embedding: Tensor,
    head: Tensor,
    count: int,
    shape: HeadShape | None = None,
    rules: Eagle3Rules | None = None,
) -> Tensor:
    """EAGLE-3 (§4.2): as `eagle_logits`, over the draft's vocabulary. `embedding` and `head` are the target's,
    used where the checkpoint has none of its own."""
    shape, rules = shape or HeadShape(), rules or Eagle3Rules()
    n = len(tokens) - 1
    rows = tensors.get("embed_tokens.weight", embedding).double()
    head = tensors.get("lm_head.weight", head).double()
    following, features, logits = list(tokens[1:]), fused_taps(states, n, tensors, shape, rules), []
    for _ in range(count):
        x = _eagle3_layers(rows[following], features, tensors, shape, rules)
        normed = norm(x, tensors["norm.weight"].double(), shape.eps)
        logits.append(normed[-1] @ head.T)
        best = int(logits[-1].argmax())
        following.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        features = torch.cat((features, (normed if rules.norm_output else x)[-1:]))
    return torch.stack(logits)


def fused_taps(states: TargetStates, n: int, tensors: Tensors, shape: HeadShape, rules: Eagle3Rules) -> Tensor:
    """g = fc of the tapped states of the first n tokens, f64[n, H]."""
    chunks = [states.entering[tap][:n] for tap in rules.taps]
    if "fc_norm.0.weight" in tensors:
        chunks = [norm(x, tensors[f"fc_norm.{i}.weight"].double(), shape.eps) for i, x in enumerate(chunks)]
    joined = torch.cat(chunks, dim=-1)
    if "input_norm.weight" in tensors:
        joined = norm(joined, tensors["input_norm.weight"].double(), shape.eps)
    return joined @ tensors["fc.weight"].double().T + tensors.get("fc.bias", torch.tensor(0.0)).double()


def _eagle3_layers(
    embedded: Tensor, features: Tensor, tensors: Tensors, shape: HeadShape, rules: Eagle3Rules
) -> Tensor:
    own = within(tensors, rules.prefix)
    normed = partial(norm, eps=shape.eps)
    hidden = normed(features, own["hidden_norm.weight"])
    z = torch.cat((normed(embedded, own["input_layernorm.weight"]), hidden), dim=-1)
    x = (hidden if rules.norm_before_residual else features) + attention(z, within(own, "self_attn."), shape)
    x = x + mlp(normed(x, own["post_attention_layernorm.weight"]), within(own, "mlp."))
    for index in range(1, shape.layers):
        x = layer(x, tensors, f"layers.{index}.", shape)
    return x


def model_logits(tokens: Sequence[int], model: Any, count: int) -> Tensor:
    """A draft LM: its own logits after the tokens and after each of its own choices, f64[count, V]."""
    sequence, logits = list(tokens), []
    for _ in range(count):
        with torch.no_grad():
            logits.append(model(torch.tensor([sequence])).logits[0, -1])
        sequence.append(int(logits[-1].argmax()))
    return torch.stack(logits)


def looked_up(tokens: Sequence[int], count: int, n_min: int, n_max: int) -> list[int]:
    """Prompt lookup: what followed the latest earlier occurrence of the longest suffix that has one.

    A continuation that reaches the end goes on with what was copied; without an occurrence, -1 throughout.
    """
    tokens = list(tokens)
    for n in range(min(n_max, len(tokens) - 1), n_min - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                extended = list(tokens)
                for offset in range(count):
                    extended.append(extended[start + n + offset])
                return extended[len(tokens) :]
    return [-1] * count
