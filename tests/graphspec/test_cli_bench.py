"""`graphspec bench`: its table, its JSON, its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, Run

TEXTS = {"letters": ["abc", "zyxwvut"], "other": ["m"]}
MOST = 8


class Page(HTMLParser):
    """Cells of each table by its id, and what elements refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self.links: list[str] = []
        self._rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "table":
            self._rows = self.tables[dict(attrs).get("id") or "about"] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag == "td":
            self._rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self._rows[-1][-1] += data


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "questions.jsonl"
    entries = [
        {"question_id": f"{name}{number}", "category": name, "turns": [text]}
        for name, texts in TEXTS.items()
        for number, text in enumerate([*texts, "x" * 500])
    ]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


CASES = [(1, 0), (1, 3), (1, "auto"), (2, 0), (2, 3), (2, "auto")]


@pytest.fixture
def benched(bundle: Path, dataset: Path, run: Command, tmp_path: Path) -> tuple[Run, Any, str]:
    """What one benchmark printed, wrote as JSON, and drew."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--dataset", dataset, "--max-new-tokens", MOST, "--batch", "1,2", "--json", out, "--plot", page]
    result = run("bench", bundle, *words)
    assert (result.status, result.errors) == (0, [])
    return result, json.loads(out.read_text()), page.read_text()


def test_the_json_has_every_case_and_the_acceptance_of_generate(
    benched: tuple[Run, Any, str], bundle: Path, run: Command
) -> None:
    _, found, _ = benched
    assert [(case["batch"], case["width"]) for case in found["cases"]] == CASES
    flags = [word for texts in TEXTS.values() for text in texts for word in ("--prompt", text)]
    answers = json.loads(run("generate", bundle, "--max-new-tokens", MOST, "--json", *flags).out)
    for case in found["cases"]:
        assert case["tokens"] == sum(len(answer["token_ids"]) for answer in answers)
        if case["width"] == 3:
            for count in ("drafted_tokens", "accepted_tokens", "output_tokens", "verifications"):
                assert case["acceptance"][count] == sum(answer["acceptance"][count] for answer in answers)
        assert case["step_ms"] == pytest.approx(case["device_ms"] + case["host_ms"])
    assert found["outputs"] == {"equal": True, "compared": 15, "differences": []}
    assert found["synthetic"] is None
    assert found["about"]["prompts"] == "questions.jsonl, 3 of letters, other; 2 left out, too long for the bundle"


def test_the_page_shows_the_figures_of_the_json_and_needs_nothing_else(benched: tuple[Run, Any, str]) -> None:
    _, found, text = benched
    page = Page(text)
    shown = [row for row in page.tables["cases"] if row]
    assert [row[:4] for row in shown] == [
        [str(c["batch"]), str(c["width"]), f"{c['tokens_per_second']:.1f}", f"{c['speedup']:.2f}"]
        for c in found["cases"]
    ]
    assert [row[8:11] for row in shown] == [
        [f"{c[name]:.2f}" for name in ("step_ms", "device_ms", "host_ms")] for c in found["cases"]
    ]
    assert len([row for row in page.tables["categories"] if row]) == len(found["categories"]) == 6
    assert dict(row for row in page.tables["about"]) == found["about"]
    assert page.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe"}.intersection(page.tags)
    assert page.links == []
    assert not re.search(r"https?:|@import|url\(", text)


def test_the_tables_fit_a_terminal_and_end_with_what_to_do(benched: tuple[Run, Any, str]) -> None:
    result, found, _ = benched
    lines = result.out.splitlines()
    rows = [line.split() for line in lines if re.match(r" *[12] +([03]|auto) ", line)]
    assert [(row[0], row[1]) for row in rows] == [(str(batch), str(width)) for batch, width in CASES]
    assert [row[2] for row in rows] == [f"{case['tokens_per_second']:.1f}" for case in found["cases"]]
    assert "…" not in result.out
    first, second, equal = lines[-3:]
    for line, one in zip((first, second), found["recommendations"], strict=True):
        fastest = "auto" if one["width"] == "auto" else f"width {one['width']}"
        assert line.startswith(f"Batch {one['batch']}: {fastest} is fastest")
    assert equal.startswith("Outputs are equal, token for token")


def test_schedules_are_widths_among_others(bundle: Path, dataset: Path, run: Command, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--dataset", dataset, "--max-new-tokens", MOST, "--batch", "1,2", "--json", out, "--plot", page]
    result = run("bench", bundle, *words, "--widths", "1:0,2:3,auto,1:3,2:0", "--synthetic-acceptance-rate", 1)
    assert (result.status, result.errors) == (0, [])
    found = json.loads(out.read_text())
    assert [case["width"] for case in found["cases"]] == [0, "1:0,2:3", "1:3,2:0", "auto"] * 2
    assert found["outputs"]["equal"]
    assert found["synthetic"]["bases"] == {"1:0,2:3": 1.0, "1:3,2:0": 1.0, "auto": 1.0}
    alone = {case["width"]: case for case in found["cases"] if case["batch"] == 1}
    assert alone["1:0,2:3"]["acceptance"]["drafted_tokens"] == 0
    assert alone["1:3,2:0"]["acceptance"]["accepted_tokens"] > 0
    assert alone["1:3,2:0"]["predicted_speedup"] is None
    shown = [row[1] for row in Page(page.read_text()).tables["cases"] if row]
    assert shown == [str(case["width"]) for case in found["cases"]]
    assert "…" not in result.out


def test_a_few_prompts_of_one_category_can_be_asked_for(
    bundle: Path, dataset: Path, run: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ["--dataset", dataset, "--max-new-tokens", 2, "--batch", 2, "--widths", "auto"]
    result = run("bench", bundle, *words, "--category", "letters", "--num-prompts", 1, "--json", out)
    assert result.status == 0
    found = json.loads(out.read_text())
    assert found["about"]["prompts"] == "questions.jsonl, 1 of letters"
    assert [(case["batch"], case["width"], case["prompts"]) for case in found["cases"]] == [
        (2, 0, 1),
        (2, "auto", 1),
    ]
    assert found["categories"] == []


def test_at_a_synthetic_acceptance_rate_the_answers_are_the_same_and_the_report_says_so(
    bundle: Path, dataset: Path, run: Command, tmp_path: Path
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--dataset", dataset, "--max-new-tokens", 41, "--batch", "2", "--json", out, "--plot", page]
    result = run("bench", bundle, *words, "--synthetic-acceptance-rate", 0.6, "--temperature", 0.7)
    assert (result.status, result.errors) == (0, [])
    said = (
        "Synthetic acceptance rate 0.6 (b = 0.7655 at width 3, b = 0.7655 at width auto): the speeds are of such a "
        "draft, not of this one."
    )
    assert said in result.out.splitlines()
    assert said in page.read_text()
    found = json.loads(out.read_text())
    assert found["outputs"] == {"equal": True, "compared": 6, "differences": []}
    assert found["synthetic"]["rate"] == 0.6
    assert found["synthetic"]["bases"] == {
        "3": pytest.approx(0.7655, abs=5e-5),
        "auto": pytest.approx(0.7655, abs=5e-5),
    }
    plain, fixed, auto = found["cases"]
    assert [case["width"] for case in found["cases"]] == [0, 3, "auto"]
    assert fixed["predicted_speedup"] == pytest.approx((1 + 3 * 0.6) * plain["step_alone_ms"] / fixed["step_alone_ms"])
    assert fixed["tokens_per_step"] == pytest.approx(1 + 3 * 0.6, abs=0.6)
    assert auto["predicted_speedup"] is None
    assert "τ = 1 + b + … + b^W" in page.read_text()


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--batch 1,x", 2, "--batch is '1,x': give whole numbers from 1 with commas, such as 1,2,4"),
        ("--batch 0", 2, "--batch is '0'"),
        ("--widths 1.5", 2, "--widths is '1.5'"),
        ("--widths 1,automatic", 2, "--widths is '1,automatic'"),
        ("--batch 9", 1, "9 requests in a step: the bundle was built for 1 to 2"),
        ("--widths 3,1:3,2:x", 2, "--widths: '1:3,2:x' is not a schedule of widths by batch size"),
        ("--widths 2:3", 2, "--widths: the first range starts at batch size 2"),
        ("--widths 1:3,2:1", 1, "width 1 of the schedule 1:3,2:1 is not in this bundle; it was built for 0, 3"),
        ("--widths 2", 1, "width 2 is not in this bundle; it was built for 0, 3"),
        ("--dataset nowhere.jsonl", 1, "nowhere.jsonl: No such file or directory"),
        ("--category x", 1, "no prompt is of category 'x'; there are chat, code"),
        ("--plot nowhere/out.html", 1, "nowhere/out.html cannot be written: there is no folder nowhere"),
        ("--json .", 1, "error: . cannot be written: it is a folder; name a file in it"),
        ("--synthetic-acceptance-rate 1.5", 2, "--synthetic-acceptance-rate is 1.5: give a share from 0 to 1"),
        ("--synthetic-acceptance-rate nan", 2, "--synthetic-acceptance-rate is nan: give a share from 0 to 1"),
        ("", 1, "none of 80 prompts fits: with an answer of 128 tokens"),
    ],
)
def test_what_cannot_be_run_is_one_line(bundle: Path, run: Command, options: str, status: int, said: str) -> None:
    result = run("bench", bundle, *options.split())
    assert result.status == status
    (line,) = result.errors
    assert said in line
