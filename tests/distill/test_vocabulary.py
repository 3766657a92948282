"""The draft's vocabulary is the answers' commonest tokens, and its maps lead there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.distill.conversations import Conversation
from graphspec.distill.vocabulary import choose_vocabulary, coverage, draft_to_target, target_to_draft
from graphspec.errors import ConfigError


def answered(*answer: int) -> Conversation:
    return Conversation(index=0, seed=0, temperature=0.0, category="", prompt=(9, 9, 9, 9), answer=answer)


def test_the_commonest_tokens_of_answers_are_kept_and_prompts_do_not_count() -> None:
    kept = choose_vocabulary([answered(7, 7, 7, 2), answered(2, 5)], 2, 10)
    assert kept.tolist() == [2, 7]


def test_ties_go_to_the_lowest_ids() -> None:
    assert choose_vocabulary([answered(8, 6)], 4, 10).tolist() == [0, 1, 6, 8]


def test_coverage_counts_tokens_not_kinds() -> None:
    assert coverage([answered(1, 1, 1, 2)], torch.tensor([1])) == 0.75
    assert coverage([], torch.tensor([1])) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1))
def test_the_maps_name_the_same_tokens(ids: set[int]) -> None:
    kept = torch.tensor(sorted(ids))
    d2t, t2d = draft_to_target(kept), target_to_draft(kept, 64)
    assert (torch.arange(len(ids)) + d2t).tolist() == sorted(ids)
    assert t2d.nonzero().flatten().tolist() == sorted(ids)


@pytest.mark.parametrize("size", [0, 11])
def test_a_vocabulary_larger_than_the_targets_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"--draft-vocab-size \d+: give 1 to 10"):
        choose_vocabulary([], size, 10)
