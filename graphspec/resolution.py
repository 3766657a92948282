"""From a target and a draft checkpoint to one named architecture, or an error that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphspec.architecture import Architecture, Facts, Resolution
from graphspec.checkpoints import Checkpoint, fields
from graphspec.detection import (
    DRAFT_LABELS,
    TARGET_FAMILIES,
    classify_draft,
    classify_target,
    describe,
    has_mtp,
    looks_like_draft,
    mapping,
)
from graphspec.errors import ConfigError, ResolutionError
from graphspec.registry import find, target_kind
from graphspec.speculative_config import SpeculativeConfig
from graphspec.vocabularies import vocabulary_misfits


def resolve(
    target: Checkpoint,
    draft: Checkpoint | None,
    method: str | None,
    arch: str | None,
    architectures: Sequence[Architecture],
) -> Resolution:
    """The one architecture of `architectures` that serves the pair.

    The draft decides, within what `method` (--speculative-method) and `arch` (--arch) allow; without a draft
    and a method, the target's own MTP layers or else prompt lookup. Raises ResolutionError, never falls back.
    """
    asked = _Asked(target=target, draft=draft, method=method, arch=arch)
    considered = (find(arch, architectures),) if arch else tuple(architectures)
    fitting = [architecture for architecture in considered if _serves(architecture, asked)]
    if len(fitting) != 1:
        raise ResolutionError(_no_single_match(asked, considered, fitting, architectures))
    (architecture,) = fitting
    _check_pair(architecture, asked)
    is_model = architecture.drafter.draft_is_target
    kind = target_kind(draft, architectures) if is_model and draft is not None else None
    return Resolution(architecture=architecture, target=target, draft=draft, draft_kind=kind)


def trained_num_draft_tokens(resolution: Resolution) -> int | None:
    """The only K that the draft can propose; None: any."""
    facts = _draft_facts(resolution.draft)
    return None if facts is None else resolution.architecture.drafter.trained_num_speculative_tokens(facts)


def most_num_draft_tokens(resolution: Resolution) -> int | None:
    """The largest K that the draft can propose; None: any."""
    facts = _draft_facts(resolution.draft)
    return None if facts is None else resolution.architecture.drafter.most_num_speculative_tokens(facts)


def _draft_facts(draft: Checkpoint | None) -> Facts | None:
    return None if draft is None else Facts(config=draft.config, tensors=draft.tensors)


def default_num_draft_tokens(resolution: Resolution) -> int | None:
    """K when the user names none: the only one there is, the most there is, what a speculators draft proposes, else
    the drafter's default."""
    if (number := trained_num_draft_tokens(resolution) or most_num_draft_tokens(resolution)) is not None:
        return number
    draft = resolution.draft
    speculators = mapping(draft.config.get("speculators_config")) if draft else {}
    methods = speculators.get("proposal_methods")
    for proposal in methods if isinstance(methods, list) else ():
        said = mapping(proposal)
        if said.get("speculative_tokens") != 0 and (count := fields.size_or(said, "speculative_tokens", None)):
            return count
    return resolution.architecture.drafter.default_num_speculative_tokens


