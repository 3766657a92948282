"""`graphspec generate`: what goes to stdout, what to stderr, and which prompts it takes."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

import graphspec
from graphspec.bundle import read_manifest
from graphspec.cli.answers import Writer
from graphspec.runtime.acceptance import AcceptanceStatistics
from graphspec.runtime.answer import Generation, Piece
from graphspec.staging import staging

SAMPLED = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7"]


@pytest.fixture
def answer(bundle: Path, run: Command) -> Any:
    """Runs `generate` on the shared bundle with some options and returns the JSON, or with text=True stdout."""

    def generate(*options: object, text: bool = False) -> Any:
        result = run("generate", bundle, "--max-new-tokens", 24, *([] if text else ["--json"]), *options)
        assert (result.status, *(result.errors if not text else [])) == (0,)
        return result.out if text else json.loads(result.out)

    return generate


@pytest.fixture(scope="module")
def templateless(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared bundle without its chat template."""
    out = tmp_path_factory.mktemp("templateless") / "bundle"
    fields = read_manifest(bundle).model_dump(exclude={"format", "graphspec_version", "created", "files", "checksum"})
    with staging(out) as stage:
        shutil.copytree(
            bundle, stage.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "*.jinja")
        )
        stage.commit(fields)
    return out


def test_stdout_is_the_text_and_nothing_else(answer: Any) -> None:
    whole = answer("--prompt", "abc")
    assert len(whole["text"]) == 24
    assert answer("--prompt", "abc", text=True) == whole["text"] + "\n"


def test_stderr_ends_with_the_acceptance_line_and_the_speed(bundle: Path, answer: Any, run: Command) -> None:
    accepted = answer("--prompt", "abc")["acceptance"]
    result = run("generate", bundle, "--max-new-tokens", "24", "--prompt", "abc")
    drafts, speed = result.errors
    assert drafts.startswith(f"Draft Tokens: {accepted['accepted_tokens']}/{accepted['drafted_tokens']} (")
    assert f" / 3 toks (accepted drafts/step; {accepted['acceptance_length_with_bonus']:.2f} toks/step" in drafts
    assert re.fullmatch(r"24 tokens in [\d.]+ s, [\d.]+ tokens/s after the first, TTFT [\d.]+ s", speed)


def test_the_json_object_counts_and_times_the_answer(answer: Any) -> None:
    whole = answer("--prompt", "abc", "--raw", *SAMPLED)
    assert set(whole) == {"text", "token_ids", "finish_reason", "usage", "seed", "acceptance", "timing"}
    assert (whole["finish_reason"], whole["seed"], len(whole["token_ids"])) == ("length", 7, 24)
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27}
    assert whole["acceptance"]["output_tokens"] == 23  # all but the one that came with the prompt
    timing = whole["timing"]
    assert 0 < timing["time_to_first_token"] <= timing["generate_seconds"]
    assert timing["load_seconds"] > 0
    assert timing["tokens_per_second"] > 0


@pytest.mark.parametrize("sampling", [[], SAMPLED], ids=["greedy", "sampled"])
def test_output_is_the_same_with_and_without_speculation(answer: Any, sampling: list[str]) -> None:
    prompt = ["--prompt", "abcabcabc", *sampling]
    with_drafts, without = answer(*prompt, "--width", 3), answer(*prompt, "--no-speculation")
    assert with_drafts["token_ids"] == without["token_ids"]
    assert with_drafts["acceptance"]["drafted_tokens"] > 0
    assert without["acceptance"]["drafted_tokens"] == 0
    assert answer(*prompt, text=True) == with_drafts["text"] + "\n"
    assert answer(*prompt, "--width", "auto")["token_ids"] == without["token_ids"]
    scheduled = answer(*prompt, "--width", "1:3,2:0")
    assert scheduled["token_ids"] == without["token_ids"]
    assert scheduled["acceptance"] == with_drafts["acceptance"]


def test_without_drafts_no_acceptance_is_claimed(bundle: Path, run: Command) -> None:
    result = run("generate", bundle, "--prompt", "abc", "--max-new-tokens", "4", "--no-speculation")
    (speed,) = result.errors
    assert speed.startswith("4 tokens in ")


def test_another_seed_is_another_answer_and_an_unseeded_one_tells_its_seed(answer: Any) -> None:
    sampled = ["--prompt", "abc", "--temperature", "1.5"]
    first = answer(*sampled)
    assert answer(*sampled, "--seed", first["seed"])["token_ids"] == first["token_ids"]
    assert answer(*sampled)["token_ids"] != first["token_ids"]


def test_the_answer_ends_before_a_stop_text_and_at_a_stop_token(answer: Any) -> None:
    whole = answer("--prompt", "abc")
    text, ids = whole["text"], whole["token_ids"]
    stop = text[5:7]
    at = text.index(stop)
    stopped = answer("--prompt", "abc", "--stop", "nowhere", "--stop", stop)
    assert (stopped["text"], stopped["finish_reason"]) == (text[:at], "stop")
    assert answer("--prompt", "abc", "--stop", stop, text=True) == text[:at] + "\n"
    ended = answer("--prompt", "abc", "--stop-token-id", ids[5])
    assert ended["token_ids"] == ids[: ids.index(ids[5]) + 1]


