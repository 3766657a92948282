"""What the registry holds: kinds of targets, kinds of drafters, and the named architectures of both.

Declarations are data plus lazy functions: importing them imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from graphspec.checkpoints import Checkpoint, TensorInfo

if TYPE_CHECKING:
    from graphspec.speculative_config import SpeculativeConfig

Capability = Literal[
    "sampled_proposal",
    "relaxed_thinking",
    "greedy_acceptance",
    "grammar",
    "penalties",
    "logprobs",
    "zero_draft_rows",
    "mixed_batches",
    "tree",
    "width_schedule",
    "adaptive_widths",
    "synthetic_acceptance",
    "replica_draft_head",
    "replica_draft_probs",
]

STEP_CAPABILITIES: frozenset[Capability] = frozenset({"greedy_acceptance", "logprobs"})
"""What the fused step (graphspec.architectures.step) does for every pair; nothing else can be promised yet. A backend
may leave some out (graphspec.backends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What detection may look at: a checkpoint's raw config.json and its tensor names and shapes."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetKind:
    """A target model family."""

    name: str
    """For example "llama3"."""
    label: str
    """Its part of the registered name: "Llama3" in UnifiedEagleLlama3ForCausalLM."""
    matches: Callable[[Facts], bool]
    """Whether a checkpoint is a target of this kind."""
    load: Callable[..., Any]
    """`load(checkpoint, capacity=…) -> target module` with weights; imports torch when called."""


def _any_number(_draft: Facts) -> None:
    return None


def _none(_target: Facts, _draft: Facts) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """A way of proposing drafts."""

    name: str
    """For example "eagle3"."""
    label: str
    """Its part of the registered name: "Eagle3" in UnifiedEagle3Llama3ForCausalLM."""
    methods: tuple[str, ...]
    """Values of --speculative-method it answers to."""
    draft_checkpoint: bool
    """Whether it needs --draft-model-path."""
    matches: Callable[[Facts, Facts], bool]
    """`matches(target, draft)`: whether a draft checkpoint is of this kind. Not called without a draft."""
    default_num_speculative_tokens: int | None
    """K when neither the user nor the draft checkpoint names one; None: the draft decides."""
    load: Callable[..., Any]
    """`load(target_module, draft_checkpoint | None, num_draft_tokens, config) -> drafter module`; one whose
    `draft_is_target` takes a fifth argument, the draft's TargetKind."""
    trained_num_speculative_tokens: Callable[[Facts], int | None] = _any_number
    """`trained_num_speculative_tokens(draft)`: the only K that this draft can propose; None: any. A block's tokens
    see each other, so a shorter block is another one."""
    most_num_speculative_tokens: Callable[[Facts], int | None] = _any_number
    """`most_num_speculative_tokens(draft)`: the most that this draft can propose, and what it does propose when nobody
    names a K; None: any."""
    misfits: Callable[[Facts, Facts], Sequence[str]] = _none
    """`misfits(target, draft)`: why a draft of this kind does not belong to the target, a sentence each."""
    draft_is_target: bool = False
    """Whether the draft is a language model of a registered target family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A named pair of a target kind and a drafter kind."""

    target: TargetKind
    drafter: DrafterKind
    capabilities: frozenset[Capability] = frozenset()
    name: str = ""
    """`Unified<Drafter><Target>ForCausalLM` unless given."""

    def __post_init__(self) -> None:
        if not self.name:
            name = f"Unified{self.drafter.label}{self.target.label}ForCausalLM"
            object.__setattr__(self, "name", name)

    @property
    def methods(self) -> tuple[str, ...]:
        """Values of --speculative-method this architecture answers to."""
        return self.drafter.methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a target and a draft resolved to."""

    architecture: Architecture
    target: Checkpoint
    draft: Checkpoint | None
    draft_kind: TargetKind | None = None
    """The draft's own family, among the architectures the pair was resolved in; of a `draft_is_target` drafter."""

    def load_drafter(self, target: Any, config: SpeculativeConfig) -> Any:
        """The drafter module for a loaded target; `config` names K. Imports torch."""
        kinds = (self.draft_kind,) if self.architecture.drafter.draft_is_target else ()
        return self.architecture.drafter.load(target, self.draft, config.draft_width, config, *kinds)
