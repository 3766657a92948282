"""`graphspec distill` from a target's checkpoint to a draft that builds, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from graphspec.building import build
from graphspec.cli import main
from graphspec.runtime.generate import load
from graphspec.runtime.sampling import SamplingParams

SIZES = "--depth 2 --epochs 1 --batch-size 2 --max-length 200 --max-new-tokens 16 --rows 4"


def command(
    model: Path, out: Path, *more: str, conversations: int = 40, vocabulary: str = "--draft-vocab-size 48"
) -> list[str]:
    text = f"distill --model {model} -o {out} --self-synthesize {conversations} {SIZES} {vocabulary}"
    return [*text.split(), "--held-out-share", "0.4", "--measured-prompts", "2", *more]


@pytest.fixture(scope="module")
def draft(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distilled") / "draft"
    assert main(command(chatty, out)) == 0
    return out


@pytest.mark.slow
def test_a_draft_is_published_in_the_community_layout(draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 48
    tensors = load_file(draft / "model.safetensors")
    assert tensors["d2t"].shape == (48,)
    assert tensors["t2d"].sum() == 48
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name.endswith("weight")} == {"torch.float16"}


@pytest.mark.slow
def test_what_was_done_is_recorded_with_the_engines_acceptance(draft: Path) -> None:
    record = json.loads((draft / "distill.json").read_text())
    assert record["recipe"]["depth"] == record["measured"]["width"] == 2
    assert record["conversations"] > 0
    assert 1 <= record["measured"]["prompts"] <= 2
    assert 1.0 <= record["measured"]["acceptance_length_with_bonus"] <= 3.0


@pytest.mark.slow
def test_the_draft_builds_and_leaves_the_targets_answers_as_they_are(
    draft: Path, chatty: Path, chatty_bundle: Path, tmp_path: Path
) -> None:
    built = build(
        model=chatty, draft_model_path=draft, out=tmp_path / "b", encoding="float32", max_length=200, max_batch_size=2
    )
    assert built.manifest.architecture == "UnifiedEagle3Llama3ForCausalLM"
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with load(tmp_path / "b", num_threads=1) as with_draft, load(chatty_bundle, num_threads=1) as without:
        (expected,) = without.generate(["Hello"], params, width=0)
        (found,) = with_draft.generate(["Hello"], params)
    assert found.token_ids == expected.token_ids


@pytest.mark.slow
def test_a_repeated_command_does_nothing_twice(draft: Path, chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (draft / "model.safetensors").read_bytes()
    assert main(command(chatty, draft, "--overwrite")) == 0
    captured = capsys.readouterr()
    assert (draft / "model.safetensors").read_bytes() == before
    assert "trained on" in captured.out
    assert "training" not in captured.err
    assert "conversations" not in captured.err


@pytest.mark.slow
def test_another_method_is_trained_on_the_same_conversations(
    draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = draft.with_name("draft.work"), tmp_path / "block"
    before = (work / "eagle3" / "training.pt").read_bytes()
    options = ["--work-dir", str(work), "--method", "dflash", "--draft-layers", "1", "--anchors", "4"]
    assert main(command(chatty, out, *options)) == 0
    said = capsys.readouterr().err
    assert "conversations" not in said
    assert len(list((work / "features").iterdir())) == 1  # both read the same layers
    assert (work / "eagle3" / "training.pt").read_bytes() == before
    record = json.loads((out / "distill.json").read_text())
    assert (record["method"], record["measured"]["width"]) == ("dflash", 2)
    config = json.loads((out / "config.json").read_text())
    assert (config["speculators_model_type"], config["block_size"], config["draft_vocab_size"]) == ("dflash", 3, 48)
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (48, 64)
    assert "layers.0.self_attn.k_norm.weight" in tensors


@pytest.mark.slow
def test_an_eagle_head_is_trained_on_the_features_that_are_there(draft: Path, chatty: Path, tmp_path: Path) -> None:
    work, out = draft.with_name("draft.work"), tmp_path / "head"
    options = ["--work-dir", str(work), "--method", "eagle"]
    assert main(command(chatty, out, *options, vocabulary="")) == 0
    assert len(list((work / "features").iterdir())) == 1
    record = json.loads((out / "distill.json").read_text())
    assert (record["method"], record["measured"]["width"], record["vocabulary_coverage"]) == ("eagle", 2, 1.0)


@pytest.mark.slow
def test_a_draft_is_trained_on(draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the folder of the training that made it. With a learning rate of next to nothing it stays as it is: it was not
    begun anew."""
    work, out = tmp_path / "work", tmp_path / "next"
    shutil.copytree(draft.with_name("draft.work"), work)
    more = ["--work-dir", str(work), "--draft-model-path", str(draft), "--measured-prompts", "0"]
    more += ["--learning-rate", "1e-9"]
    assert main(command(chatty, out, *more, vocabulary="")) == 0
    before, after = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert json.loads((out / "config.json").read_text()) == json.loads((draft / "config.json").read_text())
    assert json.loads((out / "distill.json").read_text())["went_on_from"] == "draft"
    again = command(chatty, out, *more, "--overwrite", "--learning-rate", "1e-2", vocabulary="")
    assert main(again) == 1
    assert "training with other data or another recipe" in capsys.readouterr().err
    (of_this,) = work.glob("eagle3-from-*/training.pt")
    of_this.unlink()
    assert main(again) == 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in load_file(out / "model.safetensors").items())


