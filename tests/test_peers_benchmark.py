"""benchmarks/peers: who is asked what and in which order, what becomes of one that dies, and the figures of the table.
No peer is installed: contenders are scripts that speak the protocol."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pairs import Pairs

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"
MODULES = ("processes", "environments", "contenders", "machine", "perplexity", "report", "rounds", "compare")
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
FAKE = """
import sys
sys.path.insert(0, {workers!r})
from protocol import serve

class Fake:
    def __init__(self, args):
        print("noise that a library prints")
        self.about = {{"version": "fake 1"}}
        self.asked = 0

    def generate(self, ids, max_new_tokens, eos, watch):
        self.asked += 1
        with open({order!r}, "a") as order:
            order.write({name!r} + str(ids[0]) + " ")
        if self.asked > {dies_after}:
            raise RuntimeError("out of fake memory")
        watch.add([7])
        watch.add([8, 9, min(eos), 5][:max_new_tokens - 1])
        return {{"steps": 1}}

    def score(self, ids):
        return [-2.0 if {name!r} == "a" else -1.0] * (len(ids) - 1)

serve(Fake)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processor times are read from /proc")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The folder's modules, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in reversed(MODULES)})
    for name in MODULES:
        sys.modules.pop(name, None)


class Fakes:
    """Scripts, and what starts them."""

    def __init__(self, folder: Path, processes: ModuleType) -> None:
        self._folder, self._processes = folder, processes
        self.order = folder / "order"

    def script(self, name: str, *, dies_after: int = 1000, source: str = FAKE) -> Path:
        path = self._folder / f"{name}.py"
        settings = {
            "name": name,
            "dies_after": dies_after,
            "order": str(self.order),
            "workers": str(FOLDER / "workers"),
        }
        path.write_text(source.format(**settings))
        return path

    def start(self, name: str, *, timeout: float = 30.0, **options: Any) -> Callable[[], Any]:
        command = [sys.executable, str(self.script(name, **options))]
        arguments = ["--model", "m", "--threads", "1", "--max-length", "99"]
        log = self._folder / f"{name}.log"
        return partial(self._processes.Worker, [*command, *arguments], log, threads=1, timeout=timeout)


@pytest.fixture
def fakes(tmp_path: Path, peers: SimpleNamespace) -> Fakes:
    return Fakes(tmp_path, peers.processes)


def plan(peers: SimpleNamespace, **changes: Any) -> Any:
    asked = [peers.rounds.Asked("chat-1", "chat", (1, 2)), peers.rounds.Asked("code-1", "code", (3,))]
    known = {"asked": asked, "rounds": 2, "max_new_tokens": 40, "eos": [2, 4], "cores": CORES, "pause": 0.0}
    return peers.rounds.Plan(**known | changes)


def test_everyone_answers_in_turn_and_none_is_always_first(peers: SimpleNamespace, fakes: Fakes) -> None:
    measured = peers.rounds.measure({"a": fakes.start("a"), "b": fakes.start("b")}, plan(peers))
    # The warm-up, then prompt by prompt; the second round begins with the other one.
    assert fakes.order.read_text().split() == ["a1", "b1", "a1", "b1", "b3", "a3", "b1", "a1", "a3", "b3"]
    for result in measured.results.values():
        assert result.about == {"version": "fake 1"}
        assert result.failure == ""
        assert [(each.prompt, each.round) for each in result.samples] == [
            ("chat-1", 0),
            ("code-1", 0),
            ("chat-1", 1),
            ("code-1", 1),
        ]
        for sample in result.samples:
            assert sample.tokens == (7, 8, 9, 2)  # what came behind an EOS does not count
            assert sample.first_tokens == 1
            assert 0 <= sample.first_seconds <= sample.seconds
            assert sample.more == {"steps": 1}
        assert result.waited > 0
        assert result.idle_share < 0.5


def test_who_dies_is_out_with_the_reason_and_the_others_go_on(
    peers: SimpleNamespace, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.processes, "_SECONDS_TO_END", 0.1)
    starts = {
        "a": fakes.start("a"),
        "late": fakes.start("late", dies_after=2),
        "early": fakes.start("early", source="raise SystemExit('no model error here')"),
        "silent": fakes.start("silent", source="import time; time.sleep(60)", timeout=0.5),
    }
    results = peers.rounds.measure(starts, plan(peers)).results
    assert len(results["a"].samples) == 4
    assert len(results["late"].samples) == 1
    assert results["late"].failure == "it ended with exit status 1: RuntimeError: out of fake memory"
    assert results["early"].failure == "it ended with exit status 1: no model error here"
    assert results["silent"].failure == "no answer in 0.5 s"