def complete_config(config: SpeculativeConfig, resolution: Resolution) -> SpeculativeConfig:
    """The config with its method and K filled in from what the pair resolved to. Raises ConfigError."""
    values = config.model_dump()
    if config.speculative_method is None:
        values["speculative_method"] = resolution.architecture.methods[0]
    if not config.names_draft_width:
        values["num_speculative_tokens"] = default_num_draft_tokens(resolution)
    trained, chosen = trained_num_draft_tokens(resolution), values["num_speculative_tokens"]
    if trained is not None and chosen != trained:
        assert resolution.draft is not None
        raise ConfigError(
            f"num_speculative_tokens {chosen}: draft '{resolution.draft.name}' was trained to propose {trained} tokens "
            f"at once, and a shorter or longer block is another draft; drop it, and name fewer --widths to verify fewer"
        )
    most = most_num_draft_tokens(resolution)
    if most is not None and chosen > most:
        assert resolution.draft is not None
        raise ConfigError(
            f"num_speculative_tokens {chosen}: draft '{resolution.draft.name}' can propose {most} at most; name no "
            "more, or drop it"
        )
    return SpeculativeConfig.parse(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the user gave."""

    target: Checkpoint
    draft: Checkpoint | None
    method: str | None
    arch: str | None

    @property
    def target_facts(self) -> Facts:
        return Facts(config=self.target.config, tensors=self.target.tensors)

    @property
    def draft_facts(self) -> Facts | None:
        return _draft_facts(self.draft)

    @property
    def draft_kind(self) -> str | None:
        """What detection calls the draft, or how the target proposes without one."""
        if self.draft_facts is None:
            return "mtp" if has_mtp(self.target_facts) else "ngram"
        return classify_draft(self.target_facts, self.draft_facts)

    def __str__(self) -> str:
        family = classify_target(self.target_facts)
        label = f": recognised as {TARGET_FAMILIES[family].label}" if family else ""
        return f"target '{self.target.name}' ({describe(self.target_facts)}{label}) {self._said_of_draft()}" + (
            f" and --speculative-method {self.method}" if self.method else ""
        )

    def _said_of_draft(self) -> str:
        if self.draft is None or self.draft_facts is None:
            return "without a draft"
        label = DRAFT_LABELS.get(self.draft_kind or "")
        seen = f"recognised as {label}" if label else "not recognised as any kind of draft"
        return f"with draft '{self.draft.name}' ({describe(self.draft_facts)}: {seen})"


def _serves(architecture: Architecture, asked: _Asked) -> bool:
    drafter = architecture.drafter
    if not architecture.target.matches(asked.target_facts):
        return False
    if asked.method is not None and asked.method not in architecture.methods:
        return False
    if asked.draft_facts is None:
        return not drafter.draft_checkpoint and (asked.method is not None or drafter.name == asked.draft_kind)
    return drafter.draft_checkpoint and drafter.matches(asked.target_facts, asked.draft_facts)


def _check_pair(architecture: Architecture, asked: _Asked) -> None:
    if asked.draft is None or asked.draft_facts is None:
        return
    problems = [*architecture.drafter.misfits(asked.target_facts, asked.draft_facts)]
    if architecture.drafter.draft_is_target:
        problems += vocabulary_misfits(asked.target, asked.draft)
    if problems:
        raise ResolutionError(
            f"draft '{asked.draft.name}' does not belong to target '{asked.target.name}' "
            f"as {architecture.name}: {'; '.join(problems)}"
        )


def _no_single_match(
    asked: _Asked,
    considered: Sequence[Architecture],
    fitting: Sequence[Architecture],
    architectures: Sequence[Architecture],
) -> str:
    if fitting:
        names = ", ".join(a.name for a in fitting)
        return f"{asked} fits {len(fitting)} architectures: {names}; choose one with --arch"
    same_target = [a for a in architectures if a.target.matches(asked.target_facts)]
    if not same_target:
        targets = ", ".join(sorted({a.target.name for a in architectures})) or "none"
        is_draft = looks_like_draft(asked.target_facts)
        hint = "; it looks like a draft: give it as --draft-model-path" if is_draft else ""
        return f"no registered architecture serves {asked}; registered targets: {targets}{hint}"
    candidates = "; ".join(f"{a.name} ({_answers_to(a)})" for a in same_target)
    subject = f"{asked.arch} does not serve" if asked.arch else "no registered architecture serves"
    hint = _hint(asked, considered if asked.arch else same_target)
    return f"{subject} {asked}{hint}; registered for this target: {candidates}"


def _hint(asked: _Asked, candidates: Sequence[Architecture]) -> str:
    """What to change, where one change is the likely one."""
    if asked.draft is None and asked.method is None and asked.draft_kind == "mtp":
        return "; it has MTP layers that none of them runs: name another --speculative-method"
    possible = [
        a
        for a in candidates
        if a.target.matches(asked.target_facts) and (asked.method is None or asked.method in a.methods)
    ]
    if possible and asked.draft is None and all(a.drafter.draft_checkpoint for a in possible):
        return "; give the draft with --draft-model-path"
    if possible and asked.draft is not None and not any(a.drafter.draft_checkpoint for a in possible):
        return "; it uses no draft checkpoint: drop --draft-model-path"
    return ""


def _answers_to(architecture: Architecture) -> str:
    needs = "with a draft" if architecture.drafter.draft_checkpoint else "without a draft"
    return f"{'/'.join(architecture.methods)}, {needs}"