def test_a_draft_that_is_trained_on_has_its_sizes(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(chatty, tmp_path / "d", "--draft-model-path", str(tmp_path))) == 1
    assert "--draft-model-path names a draft that has its sizes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_draft_of_another_method_is_not_trained_on(
    draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--method", "eagle", "--draft-model-path", str(draft)]
    assert main(command(chatty, tmp_path / "d", *options, vocabulary="")) == 1
    assert "--method eagle3 trains it on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "said"), [("norm_before_residual", "first.norm_before_residual"), ("norm_output", "norm_output")]
)
def test_a_draft_that_is_built_otherwise_is_not_trained_on(
    draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], switch: str, said: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, switch: True}))
    options = ["--work-dir", str(draft.with_name("draft.work")), "--draft-model-path", str(other)]
    assert main(command(chatty, tmp_path / "d", *options, vocabulary="")) == 1
    error = capsys.readouterr().err
    assert f"cannot be trained on: {said};" in " ".join(error.split())


@pytest.mark.slow
def test_medusa_heads_are_published_as_the_community_does(draft: Path, chatty: Path, tmp_path: Path) -> None:
    work, out = draft.with_name("draft.work"), tmp_path / "heads"
    options = ["--work-dir", str(work), "--method", "medusa", "--anchors", "4"]
    assert main(command(chatty, out, *options, vocabulary="")) == 0
    assert len(list((work / "features").iterdir())) == 1  # those that EAGLE-3 reads hold what heads read
    record = json.loads((out / "distill.json").read_text())
    assert (record["method"], record["measured"]["width"], record["vocabulary_coverage"]) == ("medusa", 2, 1.0)
    assert json.loads((out / "config.json").read_text())["medusa_num_heads"] == 2
    assert load_file(out / "medusa_lm_head.safetensors")["1.1.weight"].shape == (128, 64)


@pytest.mark.slow
def test_a_draft_takes_the_place_of_one_of_another_method(draft: Path, chatty: Path, tmp_path: Path) -> None:
    """Of which nothing is left, so that it is found to be what it is; and a measurement that was ended goes on."""
    work, out = tmp_path / "work", tmp_path / "out"
    shutil.copytree(draft.with_name("draft.work"), work, ignore=shutil.ignore_patterns("medusa"))
    shutil.copytree(draft, out)
    options = ["--work-dir", str(work), "--method", "medusa", "--overwrite"]

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = (out / "model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphspec.distill.pipeline.measure", ended)
        assert main(command(chatty, out, *options, vocabulary="")) == 130
    assert (out / "model.safetensors").read_bytes() == before
    assert main(command(chatty, out, *options, vocabulary="")) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "distill.json", "medusa_lm_head.safetensors"]


