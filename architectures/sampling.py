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
    filter is a threshold on the probability, so tokens that tie with the last one kept are kept too. The draw
    walks the tokens in order of their ids.
    """
    greedy = logits.argmax(dim=-1)
    scale = torch.where(temperature > 0, temperature, 1.0)
    probabilities = torch.softmax(logits / scale[:, None, None], dim=-1)
    kept = probabilities >= _threshold(probabilities, top_k, top_p, min_p)
    cumulative = torch.where(kept, probabilities, 0.0).cumsum(dim=-1)
    # uniform < 1 keeps the target below the total, so the count stops at a token of non-zero probability.
    target = uniform[:, :, None] * cumulative[:, :, -1:]
    drawn = (cumulative <= target).sum(dim=-1)
    return torch.where((temperature > 0)[:, None], drawn, greedy)


def _threshold(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest probability that survives all three filters, f32[B, R, 1]."""
    positions, vocabulary = probabilities.shape[1:]
    ordered = probabilities.sort(dim=-1, descending=True).values
    mass = ordered.cumsum(dim=-1)
    last = (torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary) - 1)[:, None, None]
    last = last.expand(-1, positions, 1)
    limited = (top_k > 0)[:, None, None]
    by_rank = torch.where(limited, ordered.gather(-1, last), 0.0)

    # The nucleus: the fewest tokens, most probable first, whose mass reaches top-p of what top-k left, ties included.
    last = (ordered >= by_rank).sum(dim=-1, keepdim=True) - 1
    left = torch.where(limited, mass.gather(-1, last), 1.0)
    size = (mass < top_p[:, None, None] * left).sum(dim=-1, keepdim=True)
    in_nucleus = ordered.gather(-1, torch.minimum(size, last))
    by_mass = torch.where((top_p < 1)[:, None, None], in_nucleus, 0.0)

    by_ratio = min_p[:, None, None] * ordered[..., :1]
    return torch.maximum(torch.maximum(by_rank, by_mass), by_ratio)
