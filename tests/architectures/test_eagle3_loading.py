"""What an EAGLE-3 checkpoint may leave to the target, and what it may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from twins import Twin, load_twin

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.eagle3_loading import load_drafter
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError, UnsupportedError
from graphspec.speculative_config import SpeculativeConfig

IDS = "eagle_aux_hidden_state_layer_ids"


def load(twin: Twin, path: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Eagle3Drafter:
    """The head saved at `path` with these tensors and config keys."""
    draft = tiny.save_eagle3(path, tensors or tiny.eagle3_tensors(), **config)
    return load_drafter(twin.target, open_checkpoint(draft), 3, SpeculativeConfig())


def refused(twin: Twin, path: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> str:
    """The one-line message it is refused with."""
    with pytest.raises(CheckpointError) as error:
        load(twin, path, tensors, **config)
    assert "\n" not in str(error.value)
    return str(error.value)


def without(*names: str, **options: Any) -> dict[str, Tensor]:
    return {name: value for name, value in tiny.eagle3_tensors(**options).items() if name not in names}


def test_its_problems_are_named_together(llama: Twin, tmp_path: Path) -> None:
    tensors = without("midlayer.hidden_norm.weight", "norm.weight")
    tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    tensors["mask_hidden"] = torch.zeros(64)
    message = refused(llama, tmp_path, tensors)
    assert "2 missing: layers.0.hidden_norm.weight, norm.weight" in message
    assert "1 unexpected: mask_hidden" in message
    assert "layers.0.self_attn.q_proj.weight (found [64, 64], expected [64, 128])" in message


def test_one_norm_of_a_tap_wants_all(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, tiny.eagle3_tensors() | {"fc_norm.0.weight": torch.ones(64)})
    assert "2 missing: fc_norm.1.weight, fc_norm.2.weight" in message


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc"])
def test_norms_that_the_config_promises_must_be_there(llama: Twin, tmp_path: Path, flag: str) -> None:
    config: dict[str, Any] = {flag: True}
    assert "missing" in refused(llama, tmp_path, **config)


def test_values_that_are_not_finite_are_named(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors()
    tensors["lm_head.weight"][0, 0] = float("nan")
    tensors["fc.weight"][0, 0] = float("inf")
    message = refused(llama, tmp_path, tensors)
    assert "fc.weight (1 of" in message
    assert "lm_head.weight (1 of" in message


def test_two_spellings_of_one_tensor_are_named(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors()
    name = "mlp.up_proj.weight"
    message = refused(llama, tmp_path, tensors | {f"model.layers.0.{name}": tensors[f"midlayer.{name}"] + 1})
    assert f"midlayer.{name}" in message
    assert f"model.layers.0.{name}" in message


@pytest.mark.parametrize(
    ("offset", "token"),
    [(128, 128), (10_000, 10_000), (-1, -1)],
)
def test_d2t_may_not_point_outside_the_vocabulary(llama: Twin, tmp_path: Path, offset: int, token: int) -> None:
    tensors = tiny.eagle3_tensors()
    tensors["d2t"][0] = offset
    message = refused(llama, tmp_path, tensors)
    assert f"token {token}," in message
    assert "ends at 127" in message


def test_d2t_may_point_at_the_first_and_the_last_token(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors()
    tensors["d2t"][0], tensors["d2t"][31] = 0, 127 - 31
    del tensors["t2d"]
    assert torch.equal(load(llama, tmp_path, tensors).offsets, tensors["d2t"])


def test_d2t_of_another_length_than_the_head_is_refused(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, tiny.eagle3_tensors() | {"d2t": torch.zeros(31, dtype=torch.int64)})
    assert "31" in message
    assert "32" in message


def test_d2t_without_a_head_of_its_own_is_refused(llama: Twin, tmp_path: Path) -> None:
    assert "d2t" in refused(llama, tmp_path, without("lm_head.weight"))


def test_a_head_of_another_vocabulary_needs_d2t(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, without("d2t", "t2d"))
    assert "lm_head has 32 rows" in message
    assert "no d2t" in message


def test_fc_reads_whole_hidden_states(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, tiny.eagle3_tensors() | {"fc.weight": torch.zeros(64, 190)})
    assert "190" in message
    assert "no multiple of the target's hidden size 64" in message


@pytest.mark.parametrize("shape", [(64,), (64, 3, 64)])
def test_fc_is_a_matrix(llama: Twin, tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert "fc.weight" in refused(llama, tmp_path, tiny.eagle3_tensors() | {"fc.weight": torch.zeros(shape)})


def test_fc_must_be_there(llama: Twin, tmp_path: Path) -> None:
    assert "no fc.weight" in refused(llama, tmp_path, without("fc.weight"))


@pytest.mark.parametrize("taps", [[2, 4, 9], [-1, 4, 5]])
def test_taps_outside_the_target_are_named(llama: Twin, tmp_path: Path, taps: list[int]) -> None:
    (outside,) = [tap for tap in taps if not 0 <= tap <= 8]
    config: dict[str, Any] = {IDS: taps}
    assert f"taps layers [{outside}] ({IDS}), and the target has 8" in refused(llama, tmp_path, **config)


@pytest.mark.parametrize("taps", [[2, 4], [1, 2, 3, 4]])
def test_as_many_taps_are_listed_as_fc_reads(llama: Twin, tmp_path: Path, taps: list[int]) -> None:
    config: dict[str, Any] = {IDS: taps}
    message = refused(llama, tmp_path, **config)
    assert "fc reads 3 hidden states" in message
    assert f"names {len(taps)}" in message


def test_two_taps_have_no_default(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, tiny.eagle3_tensors(num_taps=2))
    assert "fc reads 2 hidden states" in message
    assert "names none" in message


def test_a_target_too_shallow_for_the_default_taps_is_refused(small: Twin, tmp_path: Path) -> None:
    assert "the target has 2" in refused(small, tmp_path)


@pytest.mark.parametrize("owned", [[], ["embed_tokens.weight"], ["lm_head.weight"]])
def test_what_is_shared_needs_the_targets_hidden_size(llama: Twin, tmp_path: Path, owned: list[str]) -> None:
    tensors = tiny.eagle3_tensors(hidden=32, pruned=False) | {"embed_tokens.weight": torch.zeros(128, 32)}
    shared = {"embed_tokens.weight", "lm_head.weight"} - set(owned)
    kept = {name: value for name, value in tensors.items() if name not in shared}
    message = refused(llama, tmp_path, kept, hidden_size=32, draft_vocab_size=128)
    assert "hidden size 32" in message
    assert "hidden size 64" in message
    for name in shared:
        assert name.removesuffix(".weight") in message


def test_an_embedding_of_its_own_has_the_targets_vocabulary(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors() | {"embed_tokens.weight": torch.zeros(120, 64)}
    message = refused(llama, tmp_path, tensors)
    assert "embed_tokens.weight (found [120, 64], expected [128, 64])" in message


def test_a_copy_of_the_targets_embedding_is_not_kept_twice(llama: Twin, tmp_path: Path) -> None:
    copy = {"embed_tokens.weight": llama.target.embedding.weight.clone()}
    assert load(llama, tmp_path / "copy", tiny.eagle3_tensors() | copy).embedding is None
    own = {"embed_tokens.weight": copy["embed_tokens.weight"] + 1e-3}
    kept = load(llama, tmp_path / "own", tiny.eagle3_tensors() | own).embedding
    assert kept is not None
    assert torch.equal(kept.weight, own["embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_any_integer_type_are_read(llama: Twin, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tiny.eagle3_tensors()
    offsets = load(llama, tmp_path, tensors | {"d2t": tensors["d2t"].to(dtype)}).offsets
    assert torch.equal(offsets, tensors["d2t"])


def test_offsets_that_are_no_integers_are_refused(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors()
    message = refused(llama, tmp_path, tensors | {"d2t": tensors["d2t"] + 0.5})
    assert "d2t is stored as float32" in message


def test_two_tokens_of_the_draft_that_are_one_of_the_target_are_refused(llama: Twin, tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors()
    tensors["d2t"][5] = tensors["d2t"][4] - 1
    repeated = 4 + int(tensors["d2t"][4])
    assert f"d2t points at token {repeated} 2 times" in refused(llama, tmp_path, tensors)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_that_contradicts_the_offsets_is_refused(llama: Twin, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tiny.eagle3_tensors()
    kept = tensors["t2d"].to(dtype)
    assert load(llama, tmp_path / "right", tensors | {"t2d": kept}).pruned
    assert "t2d and d2t differ in 128 tokens" in refused(
        llama, tmp_path / "a", tensors | {"t2d": (~tensors["t2d"]).to(dtype)}
    )
    assert "t2d is" in refused(llama, tmp_path / "b", tensors | {"t2d": kept[:-1]})


@pytest.mark.parametrize("taps", [[5, 4, 2], [2, 2, 5], [2, 5, 4]])
def test_taps_are_ascending_and_each_is_another_layer(llama: Twin, tmp_path: Path, taps: list[int]) -> None:
    config: dict[str, Any] = {IDS: taps}
    assert f"taps layers {taps} ({IDS}): they must be in ascending order" in refused(llama, tmp_path, **config)


@pytest.mark.parametrize("taps", ["2,4,5", [2.5, 4, 5], [2, 4, "5"], [True, 4, 5], 4])
@pytest.mark.parametrize("nested", [False, True])
def test_taps_are_whole_numbers(llama: Twin, tmp_path: Path, taps: object, nested: bool) -> None:
    config: dict[str, Any] = {"eagle_config": {IDS: taps}} if nested else {IDS: taps}
    assert f"config.json says {IDS} is" in refused(llama, tmp_path, **config)


@pytest.mark.parametrize("layers", range(3, 7))
def test_the_usual_taps_need_a_target_deep_enough(tmp_path: Path, layers: int) -> None:
    """2, L//2 and L - 3 would come out of order, or twice."""
    target = load_twin(tiny.save_llama(tmp_path / "target", layers=layers))
    message = refused(target, tmp_path / "draft")
    assert f"the target has {layers} layers, and that takes 7" in message
    config: dict[str, Any] = {IDS: [1, 2, 3]}
    assert load(target, tmp_path / "named", **config).taps == (1, 2, 3)