@pytest.mark.slow
def test_a_draft_that_is_there_is_not_overwritten(
    draft: Path, chatty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(chatty, draft)) == 1
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_conversations_of_another_plan_are_not_mixed_in(
    draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = str(draft.with_name("draft.work"))
    assert main(command(chatty, tmp_path / "d", "--work-dir", work, "--seed", "9")) == 1
    assert "made in another way" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_target_too_shallow_is_refused_before_any_work(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shallow = tiny.save_llama(tmp_path / "target", layers=3)
    assert main(command(shallow, tmp_path / "draft", "--method", method)) == 1
    assert "a target of 3 has too few" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.slow
def test_a_draft_that_cannot_be_trained_on_is_refused_before_any_work(
    draft: Path, chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    assert main(command(chatty, tmp_path / "d", "--draft-model-path", str(other), vocabulary="")) == 1
    assert "cannot be trained on: rotary" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_target_is_not_written_over(chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    shutil.copytree(chatty, target)
    before = (target / "model.safetensors").read_bytes()
    assert main(command(target, target, "--overwrite")) == 1
    assert "is the target itself" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("share", "said"), [("0.0005", "none was held out"), ("0.9999", "and 1 of those are held out")]
)
def test_one_prompt_is_trained_on_or_held_out(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str, said: str
) -> None:
    """One that is too long beside it is told."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Hello"}) + "\n" + json.dumps({"prompt": "x" * 500}) + "\n")
    # Ends at no token, so that the answer is long enough.
    target = tmp_path / "target"
    shutil.copytree(chatty, target)
    (target / "generation_config.json").unlink()
    words = f"distill --model {target} -o {tmp_path / 'd'} --data {data} {SIZES} --held-out-share {share}"
    status = main(words.split())
    captured = capsys.readouterr()
    if status:
        error = " ".join(captured.err.split())
        assert said in error
        assert "of 2 asked for 1 are of use" in error
    else:
        assert said in captured.out
        assert "of 1 conversations (1 of 2 were of no use" in captured.out
        assert json.loads((tmp_path / "d" / "distill.json").read_text())["estimated_tokens_per_step"] is None


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["--self-synthesize", "4", "--method", "nonsense"],
            1,
            "is not known; use eagle3 or dflash or eagle or medusa",
        ),
        (
            ["--self-synthesize", "4", "--draft-layers", "2"],
            1,
            "--draft-layers cannot be set for drafts of --method eagle3",
        ),
        (["--self-synthesize", "4", "--anchors", "9"], 1, "--anchors cannot be set for drafts of --method eagle3"),
        (["--self-synthesize", "4", "--held-out-share", "1"], 1, "--held-out-share 1.0 must be"),
        (["--self-synthesize", "4", "--precision", "int8"], 1, "--precision 'int8' is not known"),
        (["--self-synthesize", "4", "--depth", "129"], 1, "--depth 129: a step drafts 128 tokens at most"),
        (["--self-synthesize", "4", "--depth", "16", "--max-length", "16"], 1, "--depth 16: a conversation has"),
        (["--self-synthesize", "4", "--seed", "4294967296"], 1, "--seed 4294967296: give one of 0 to 4294967295"),
        (["--self-synthesize", "4", "--draft-vocab-size", "129"], 1, "--draft-vocab-size 129: give 1 to 128"),
        (["--self-synthesize", "4", "--method", "dflash", "--draft-layers", "5"], 1, "the target itself has 4"),
        (["--self-synthesize", "4", "--learning-rate", "2"], 1, "--learning-rate 2.0 must be"),
        ([], 2, "one of the two"),
        (["--self-synthesize", "4", "--data", "x"], 2, "one of the two"),
        (["--data", "missing.jsonl"], 1, "missing.jsonl cannot be read"),
    ],
)
def test_bad_requests_are_refused_before_any_work(
    chatty: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    said: str,
) -> None:
    assert main(["distill", "--model", str(chatty), "-o", str(tmp_path / "draft"), *words]) == status
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