def test_chat_is_the_default_where_there_is_a_template(bundle: Path, answer: Any) -> None:
    chat = answer("--prompt", "abc", "--system", "xyz")
    assert chat["usage"]["prompt_tokens"] == len("xyz:abc:")
    assert chat["token_ids"] == answer("--raw", "--prompt", "xyz:abc:")["token_ids"]
    with graphspec.load(bundle) as loaded:
        (expected,) = loaded.generate("xyz:abc:", graphspec.SamplingParams(max_new_tokens=24))
    assert chat["text"] == expected.text


def test_without_a_template_prompts_are_raw_and_chat_is_refused(templateless: Path, answer: Any, run: Command) -> None:
    args = ["generate", templateless, "--prompt", "abc", "--max-new-tokens", "24"]
    assert json.loads(run(*args, "--json").out)["token_ids"] == answer("--raw", "--prompt", "abc")["token_ids"]
    result = run(*args, "--chat")
    assert result.status == 1
    assert result.errors == ["error: this bundle has no chat template: use --raw and write the whole prompt yourself"]


def test_several_prompts_are_answered_in_order_as_each_would_be_alone(answer: Any) -> None:
    # The bundle holds two rows: the third prompt waits for one.
    prompts = ["abc", "zyxwvut", "m"]
    alone = [answer("--prompt", prompt, *SAMPLED) for prompt in prompts]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = answer(*flags, *SAMPLED)
    assert [entry["token_ids"] for entry in together] == [entry["token_ids"] for entry in alone]
    labelled = "".join(f"[{number}] {entry['text']}\n" for number, entry in enumerate(alone, start=1))
    assert answer(*flags, *SAMPLED, text=True) == labelled


def test_a_prompt_comes_from_a_file_or_from_stdin(answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer("--prompt", "abc")["token_ids"]
    (tmp_path / "prompt.txt").write_text("abc\n")
    assert answer("--prompt-file", tmp_path / "prompt.txt")["token_ids"] == expected
    for flag in ("--prompt", "--prompt-file"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\r\n")))
        assert answer(flag, "-")["token_ids"] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--prompt abc --width 1:3,2:1",
            "width 1 of the schedule 1:3,2:1 is not in this bundle; it was built for 0, 3",
        ),
        ("--prompt abc --width 2", "width 2 is not in this bundle; it was built for 0, 3"),
        ("--prompt abc --temperature -1", "temperature is -1.0"),
        ("--prompt abc --min-tokens 300", "min_tokens is 300"),
        ("--prompt abc --raw --system x", "--system is for a chat"),
        ("--prompt-file nowhere.txt", "nowhere.txt: No such file or directory"),
        (f"--prompt {'a' * 100}", "the prompt has 101 tokens and the bundle holds 96"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_line(bundle: Path, run: Command, options: str, said: str) -> None:
    result = run("generate", bundle, *options.split())
    assert (result.status, result.out) == (1, "")
    (line,) = result.errors
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize(
    ("width", "said"),
    [
        ("wide", "--width is 'wide': give a whole number from 0, auto, or a schedule such as 1:4,8:0"),
        ("2:3", "--width: the first range starts at batch size 2; it must start at 1"),
    ],
)
def test_a_width_that_is_none_is_refused(bundle: Path, run: Command, width: str, said: str) -> None:
    result = run("generate", bundle, "--prompt", "abc", "--width", width)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_an_empty_prompt_and_bytes_that_are_no_text_are_refused(bundle: Path, run: Command, tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"ab\xff")
    assert "is not UTF-8 text: byte 2" in run("generate", bundle, "--prompt-file", tmp_path / "prompt.bin").err
    assert "the prompt is empty" in run("generate", bundle, "--raw", "--prompt", "").err


def test_no_new_tokens_is_an_empty_answer(bundle: Path, run: Command) -> None:
    result = run("generate", bundle, "--prompt", "abc", "--max-new-tokens", "0")
    assert (result.status, result.out) == (0, "\n")
    (speed,) = result.errors
    assert re.fullmatch(r"0 tokens in [\d.]+ s", speed)


def test_a_bundle_changed_since_is_refused_unless_trusted(bundle: Path, tmp_path: Path, run: Command) -> None:
    changed = Path(shutil.copytree(bundle, tmp_path / "changed"))
    with (changed / "weights" / "model.safetensors").open("r+b") as file:
        file.seek(-1, io.SEEK_END)
        last = file.read()
        file.seek(-1, io.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    args = ["generate", changed, "--prompt", "abc", "--max-new-tokens", "2"]
    result = run(*args)
    assert result.status == 1
    assert "weights/model.safetensors has sha256" in result.errors[0]
    assert run(*args, "--no-verify").status == 0


def piece(index: int, text: str, *, last: bool = False) -> Piece:
    generation = Generation(
        text=text,
        token_ids=(1,),
        finish_reason="stop",
        num_prompt_tokens=1,
        seed=0,
        acceptance=AcceptanceStatistics(),
    )
    return Piece(index=index, text=text, token_ids=(1,), generation=generation if last else None)


def test_text_of_the_first_answer_is_written_at_once_and_of_later_ones_in_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = Writer(2)
    shown = []
    for each in (piece(0, "a"), piece(1, "x"), piece(1, "y", last=True), piece(0, "b"), piece(0, "c", last=True)):
        writer.take(each)
        shown.append(capsys.readouterr().out)
    writer.end()
    assert shown == ["[1] a", "", "", "b", "c\n[2] xy\n"]
    assert capsys.readouterr().out == ""


def test_an_interrupted_line_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(1)
    writer.take(piece(0, "half a sen"))
    writer.end()
    assert capsys.readouterr().out == "half a sen\n"