def sample(peers: SimpleNamespace, seconds: float, **changes: Any) -> Any:
    """11 tokens, of which the first came after a tenth of a second; 5 steps for the others."""
    known = {"prompt": "chat-1", "category": "chat", "round": 0, "tokens": tuple(range(11)), "first_seconds": 0.1}
    more = {"steps": 5, "device_seconds": 0.05}
    return peers.rounds.Sample(**known | {"seconds": seconds, "first_tokens": 1, "more": more} | changes)


def entrant(peers: SimpleNamespace, name: str, samples: list[Any], **changes: Any) -> Any:
    known: dict[str, Any] = {"ours": False, "speculates": False, "perplexity": {"prose": 10.0, "answers": 5.0}}
    return peers.report.Entrant(name=name, result=peers.rounds.Result(samples=samples), **known | changes)


def test_figures_are_medians_of_rounds(peers: SimpleNamespace) -> None:
    samples = [sample(peers, seconds, round=number) for number, seconds in enumerate((0.2, 0.6, 0.3))]
    row = peers.report.row(entrant(peers, "a", samples))
    # 10 tokens after the first in 0.1, 0.5 and 0.2 seconds.
    assert (row.decode.median, row.decode.least, row.decode.most) == pytest.approx((50, 20, 100))
    assert row.whole.median == pytest.approx(11 / 0.3)
    assert row.token_ms == pytest.approx(20)
    assert row.first_ms == pytest.approx(100)
    assert row.tokens == 11
    assert row.per_step == pytest.approx(2)
    assert row.step_ms == pytest.approx(0.8 / 15 * 1e3)
    assert row.device_ms == pytest.approx(10)


def test_a_round_is_its_tokens_by_its_seconds_and_categories_stand_alone(peers: SimpleNamespace) -> None:
    samples = [sample(peers, 0.2), sample(peers, 1.1, prompt="code-1", category="code", more={})]
    one = entrant(peers, "a", samples)
    assert peers.report.row(one).decode.median == pytest.approx(20 / 1.1)
    assert peers.report.row(one).per_step is None
    assert peers.report.row(one, "chat").decode.median == pytest.approx(100)
    assert peers.report.row(one, "maths") is None
    lines = peers.report.by_category([one]).splitlines()
    assert lines[0] == "| decode tok/s | chat | code | all |"
    assert lines[2] == "| a | 100.0 | 10.0 | 18.2 |"


def test_the_table_has_the_fastest_first_and_none_that_failed(peers: SimpleNamespace) -> None:
    failed = entrant(peers, "failed", [sample(peers, 0.2)])
    failed.result.failure = "it died"
    slow, fast = entrant(peers, "slow", [sample(peers, 0.6)]), entrant(peers, "fast", [sample(peers, 0.2)], ours=True)
    lines = peers.report.table([slow, failed, fast]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "**fast**",
        "100.0 (100.0-100.0)",
        "55.0 (55.0-55.0)",
        "10.0",
        "2.00",
        "20.0",
        "100",
        "11",
        "10.00",
        "5.00",
    ]
    assert [row[0] for row in cells] == ["**fast**", "slow"]
    assert peers.report.notes([slow, failed, fast], 0.0) == ["failed has no figures: it died"]


def test_goals_say_what_is_missing(peers: SimpleNamespace) -> None:
    # 50 a second, 20 ms. Worse on one kind of text, better on the other: as precise.
    peer = entrant(peers, "peer", [sample(peers, 0.3)], perplexity={"prose": 10.3, "answers": 4.9})
    coarse = entrant(peers, "coarse", [sample(peers, 0.2)], perplexity={"prose": 10.5, "answers": 5.0})  # 100 a second
    ours = entrant(peers, "ours", [sample(peers, 0.2)], ours=True)
    drafting = entrant(peers, "drafting", [sample(peers, 0.15)], ours=True, speculates=True)  # 200 a second
    assert peers.report.goals([peer, coarse, ours, drafting]) == [
        "on chat: drafting is 2.00 times coarse; the goal of 2 is met",
        "on chat, speculation off: ours is 1.00 times coarse; the goal is 1.3. 10.0 ms a token, 7.7 needed: 2.3 too "
        "many; a step is 20.0 ms and gives 2.00 tokens, of which 10.0 ms are the graph and 10.0 ms Python",
        "on chat, among peers no less precise: drafting is 4.00 times peer; the goal of 2 is met",
    ]
    assert peers.report.goals([peer]) == []


def test_what_makes_figures_worthless_is_said(peers: SimpleNamespace) -> None:
    restless = entrant(peers, "restless", [sample(peers, 0.2)])
    restless.result.waited, restless.result.waited_cpu = 10.0, 5.0
    fickle = entrant(peers, "fickle", [sample(peers, 0.2), sample(peers, 0.2, round=1, tokens=(1, 2))])
    assert peers.report.notes([restless, fickle], 0.3) == [
        "restless used 50% of a core while others worked: their figures suffered",
        "fickle did not give the same tokens in every round",
        "other work had 30% of the cores: these figures are not results",
    ]


