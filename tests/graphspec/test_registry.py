"""Where declarations come from, and what happens when they are wrong."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from graphspec import registry
from graphspec.architecture import Architecture, DrafterKind, TargetKind
from graphspec.architectures.drafters.declarations import EAGLE3, NGRAM, STANDALONE, declare
from graphspec.errors import ConfigError, ResolutionError
from graphspec.registry import find, registered

OURS = {
    "UnifiedEagleLlama3ForCausalLM": ("eagle",),
    "UnifiedEagle3Llama3ForCausalLM": ("eagle3", "eagle"),
    "UnifiedStandaloneLlama3ForCausalLM": ("standalone",),
    "UnifiedNgramLlama3ForCausalLM": ("ngram",),
    "UnifiedEagleQwen3ForCausalLM": ("eagle",),
    "UnifiedEagle3Qwen3ForCausalLM": ("eagle3", "eagle"),
    "UnifiedStandaloneQwen3ForCausalLM": ("standalone",),
    "UnifiedNgramQwen3ForCausalLM": ("ngram",),
}
DECLARATION = """
from graphspec.architecture import TargetKind
from graphspec.architectures.drafters.declarations import EAGLE3, declare

TARGET = TargetKind(name="mine", label="{label}", matches=lambda facts: False, load=lambda *a, **k: None)
ARCHITECTURES = declare(TARGET, EAGLE3)
"""


def entry_point(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint(name="mine", value=value, group=registry.ENTRY_POINT_GROUP)

    def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
        return (entry,) if group == "graphspec.architectures" else ()

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_every_target_has_its_architectures() -> None:
    found = {architecture.name: architecture.methods for architecture in registered()}
    assert {name: found[name] for name in OURS} == OURS


def test_the_registry_imports_no_torch() -> None:
    program = (
        "import sys; from graphspec.registry import registered; registered(); import graphspec.resolution; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'onnx', 'transformers')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_declared_target_gets_ngram_and_standalone_without_a_line_of_its_own() -> None:
    target = TargetKind(name="mine", label="Mine", matches=lambda _: True, load=lambda *_: None)
    assert [a.name for a in declare(target)] == [
        "UnifiedStandaloneMineForCausalLM",
        "UnifiedNgramMineForCausalLM",
    ]
    drafters: list[DrafterKind] = [a.drafter for a in declare(target, EAGLE3)]
    assert drafters == [EAGLE3, STANDALONE, NGRAM]


def test_a_named_module_adds_its_architectures(folder: Path) -> None:
    (folder / "my_arch.py").write_text(DECLARATION.format(label="Mine"))
    names = {a.name for a in registered(["my_arch"])}
    assert names >= {"UnifiedEagle3MineForCausalLM", "UnifiedNgramMineForCausalLM", *OURS}


@pytest.mark.parametrize("value", ["my_plugin", "my_plugin:ARCHITECTURES"])
def test_an_installed_package_adds_its_architectures(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    (folder / "my_plugin.py").write_text(DECLARATION.format(label="Plugin"))
    entry_point(monkeypatch, value)
    assert "UnifiedEagle3PluginForCausalLM" in {a.name for a in registered()}


def test_one_declaration_found_twice_counts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_plugin.py").write_text(DECLARATION.format(label="Plugin"))
    entry_point(monkeypatch, "my_plugin:ARCHITECTURES")
    names = [a.name for a in registered(["my_plugin", "my_plugin"])]
    assert names.count("UnifiedEagle3PluginForCausalLM") == 1


def test_two_declarations_of_one_name_are_refused_with_both_places(folder: Path) -> None:
    (folder / "my_arch.py").write_text(DECLARATION.format(label="Llama3"))
    with pytest.raises(ConfigError, match=r"UnifiedEagle3Llama3ForCausalLM is declared twice") as caught:
        registered(["my_arch"])
    assert "graphspec.architectures.llama3.arch" in str(caught.value)
    assert "my_arch" in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module", "json.no_such_module", "no_such.inside", "", "."])
def test_a_module_that_does_not_exist_is_the_users_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--arch-module .*: there is no module of that name"):
        registered([name])


def test_an_import_error_inside_a_declaration_stays_itself_and_names_the_module(folder: Path) -> None:
    (folder / "my_arch.py").write_text("import a_library_that_is_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_installed") as caught:
        registered(["my_arch"])
    assert caught.value.__notes__ == ["while importing the architecture declarations of my_arch"]


def test_an_error_in_the_package_around_a_declaration_stays_itself(folder: Path) -> None:
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("import a_library_that_is_not_installed\n")
    (folder / "my_package" / "arch.py").write_text("ARCHITECTURES = ()\n")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_installed"):
        registered(["my_package.arch"])


def test_an_error_inside_an_installed_package_stays_itself_and_names_the_entry_point(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_plugin.py").write_text("1 / 0\n")
    entry_point(monkeypatch, "my_plugin:ARCHITECTURES")
    with pytest.raises(ZeroDivisionError) as caught:
        registered()
    assert caught.value.__notes__ == ["while loading the architectures of entry point mine (my_plugin:ARCHITECTURES)"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("ARCHITECTURE = ()", "it has no ARCHITECTURES"),
        ("ARCHITECTURES = ('UnifiedMine',)", "declares a str"),
        ("ARCHITECTURES = 3", "declares a int"),
    ],
)
def test_a_module_that_declares_something_else_is_refused(folder: Path, body: str, says: str) -> None:
    (folder / "my_arch.py").write_text(body)
    with pytest.raises(ConfigError, match=says):
        registered(["my_arch"])


def test_a_capability_that_the_step_does_not_have_cannot_be_claimed(folder: Path) -> None:
    """Its flag would be accepted and then ignored."""
    body = DECLARATION.format(label="Mine").replace("EAGLE3)", "EAGLE3, capabilities=frozenset({claimed}))")
    (folder / "my_arch.py").write_text(body.replace("{claimed}", "{'penalties', 'greedy_acceptance', 'tree'}"))
    with pytest.raises(ConfigError, match=r"^my_arch declares UnifiedEagle3MineFor\w+ with penalties, tree, which"):
        registered(["my_arch"])
    (folder / "less.py").write_text(body.replace("{claimed}", ""))
    assert not next(a for a in registered(["less"]) if "Mine" in a.name).capabilities


def test_an_architecture_is_found_by_its_name() -> None:
    for name in OURS:
        assert find(name, registered()).name == name


def test_a_name_with_a_typo_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ResolutionError, match=r"did you mean UnifiedEagleLlama3ForCausalLM\?"):
        find("UnifiedEagleLama3ForCausalLM", registered())


def test_a_name_like_none_is_answered_with_all_of_them() -> None:
    with pytest.raises(ResolutionError) as caught:
        find("x", registered())
    assert all(name in str(caught.value) for name in OURS)


def test_a_name_may_differ_from_the_parts_it_is_made_of() -> None:
    one = registered()[0]
    assert Architecture(target=one.target, drafter=one.drafter, name="MyOwnName").name == "MyOwnName"
