"""The operators that the traced graph is written in, each with an eager implementation.

A graph of 30 layers is a few hundred of these instead of thousands of reshapes and transposes: short to trace,
and each backend lowers an operator to whatever it runs best (graphspec.export). What PyTorch computes here is
the definition that every lowering is tested against.

Shapes: B rows, T tokens of a row, R verified positions, S cache capacity, L visible cache positions (L ≤ S),
V vocabulary, `heads` query heads, `kv` key/value heads, D head dimension.
"""

# torch.library reads the annotations of a custom operator, so they must be real types: no postponed evaluation.
import torch
from torch import Tensor
from torch.nn import functional

from .sampling import sample_tokens


@torch.library.custom_op("graphspec::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ → [..., out]."""
    return functional.linear(x, weight)


@linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("graphspec::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x · rsqrt(mean(x²) + eps) over groups of len(weight); statistics in float32, then cast (Llama).

    x [..., n · D] with weight [D]: one norm per group of D, as Qwen3 norms each head of q and k.
    """
    groups = x.float().reshape(*x.shape[:-1], -1, weight.shape[0])
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).flatten(-2)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphspec::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Half-split rotary embedding (GPT-NeoX): pairs (i, i + D/2) of each head.

    x [B, T, heads · D]; cos, sin [B, T, D/2].
    """
    first, second = x.reshape(*x.shape[:2], heads, -1).chunk(2, dim=-1)
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphspec::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up of x = [gate | up], [..., 2 · I] → [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("graphspec::write_cache", mutates_args=())
def write_cache(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """The cache with `update` written at positions start[b] … start[b]+T-1 of each row.

    cache [B, kv, S, D], update [B, T, kv · D], start i64[B]; the caller keeps start + T ≤ S.
    """
    batch, heads, _, dim = cache.shape
    length = update.shape[1]
    positions = (start[:, None] + torch.arange(length))[:, None, :, None].expand(batch, heads, length, dim)
    return cache.scatter(2, positions, update.reshape(batch, length, heads, dim).transpose(1, 2))


@write_cache.register_fake
def _(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("graphspec::write_history", mutates_args=())
def write_history(history: Tensor, tokens: Tensor, start: Tensor) -> Tensor:
    """The token history i64[B, S] with tokens i64[B, T] written at start[b] … start[b]+T-1."""
    return history.scatter(1, start[:, None] + torch.arange(tokens.shape[1]), tokens)


@write_history.register_fake
def _(history: Tensor, tokens: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(history)


def _split_heads(x: Tensor, kv: int, dim: int) -> Tensor:
    """[B, T, kv · G · D] → [B, kv, T, G, D]: query heads grouped by the key/value head they read."""
    return x.reshape(*x.shape[:2], kv, -1, dim).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """[B, kv, T, G, D] → [B, T, kv · G · D]."""
    return x.transpose(1, 2).flatten(2)


@torch.library.custom_op("graphspec::attention", mutates_args=())
def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention over the first L positions of a cache already holding this step's keys.

    q [B, T, heads · D], keys [B, kv, S, D], values [B, kv, S, Dv], mask [B, T, L] (0 or -inf) →
    [B, T, heads · Dv]. Softmax in float32.
    """
    kv, dim, visible = keys.shape[1], keys.shape[3], mask.shape[-1]
    grouped = _split_heads(q, kv, dim)
    scores = torch.einsum("bktgd,bkld->bktgl", grouped, keys[:, :, :visible]).float() * scale
    weights = torch.softmax(scores + mask[:, None, :, None], dim=-1).to(q.dtype)
    return _merge_heads(torch.einsum("bktgl,bkld->bktgd", weights, values[:, :, :visible]))


@attention.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads = q.shape[-1] // keys.shape[3]
    return q.new_empty((*q.shape[:-1], heads * values.shape[3]))


@torch.library.custom_op("graphspec::draft_attention", mutates_args=())
def draft_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, new_keys: Tensor, new_values: Tensor, scale: float
) -> Tensor:
    """Attention of one drafted token over the cache and the keys of the tokens drafted before it and its own.

    q [B, 1, heads · D], keys/values [B, kv, S, D], mask [B, 1, L], new_keys/new_values [B, N, kv · D], all N
    visible → [B, 1, heads · D]. The drafted keys are never written: rejected drafts would have to be undone.
    """
    kv, dim, visible = keys.shape[1], keys.shape[3], mask.shape[-1]
    drafted = [x.reshape(*x.shape[:2], kv, -1).transpose(1, 2) for x in (new_keys, new_values)]
    all_keys = torch.cat((keys[:, :, :visible], drafted[0]), dim=2)
    all_values = torch.cat((values[:, :, :visible], drafted[1]), dim=2)
    scores = torch.einsum("bktgd,bkld->bktgl", _split_heads(q, kv, dim), all_keys).float() * scale
    whole_mask = functional.pad(mask, (0, new_keys.shape[1]))
    weights = torch.softmax(scores + whole_mask[:, None, :, None], dim=-1).to(q.dtype)
    return _merge_heads(torch.einsum("bktgl,bkld->bktgd", weights, all_values))


@draft_attention.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, new_keys: Tensor, new_values: Tensor, scale: float
) -> Tensor:
    heads = q.shape[-1] // keys.shape[3]
    return q.new_empty((*q.shape[:-1], heads * values.shape[3]))


@torch.library.custom_op("graphspec::take_rows", mutates_args=())
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, …] at rows i64[B, R] → [B, R, …]."""
    return x[torch.arange(x.shape[0])[:, None], rows]


@take_rows.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((*rows.shape, *x.shape[2:]))


@torch.library.custom_op("graphspec::sample", mutates_args=())
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """The token of every position: argmax where the row's temperature is 0, else a draw (sampling.py).

    logits f32[B, R, V]; temperature, top_p, min_p f32[B], top_k i64[B]; uniform f32[B, R] → i64[B, R].
    """
    return sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)


@sample.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)
