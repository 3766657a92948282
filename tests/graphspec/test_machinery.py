"""Which settings need what of an architecture, and how one that lacks it refuses them."""

from typing import Any

import pytest

from graphspec.architecture import Architecture, Capability, DrafterKind, TargetKind
from graphspec.errors import UnsupportedError
from graphspec.machinery import refuse_other_methods, refuse_unsupported, required_machinery, unsupported
from graphspec.speculative_config import METHOD_OF, METHODS, SpeculativeConfig


def ranges(*triples: tuple[int, int, int]) -> list[dict[str, int]]:
    return [{"batch_start": s, "batch_end": e, "num_tokens": n} for s, e, n in triples]


MACHINERY: list[tuple[dict[str, Any], str, Capability]] = [
    ({"use_greedy_acceptance": True}, "--use-greedy-acceptance", "greedy_acceptance"),
    ({"draft_proposal": "sampled"}, "--draft-proposal", "sampled_proposal"),
    (
        {"use_relaxed_acceptance_for_thinking": True},
        "--use-relaxed-acceptance-for-thinking",
        "relaxed_thinking",
    ),
    ({"logit_penalties": True}, "--logit-penalties", "penalties"),
    ({"synthetic_acceptance_rate": 0.0}, "--synthetic-acceptance-rate", "synthetic_acceptance"),
    ({"num_speculative_tokens_mixed_batch": 0}, "--num-speculative-tokens-mixed-batch", "mixed_batches"),
    ({"adaptive_speculative_widths": "1,2"}, "--adaptive-speculative-widths", "adaptive_widths"),
    (
        {"num_speculative_tokens_per_batch_size": ranges((1, 8, 2))},
        "--num-speculative-tokens-per-batch-size",
        "width_schedule",
    ),
    ({"draft_head_parallelism": "replica"}, "--draft-head-parallelism", "replica_draft_head"),
    ({"draft_probs_layout": "replica"}, "--draft-probs-layout", "replica_draft_probs"),
]


@pytest.mark.parametrize(("values", "flag", "capability"), MACHINERY)
def test_a_setting_names_the_machinery_it_needs(values: dict[str, Any], flag: str, capability: Capability) -> None:
    config = SpeculativeConfig.parse({"speculative_method": "eagle", **values})
    assert required_machinery(config) == [(flag, capability)]


def test_a_schedule_with_a_count_of_zero_needs_zero_draft_rows() -> None:
    config = SpeculativeConfig.parse(
        {
            "speculative_method": "eagle",
            "num_speculative_tokens_per_batch_size": ranges((1, 8, 2), (9, 9, 0)),
        }
    )
    assert [need for _, need in required_machinery(config)] == ["width_schedule", "zero_draft_rows"]


@pytest.mark.parametrize("method", METHODS)
def test_the_plain_settings_of_a_method_need_nothing(method: str) -> None:
    config = SpeculativeConfig.parse({"speculative_method": method, "num_speculative_tokens": 3})
    assert required_machinery(config) == []


def architecture(*capabilities: Capability) -> Architecture:
    def never(*_: object) -> bool:
        return False

    target = TargetKind(name="t", label="T", matches=never, load=never)
    drafter = DrafterKind(
        name="eagle",
        label="Eagle",
        methods=("eagle",),
        draft_checkpoint=True,
        matches=never,
        default_num_speculative_tokens=2,
        load=never,
    )
    return Architecture(target=target, drafter=drafter, capabilities=frozenset(capabilities))


def test_an_architecture_refuses_every_flag_it_cannot_honour() -> None:
    config = SpeculativeConfig(speculative_method="eagle", synthetic_acceptance_rate=0.5, logit_penalties=True)
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(config, architecture("greedy_acceptance"))
    message = str(caught.value)
    assert "--synthetic-acceptance-rate is not supported by architecture UnifiedEagleTForCausalLM" in message
    assert "--logit-penalties is not supported" in message
    assert message.endswith("; bundles for onnxruntime are measured so: `graphspec bench --synthetic-acceptance-rate`")


def test_an_architecture_that_has_the_machinery_refuses_nothing() -> None:
    config = SpeculativeConfig(speculative_method="eagle", use_greedy_acceptance=True)
    refuse_unsupported(config, architecture("greedy_acceptance"))
    refuse_unsupported(SpeculativeConfig(speculative_method="eagle"), architecture())


@pytest.mark.parametrize("value", [1, 3, "2"], ids=str)
@pytest.mark.parametrize("name", METHOD_OF)
def test_a_setting_of_another_method_is_refused_whatever_its_value(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_other_methods({name: value, "num_speculative_tokens": 2}, architecture())
    flag = "--" + name.replace("_", "-")
    assert str(caught.value).startswith(f"{flag} is not supported by architecture UnifiedEagleTForCausalLM (it is for ")
    refuse_other_methods({name: None, "num_speculative_tokens": 2}, architecture())


def test_every_setting_of_one_method_is_known_as_one() -> None:
    """A new field whose name starts with a method's belongs there."""
    named = {name: name.partition("_")[0] for name in SpeculativeConfig.model_fields}
    assert {name: method for name, method in named.items() if method in METHODS} == METHOD_OF


def test_what_no_architecture_can_honour_is_known_by_field() -> None:
    found = unsupported([architecture("greedy_acceptance", "penalties", "width_schedule")])
    assert found == {
        "speculative_method": "eagle3, mtp, dflash, dflash2, dspark, standalone, ngram, medusa",
        "adaptive_speculative_widths": "",
        "adaptive_speculative_min_batch_size": "",
        "num_speculative_tokens_mixed_batch": "",
        "synthetic_acceptance_rate": "",
        "use_relaxed_acceptance_for_thinking": "",
        "relaxed_topk": "",
        "relaxed_delta": "",
        "draft_proposal": "sampled",
        "draft_head_parallelism": "replica",
        "draft_probs_layout": "replica",
    }
