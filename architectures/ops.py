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
def linear(x: Tensor, weight: Tensor, bound: float = 0.0) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ → [..., out].

    bound: a backend that reads x in 8 bits may let their grid end at this magnitude; 0: nothing is known of x.
    """
    return functional.linear(x, weight)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bound: float = 0.0) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("graphspec::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x · rsqrt(mean(x²) + eps) over the last dimension; statistics in float32, then cast (Llama)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphspec::split_heads", mutates_args=())
def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · D] → [B, heads, T, D]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2).clone(memory_format=torch.contiguous_format)


@split_heads.register_fake
def _(x: Tensor, heads: int) -> Tensor:
    return x.new_empty((x.shape[0], heads, x.shape[1], x.shape[2] // heads))


@torch.library.custom_op("graphspec::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding (GPT-NeoX): pairs (i, i + D/2) of each head.

    x [B, heads, T, D]; cos, sin f32[B, T, D/2]. Computed in float32, then cast.
    """
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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

    cache [B, kv, S, D], update [B, kv, T, D], start i64[B]; the caller keeps start + T ≤ S.
    """
    positions = start[:, None] + torch.arange(update.shape[2])
    return cache.scatter(2, positions[:, None, :, None].expand_as(update), update)


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


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [B, heads, T, D], keys [B, kv, L, D], values [B, kv, L, Dv], mask [B, T, L] → [B, T, heads · Dv]."""
    grouped = q.reshape(
        q.shape[0], keys.shape[1], -1, *q.shape[2:]
    )  # [B, kv, G, T, D]: heads grouped by the key head they read
    scores = torch.einsum("bkgtd,bkld->bkgtl", grouped, keys).float() * scale
    weights = torch.softmax(scores + mask[:, None, None], dim=-1).to(q.dtype)
    return torch.einsum("bkgtl,bkld->btkgd", weights, values).flatten(2)


@torch.library.custom_op("graphspec::attention", mutates_args=())
def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention over the first L positions of a cache already holding this step's keys.

    q [B, heads, T, D], keys [B, kv, S, D], values [B, kv, S, Dv], mask [B, T, L] (0 or -inf) →
    [B, T, heads · Dv]. Softmax in float32.
    """
    visible = mask.shape[-1]
    return _attend(q, keys[:, :, :visible], values[:, :, :visible], mask, scale)


@attention.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1] * values.shape[3]))


@torch.library.custom_op("graphspec::draft_attention", mutates_args=())
def draft_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, new_keys: Tensor, new_values: Tensor, scale: float
) -> Tensor:
    """Attention of one drafted token over the cache and the keys of the tokens drafted before it and its own.

    q [B, heads, 1, D], keys/values [B, kv, S, D], mask [B, 1, L], new_keys/new_values [B, kv, N, D], all N
    visible → [B, 1, heads · D]. The drafted keys are never written: rejected drafts would have to be undone.
    """
    visible = mask.shape[-1]
    all_keys = torch.cat((keys[:, :, :visible], new_keys), dim=2)
    all_values = torch.cat((values[:, :, :visible], new_values), dim=2)
    return _attend(q, all_keys, all_values, functional.pad(mask, (0, new_keys.shape[2])), scale)


@draft_attention.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, new_keys: Tensor, new_values: Tensor, scale: float
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1] * values.shape[3]))


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
