"""What an EAGLE-3 checkpoint may leave to the target, and what it may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from twins import Twin

from graphspec.architectures.drafters.eagle3 import Eagle3Drafter
from graphspec.architectures.drafters.eagle3_loading import load_drafter
from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError
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
