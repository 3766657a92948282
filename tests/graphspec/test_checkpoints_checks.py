"""Loading by name, non-finite weights, the fit of tensors, and the fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphspec.checkpoints import Checkpoint, check_tensors, fingerprint, open_checkpoint
from graphspec.checkpoints.stored import count_non_finite
from graphspec.errors import CheckpointError


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_unknown_names_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="has no tensor named b, c"):
        opened.load(["a", "b", "c"])


def test_every_non_finite_tensor_is_named_and_none_is_yielded(tmp_path: Path) -> None:
    tensors = {name: torch.ones(4, dtype=torch.float16) for name in "abcd"}
    tensors["b"][1] = float("nan")
    tensors["d"][:2] = float("-inf")
    seen = []
    with pytest.raises(CheckpointError) as caught:  # noqa: PT012 — what came before the error matters
        for name, _ in checkpoint(tmp_path, tensors).load("abcd"):
            seen.append(name)
    assert seen == ["a"]
    message = "2 of the 4 tensors asked for hold NaN or infinite values: b (1 of 4 values), d (2 of 4 values)"
    assert message in str(caught.value)


def test_non_finite_tensors_that_are_not_asked_for_do_not_matter(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(1), "b": torch.tensor([float("nan")])})
    assert [name for name, _ in opened.load(["a"])] == ["a"]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_a_nan_is_found_in_every_floating_dtype(dtype: torch.dtype) -> None:
    assert count_non_finite(torch.tensor([1.0, float("nan"), 2.0]).to(dtype)) == 1
    assert count_non_finite(torch.tensor([1.0, 3.0]).to(dtype)) == 0


def test_a_bad_value_is_found_in_any_chunk_of_a_large_tensor() -> None:
    tensor = torch.zeros(3, (1 << 21) + 5, dtype=torch.bfloat16)
    tensor[0, 0] = tensor[1, 77] = tensor[2, -1] = float("inf")
    assert count_non_finite(tensor) == 3
    assert count_non_finite(tensor.T) == 3


def test_integers_and_booleans_are_finite() -> None:
    assert count_non_finite(torch.tensor([1, 2])) == count_non_finite(torch.tensor([True])) == 0


def test_exactly_the_expected_tensors_pass(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(2, 3), "extra.b": torch.ones(1)})
    check_tensors(opened, {"a": (2, 3)}, lambda name: name.startswith("extra."))
    check_tensors(opened, {"a": (2, 3), "extra.b": (1,)})


def test_one_error_names_all_that_is_missing_unexpected_and_wrong(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(2, 3), "x": torch.ones(1), "y": torch.ones(1), "b": torch.ones(4)})
    with pytest.raises(CheckpointError) as caught:
        check_tensors(opened, {"a": (3, 2), "b": (4,), "c": (1,), "d": (1,)})
    assert "2 missing: c, d; 2 unexpected: x, y; 1 of the wrong shape: a (found [2, 3], expected [3, 2])" in str(
        caught.value
    )


def test_a_tensor_that_is_expected_is_checked_even_if_ignored(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 of the wrong shape: a"):
        check_tensors(opened, {"a": (3,)}, lambda _: True)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"25 missing: n00, .*, n19 and 5 more; check that") as caught:
        check_tensors(opened, {"a": (1,)} | {f"n{i:02}": (1,) for i in range(25)})
    assert "n20" not in str(caught.value)


def test_the_fingerprint_is_the_hash_of_names_and_hashes(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(2)})
    lines = [
        f"{name}\0{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}\n"
        for name in ("config.json", "model.safetensors")
    ]
    assert fingerprint(opened) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    first = fingerprint(checkpoint(tmp_path / "one", tensors))
    assert fingerprint(checkpoint(tmp_path / "two", tensors)) == first
    (tmp_path / "two" / "tokenizer.json").write_text("{}")
    assert fingerprint(open_checkpoint(tmp_path / "two")) != first
    assert fingerprint(checkpoint(tmp_path / "one", {"a": torch.zeros(2)})) != first


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
        fingerprint(opened)


def test_a_float64_beyond_float32_is_not_finite() -> None:
    values = torch.tensor([1e300, -1e39, 1e38, 0.0], dtype=torch.float64)
    assert count_non_finite(values) == 2


def test_complex_tensors_are_refused_by_name_before_any_is_read(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match=r"holds complex numbers, .*: b \(C64\)"):
        opened.load(["a", "b"])