def test_as_many_hidden_states_are_promised_as_fc_reads(llama: Twin, tmp_path: Path) -> None:
    assert "says num_aux_hidden_states 4" in refused(llama, tmp_path / "a", num_aux_hidden_states=4)
    assert load(llama, tmp_path / "b", num_aux_hidden_states=3).taps == (2, 4, 5)


@pytest.mark.parametrize(
    "switch",
    [
        {"use_aux_hidden_state": False},
        {"use_input_layernorm_in_first_layer": False},
        {"use_last_layernorm": False},
        {"use_mtp_layernorm": True},
        {"parallel_drafting": True},
        {"parallel_draft_step": 2},
        {"parallel_draft_step": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_switch_that_nothing_here_follows_is_refused_by_name(
    llama: Twin, tmp_path: Path, switch: dict[str, Any], nested: bool
) -> None:
    ((name, value),) = switch.items()
    with pytest.raises(
        UnsupportedError, match=rf"asks for {name}: {str(value).lower()}, which an EAGLE-3 head does not"
    ):
        load(llama, tmp_path, **({"eagle_config": switch} if nested else switch))


def test_switches_that_say_what_is_done_are_taken(llama: Twin, tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "parallel_draft_step": 1,
        "has_lm_head": True,
        "norm_before_residual": None,
    }
    assert load(llama, tmp_path, eagle_config=said).taps == (2, 4, 5)


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output"])
def test_switches_in_the_eagle_config_are_followed_too(llama: Twin, tmp_path: Path, key: str) -> None:
    drafter = load(llama, tmp_path, eagle_config={key: True})
    owner = drafter.first if key == "norm_before_residual" else drafter
    assert getattr(owner, key) is True


@pytest.mark.parametrize("said", [True, False])
def test_what_the_config_says_of_the_head_agrees_with_the_file(llama: Twin, tmp_path: Path, said: bool) -> None:
    tensors = without("lm_head.weight", "d2t", "t2d") if said else tiny.eagle3_tensors()
    message = refused(llama, tmp_path, tensors, has_lm_head=said, draft_vocab_size=128)
    assert f"says has_lm_head: {str(said).lower()}, and its lm_head.weight is" in message


def test_biases_that_the_config_promises_must_be_there(llama: Twin, tmp_path: Path) -> None:
    message = refused(llama, tmp_path, qkv_bias=True)
    assert "missing: layers.0.self_attn.k_proj.bias, layers.0.self_attn.q_proj.bias" in message


@pytest.mark.parametrize("key", ["norm_before_fc", "norm_output", "use_last_layernorm", "qkv_bias"])
def test_a_switch_is_true_or_false(llama: Twin, tmp_path: Path, key: str) -> None:
    config: dict[str, Any] = {key: "false"}
    assert f"config.json says {key} is 'false', and this kind of model needs it as true or false" in refused(
        llama, tmp_path, **config
    )