def test_log_probabilities_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / "workers"))
    protocol = importlib.import_module("protocol")
    monkeypatch.delitem(sys.modules, "protocol")
    logits = [[0.0, math.log(3)], [math.log(4), 0.0], [5.0, 5.0]]
    assert protocol.logprobs_of(logits, [0, 1, 0]) == pytest.approx([math.log(3 / 4), math.log(4 / 5)])


def test_a_command_that_fails_is_told_by_its_own_words(peers: SimpleNamespace, tmp_path: Path) -> None:
    fails = "import sys; print('ERROR: no wheel for this machine'); print('bye'); sys.exit(3)"
    with pytest.raises(peers.environments.UnavailableError, match=r"^ERROR: no wheel for this machine \(exit "):
        peers.environments._run([sys.executable, "-c", fails], tmp_path / "log")


def test_a_model_is_converted_once(peers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_text("weights")
    copy = "import os, shutil, sys; os.mkdir(sys.argv[2]); shutil.copy(sys.argv[1], sys.argv[2] + '/m')"
    command = ("-c", copy, "{source}", "{out}")
    conversion = peers.environments.Conversion(environment="any", source="gguf", command=command)
    monkeypatch.setitem(peers.environments.MODELS, "copied", conversion)
    monkeypatch.setattr(peers.environments, "python_of", lambda *_: Path(sys.executable))
    for content in ("weights", "others"):
        gguf.write_text(content)
        out = peers.environments.model_of("copied", tmp_path, gguf)
        assert (out / "m").read_text() == content
        (out / "mark").touch()
        assert peers.environments.model_of("copied", tmp_path, gguf) == out
        assert (out / "mark").exists()


def test_a_bundle_beside_a_peer_from_prompts_to_report(
    peers: SimpleNamespace, fakes: Fakes, pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "UnifiedNgramLlama3ForCausalLM"
    bundle, loaded = pairs.bundle(name), pairs.loaded(name)

    def python_of(environment: str, _cache: Path) -> Path:
        if environment == "broken":
            raise peers.environments.UnavailableError("no wheel")
        return Path(sys.executable)

    def contender(each: str, environment: str) -> Any:
        known = {"environment": environment, "model": "gguf", "speculates": False}
        return peers.contenders.Contender(name=each, worker=str(fakes.script(each)), **known)

    monkeypatch.setattr(peers.contenders, "python_of", python_of)
    monkeypatch.setattr(peers.compare, "peers", lambda: [contender("a", "fake"), contender("gone", "broken")])
    prompts = [peers.rounds.Asked(f"chat-{n}", "chat", (n, 5, 6)) for n in (1, 2)]
    monkeypatch.setattr(peers.compare, "prompts", lambda *_: prompts)
    scored = [peers.perplexity.Text("prose", (3, 4, 5, 6), 1), peers.perplexity.Text("answers", (9, 8, 7), 2)]
    monkeypatch.setattr(peers.compare, "texts", lambda _: scored)
    arguments = ["--gguf", str(pairs.pair(name).target), "--cache", str(tmp_path), "--bundle", f"tiny={bundle}"]
    arguments += ["--widths", "0,2", "--max-new-tokens", "12", "--rounds", "1", "--pause", "0"]
    arguments += ["--cores", ",".join(map(str, CORES)), "--json", str(tmp_path / "o.json")]
    assert peers.compare.main([*arguments, "--markdown", str(tmp_path / "o.md")]) == 0

    found = json.loads((tmp_path / "o.json").read_text())
    assert set(found["contenders"]) == {"a", "tiny, width 0", "tiny, width 2"}
    assert "gone is missing: no wheel" in found["remarks"]
    params = importlib.import_module("graphspec.runtime.sampling").SamplingParams
    for width in (0, 2):
        ours = found["contenders"][f"tiny, width {width}"]
        for asked, answer in zip(prompts, ours["result"]["samples"], strict=True):
            (expected,) = loaded.generate([asked.ids], params(max_new_tokens=12), width=0)
            assert answer["tokens"] == list(expected.token_ids)
            assert answer["text"] == expected.text
            assert 0 < answer["more"]["device_seconds"] <= answer["more"]["steps_seconds"]
        (read,) = loaded.generate([scored[1].ids], params(max_new_tokens=1, prompt_logprobs=0))
        assert read.prompt_logprobs is not None
        assert read.prompt_logprobs[2] is not None
        assert ours["perplexity"]["answers"] == pytest.approx(math.exp(-read.prompt_logprobs[2].logprob))
    assert found["contenders"]["a"]["perplexity"] == pytest.approx({"prose": math.e**2, "answers": math.e**2})
    report = (tmp_path / "o.md").read_text()
    assert "| **tiny, width 2** |" in report
    assert "- gone is missing: no wheel" in report
