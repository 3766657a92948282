"""The token that a distribution and one uniform number determine: what every lowering is tested against."""

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """One token for each position: argmax where the row's temperature is 0, else the inverse CDF at uniform.

    logits f32[B, R, V]; temperature, top_p, min_p f32[B] and top_k i64[B] (0: off) hold for the R positions of
    a row; uniform f32[B, R] in [0, 1) → i64[B, R].

    Order (OpenAI, vLLM): temperature → top-k → top-p (of what top-k left, renormalised) → min-p → draw. Each
    filter is a threshold on the logits, so tokens that tie with the last one kept are kept too. The draw
    walks the tokens in order of their ids.
    """
    greedy = logits.argmax(dim=-1)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    kept = scaled >= _threshold(scaled, top_k, top_p, min_p)
    cumulative = torch.softmax(scaled.masked_fill(~kept, float("-inf")), dim=-1).cumsum(dim=-1)
    # uniform < 1 keeps the target below the total, so the count stops at a token of non-zero probability.
    target = uniform[:, :, None] * cumulative[:, :, -1:]
    drawn = (cumulative <= target).sum(dim=-1)
    return torch.where((temperature > 0)[:, None], drawn, greedy)


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit that survives all three filters, f32[B, R, 1]."""
    vocabulary = scaled.shape[-1]
    ordered = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1
    rank = torch.arange(vocabulary)
    by_rank = ordered.gather(-1, last[:, None, None].expand(*ordered.shape[:2], 1))

    # The nucleus: the fewest tokens, most probable first, whose mass reaches top-p of what top-k left.
    mass = torch.softmax(ordered.masked_fill(rank > last[:, None, None], float("-inf")), dim=-1).cumsum(dim=-1)
    size = (mass < top_p[:, None, None] * mass[..., -1:]).sum(dim=-1, keepdim=True)
    by_mass = ordered.gather(-1, torch.minimum(size, last[:, None, None]))

    by_ratio = ordered[..., :1] + torch.log(min_p)[:, None, None]  # log 0 = -inf: off
    return torch.maximum(torch.maximum(by_rank, by_mass), by_ratio)
