"""Which architecture a pair resolves to, and what an impossible pair is told."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from graphspec.architecture import Architecture, DrafterKind, TargetKind
from graphspec.architectures.drafters.declarations import EAGLE3, NGRAM, declare
from graphspec.architectures.llama3.arch import TARGET as LLAMA3
from graphspec.checkpoints import Checkpoint, TensorInfo
from graphspec.errors import ConfigError, ResolutionError
from graphspec.registry import registered, target_kind
from graphspec.resolution import complete_config, default_num_draft_tokens, resolve
from graphspec.speculative_config import SpeculativeConfig

ARCHITECTURES = registered()


@dataclass(frozen=True)
class FakeCheckpoint:
    """A checkpoint of which only the header exists."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    files: tuple[Path, ...] = field(default=())

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape=shape, dtype="F32") for name, shape in self.shapes.items()}

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        raise AssertionError(f"resolution reads no weights, and it asked for {list(names)}")

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return {}

    def but(self, *, without: Iterable[str] = (), shapes: Any = (), **config: Any) -> "FakeCheckpoint":
        """The same with some config keys or tensors changed."""
        kept = {name: shape for name, shape in self.shapes.items() if name not in set(without)}
        return replace(self, config={**self.config, **config}, shapes={**kept, **dict(shapes)})


def model(name: str, architecture: str, model_type: str, layers: int = 8) -> FakeCheckpoint:
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 64,
        "vocab_size": 128,
        "num_hidden_layers": layers,
    }
    shapes = {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
    return FakeCheckpoint(name, config, shapes)


TAPS = "eagle_aux_hidden_state_layer_ids"
LLAMA = model("llama", "LlamaForCausalLM", "llama")
QWEN = model("qwen", "Qwen3ForCausalLM", "qwen3")
SMALL_LLAMA = model("small", "LlamaForCausalLM", "llama", layers=2)
EAGLE = FakeCheckpoint(
    "head",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 128,
        "num_hidden_layers": 1,
    },
    {"fc.weight": (64, 128), "layers.0.self_attn.q_proj.weight": (64, 64)},
)
EAGLE_3 = FakeCheckpoint(
    "head3",
    {**EAGLE.config, "draft_vocab_size": 32},
    {
        "fc.weight": (64, 192),
        "midlayer.hidden_norm.weight": (64,),
        "norm.weight": (64,),
        "lm_head.weight": (32, 64),
        "d2t": (32,),
        "t2d": (128,),
    },
)
SPECULATORS = FakeCheckpoint(
    "speculator",
    {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {"model_type": "llama", "hidden_size": 64, "vocab_size": 128},
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"]},
        },
    },
    {
        "embed_tokens.weight": (128, 64),
        "fc.weight": (64, 192),
        "layers.0.hidden_norm.weight": (64,),
        "lm_head.weight": (32, 64),
        "d2t": (32,),
    },
)
WHOLE_VOCABULARY = EAGLE_3.but(without=("d2t", "t2d"), shapes={"lm_head.weight": (128, 64)}, draft_vocab_size=None)


def resolved(
    target: Checkpoint,
    draft: Checkpoint | None = None,
    method: str | None = None,
    arch: str | None = None,
    architectures: tuple[Architecture, ...] = ARCHITECTURES,
) -> str:
    return resolve(target, draft, method, arch, architectures).architecture.name


def refusal(
    target: Checkpoint,
    draft: Checkpoint | None = None,
    method: str | None = None,
    arch: str | None = None,
    architectures: tuple[Architecture, ...] = ARCHITECTURES,
) -> str:
    with pytest.raises(ResolutionError) as caught:
        resolve(target, draft, method, arch, architectures)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("target", "label"), [(LLAMA, "Llama3"), (QWEN, "Qwen3")])
@pytest.mark.parametrize(
    ("draft", "method", "drafter"),
    [
        (None, None, "Ngram"),
        (None, "ngram", "Ngram"),
        (EAGLE, None, "Eagle"),
        (EAGLE, "eagle", "Eagle"),
        (EAGLE_3, None, "Eagle3"),
        (EAGLE_3, "eagle", "Eagle3"),
        (EAGLE_3, "eagle3", "Eagle3"),
        (WHOLE_VOCABULARY, None, "Eagle3"),
        (SMALL_LLAMA, None, "Standalone"),
        (SMALL_LLAMA, "standalone", "Standalone"),
    ],
)
def test_the_pair_decides(
    target: FakeCheckpoint, label: str, draft: FakeCheckpoint | None, method: str | None, drafter: str
) -> None:
    name = f"Unified{drafter}{label}ForCausalLM"
    assert resolved(target, draft, method) == name
    assert resolved(target, draft, method, arch=name) == name


def test_a_resolution_holds_the_checkpoints() -> None:
    resolution = resolve(LLAMA, EAGLE, None, None, ARCHITECTURES)
    assert resolution.target is LLAMA
    assert resolution.draft is EAGLE


def test_a_speculators_draft_resolves_for_the_target_it_was_trained_for() -> None:
    assert resolved(LLAMA, SPECULATORS) == "UnifiedEagle3Llama3ForCausalLM"
    message = refusal(QWEN, SPECULATORS)
    assert "it was trained for a LlamaForCausalLM and the target is a Qwen3ForCausalLM" in message


@pytest.mark.parametrize("path", ["eagle3", "my-eagle-head", "dflash", "medusa/eagle3-dspark"])
def test_a_path_decides_nothing(path: str) -> None:
    assert resolved(LLAMA, replace(SMALL_LLAMA, name=path)) == "UnifiedStandaloneLlama3ForCausalLM"
    assert resolved(LLAMA, replace(EAGLE, name=path)) == "UnifiedEagleLlama3ForCausalLM"
    assert resolved(replace(LLAMA, name=path)) == "UnifiedNgramLlama3ForCausalLM"


def test_eagle3_insists_on_the_third_generation() -> None:
    message = refusal(LLAMA, EAGLE, "eagle3")
    assert "recognised as an EAGLE-1/2 head" in message
    assert "--speculative-method eagle3" in message
    assert "UnifiedEagle3Llama3ForCausalLM (eagle3/eagle, with a draft)" in message


def test_a_method_that_needs_a_draft_says_so() -> None:
    message = refusal(LLAMA, None, "eagle")
    assert "'llama'" in message
    assert "without a draft and --speculative-method eagle" in message
    assert "give the draft with --draft-model-path" in message


def test_prompt_lookup_refuses_a_draft_checkpoint() -> None:
    assert "drop --draft-model-path" in refusal(LLAMA, EAGLE, "ngram")


@pytest.mark.parametrize("method", ["mtp", "dflash", "egle"])
def test_a_method_the_target_has_no_architecture_for_lists_those_it_has(method: str) -> None:
    message = refusal(LLAMA, EAGLE, method)
    assert f"--speculative-method {method}" in message
    assert "UnifiedEagleLlama3ForCausalLM (eagle, with a draft)" in message
    assert "UnifiedNgramLlama3ForCausalLM (ngram, without a draft)" in message
    assert "Qwen3" not in message


@pytest.mark.parametrize(
    ("architecture", "label"),
    [
        ("DeepseekV3ForCausalLM", "DeepSeek V3"),
        ("GlmMoeDsaForCausalLM", "GLM-5"),
        ("KimiK25ForConditionalGeneration", "Kimi K2.5"),
    ],
)
def test_a_target_nobody_serves_yet_is_named(architecture: str, label: str) -> None:
    target = model("big", architecture, "any").but(num_nextn_predict_layers=0)
    message = refusal(target)
    assert f"architecture {architecture}" in message
    assert f"recognised as {label}" in message
    assert "registered targets: llama3, qwen3" in message


def test_an_unknown_target_says_what_its_config_says() -> None:
    message = refusal(model("odd", "OddForCausalLM", "odd"))
    assert "target 'odd' (architecture OddForCausalLM, model_type odd)" in message


def test_a_draft_given_as_the_target_is_told_apart() -> None:
    assert "it looks like a draft: give it as --draft-model-path" in refusal(EAGLE)


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"architectures": ["DominoDraftModel"]}, "recognised as a Domino draft"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
            "recognised as a Domino draft",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "recognised as a DFlash2 draft"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "recognised as a Gemma 4 assistant"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "EAGLE-3 head with latent attention"),
        ({"architectures": ["Unknown"], "speculators_model_type": "new"}, "not recognised as any kind"),
    ],
)
def test_a_draft_nobody_runs_yet_is_named(config: dict[str, Any], label: str) -> None:
    message = refusal(LLAMA, FakeCheckpoint("odd", config, {}))
    assert "draft 'odd'" in message
    assert label in message
    assert "UnifiedEagle3Llama3ForCausalLM" in message


def test_an_explicit_architecture_must_fit_the_pair() -> None:
    message = refusal(LLAMA, EAGLE, arch="UnifiedEagle3Llama3ForCausalLM")
    assert message.startswith("UnifiedEagle3Llama3ForCausalLM does not serve target 'llama'")
    assert "recognised as an EAGLE-1/2 head" in message
    message = refusal(QWEN, EAGLE, arch="UnifiedEagleLlama3ForCausalLM")
    assert "recognised as Qwen3" in message
    assert "UnifiedEagleQwen3ForCausalLM" in message
    message = refusal(LLAMA, EAGLE, "eagle3", arch="UnifiedEagleLlama3ForCausalLM")
    assert "--speculative-method eagle3" in message
    assert "--draft-model-path" in refusal(LLAMA, arch="UnifiedEagleLlama3ForCausalLM")
    assert "drop --draft-model-path" in refusal(LLAMA, EAGLE, arch="UnifiedNgramLlama3ForCausalLM")


def test_an_unknown_architecture_is_answered_with_the_nearest() -> None:
    assert "did you mean UnifiedNgramLlama3ForCausalLM?" in refusal(LLAMA, arch="UnifiedNgramLlama3ForCasualLM")


def test_two_architectures_that_fit_are_an_error_and_arch_decides() -> None:
    rival = Architecture(target=LLAMA3, drafter=EAGLE3, name="UnifiedOtherEagle3Llama3ForCausalLM")
    both = (*ARCHITECTURES, rival)
    message = refusal(LLAMA, EAGLE_3, architectures=both)
    assert "fits 2 architectures: UnifiedEagle3Llama3ForCausalLM, UnifiedOtherEagle3Llama3" in message
    assert "--arch" in message
    assert resolved(LLAMA, EAGLE_3, arch=rival.name, architectures=both) == rival.name


def with_drafter(methods: tuple[str, ...], name: str) -> tuple[Architecture, ...]:
    drafter: DrafterKind = replace(NGRAM, name=name, label=name.title(), methods=methods)
    return (*ARCHITECTURES, Architecture(target=LLAMA3, drafter=drafter))


def test_without_a_draft_and_a_method_only_the_built_in_choice_is_taken() -> None:
    both = with_drafter(("suffix",), "suffix")
    assert resolved(LLAMA, architectures=both) == "UnifiedNgramLlama3ForCausalLM"
    assert resolved(LLAMA, method="suffix", architectures=both) == "UnifiedSuffixLlama3ForCausalLM"


def test_a_target_with_mtp_layers_never_falls_back_to_prompt_lookup() -> None:
    target = LLAMA.but(num_nextn_predict_layers=1, shapes={"model.layers.8.eh_proj.weight": (64, 128)})
    assert "it has MTP layers that none of them runs" in refusal(target)
    assert resolved(target, method="ngram") == "UnifiedNgramLlama3ForCausalLM"
    assert resolved(target, architectures=with_drafter(("mtp",), "mtp")) == "UnifiedMtpLlama3ForCausalLM"


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (EAGLE.but(hidden_size=32, shapes={"fc.weight": (32, 64)}), "its hidden size is 32 and the target's is 64"),
        (EAGLE.but(vocab_size=120), "its vocabulary has 120 tokens and the target's 128"),
        (
            EAGLE.but(architectures=["LlamaForCausalLMEagle"], shapes={"fc.weight": (64, 192)}),
            "its fc.weight is [64, 192] and an EAGLE-1/2 head needs [64, 128]",
        ),
        (EAGLE.but(architectures=["LlamaForCausalLMEagle"], without=["fc.weight"]), "it has no fc.weight"),
        (
            EAGLE.but(architectures=["LlamaForCausalLMEagle"], shapes={"midlayer.norm.weight": (64,)}),
            "holds midlayer.norm.weight, which only EAGLE-3 heads have",
        ),
        (
            EAGLE_3.but(shapes={"fc.weight": (64, 200)}),
            "its fc reads 200 values, which is no multiple of the target's hidden size 64",
        ),
        (EAGLE_3.but(shapes={"fc.weight": (64, 128)}), "its fc reads 2 target layers and its config does not say"),
        (
            EAGLE_3.but(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3]}),
            "its fc reads 3 target layers and its config names 2",
        ),
        (EAGLE_3.but(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), f"its {TAPS} names [9], and the target has 8 layers"),
        (EAGLE_3.but(eagle_aux_hidden_state_layer_ids=[-1, 4, 5]), f"its {TAPS} names [-1], and the target"),
        (EAGLE_3.but(eagle_aux_hidden_state_layer_ids=[1, "x", 5]), f"its {TAPS} names ['x'], and the target"),
        (EAGLE_3.but(target_layer_ids=[1, 3, 4]), "names target layers in target_layer_ids, which is not read"),
        (EAGLE_3.but(eagle_config={"target_layer_ids": [1]}), "in eagle_config.target_layer_ids, which is not read"),
        (EAGLE_3.but(dflash_config={"target_layer_ids": [-1]}), "in dflash_config.target_layer_ids, which is not read"),
        (EAGLE_3.but(without=["fc.weight"]), "it has no fc.weight"),
        (EAGLE_3.but(hidden_size=32), "its hidden size is 32 and the target's is 64"),
        (EAGLE_3.but(target_hidden_size=48), "it was trained for hidden size 48 and the target's is 64"),
        (EAGLE_3.but(vocab_size=100), "its vocabulary has 100 tokens and the target's 128"),
        (EAGLE_3.but(draft_vocab_size=31), "its draft vocabulary has 31 tokens and its d2t 32 rows"),
        (EAGLE_3.but(draft_vocab_size=256), "its draft vocabulary has 256 tokens, more than the target's 128"),
        (EAGLE_3.but(without=["d2t"]), "32 of the target's 128 tokens and no d2t that maps them"),
        (EAGLE_3.but(without=["lm_head.weight"]), "32 tokens and no lm_head of its own"),
        (EAGLE_3.but(shapes={"lm_head.weight": (128, 64)}), "32 tokens and its lm_head.weight 128 rows"),
        (SMALL_LLAMA.but(vocab_size=120), "its vocabulary has 120 tokens and the target's 128"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_the_numbers(draft: FakeCheckpoint, says: str) -> None:
    message = refusal(LLAMA, draft)
    assert message.startswith(f"draft '{draft.name}' does not belong to target 'llama' as Unified")
    assert says in message


@pytest.mark.parametrize(
    "draft",
    [
        EAGLE.but(shapes={"fc.bias": (64,), "embed_tokens.weight": (128, 64)}),
        EAGLE_3.but(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        EAGLE_3.but(shapes={"fc.weight": (64, 128)}, eagle_aux_hidden_state_layer_ids=[2, 5]),
        EAGLE_3.but(eagle_aux_hidden_state_layer_ids=[0, 4, 8]),
        EAGLE_3.but(draft_vocab_size=None),
        EAGLE_3.but(vocab_size=32),
        EAGLE_3.but(hidden_size=32, shapes={"fc.weight": (32, 192), "embed_tokens.weight": (128, 32)}),
        WHOLE_VOCABULARY.but(without=["lm_head.weight"]),
        SPECULATORS.but(speculators_config={}),
        SMALL_LLAMA.but(hidden_size=32, max_position_embeddings=128),
    ],
)
def test_what_a_draft_may_differ_in(draft: FakeCheckpoint) -> None:
    assert resolved(LLAMA, draft)


def test_every_misfit_is_named_at_once() -> None:
    message = refusal(LLAMA, EAGLE.but(hidden_size=32, vocab_size=99, shapes={"fc.weight": (32, 64)}))
    assert "hidden size" in message
    assert "vocabulary" in message


def test_a_standalone_draft_must_itself_be_a_target_we_can_load() -> None:
    message = refusal(LLAMA, model("small", "Gemma3ForCausalLM", "gemma3"))
    assert "'small' (architecture Gemma3ForCausalLM, model_type gemma3)" in message
    assert "registered targets: llama3, qwen3" in message


def test_a_standalone_draft_may_be_of_another_family() -> None:
    assert resolved(LLAMA, QWEN) == "UnifiedStandaloneLlama3ForCausalLM"


def test_a_model_teams_target_resolves_like_ours() -> None:
    mine = TargetKind(
        name="mine", label="Mine", matches=lambda f: f.config.get("model_type") == "mine", load=lambda *_: None
    )
    target = model("mine", "MineForCausalLM", "mine")
    architectures = (*ARCHITECTURES, *declare(mine, EAGLE3))
    assert resolved(target, EAGLE_3, architectures=architectures) == "UnifiedEagle3MineForCausalLM"
    assert resolved(target, architectures=architectures) == "UnifiedNgramMineForCausalLM"
    assert resolved(LLAMA, target, architectures=architectures) == "UnifiedStandaloneLlama3ForCausalLM"
    assert "UnifiedEagle3MineForCausalLM" in refusal(target, EAGLE, architectures=architectures)


def test_a_target_kind_is_found_for_a_checkpoint() -> None:
    assert target_kind(LLAMA).name == "llama3"
    assert target_kind(QWEN).name == "qwen3"
    with pytest.raises(ResolutionError, match="recognised as DeepSeek V3"):
        target_kind(model("big", "DeepseekV3ForCausalLM", "deepseek_v3"))
    rival = replace(LLAMA3, name="rival", label="Rival")
    with pytest.raises(ResolutionError, match="several registered kinds: llama3, rival"):
        target_kind(LLAMA, (*ARCHITECTURES, *declare(rival)))


@pytest.mark.parametrize(("draft", "tokens"), [(None, 4), (EAGLE, 2), (EAGLE_3, 2), (SMALL_LLAMA, 4), (SPECULATORS, 3)])
def test_the_default_width_is_the_checkpoints_or_the_drafters(draft: FakeCheckpoint | None, tokens: int) -> None:
    resolution = resolve(LLAMA, draft, None, None, ARCHITECTURES)
    assert default_num_draft_tokens(resolution) == tokens
    config = complete_config(SpeculativeConfig(), resolution)
    assert config.draft_width == tokens


@pytest.mark.parametrize("methods", [None, [], [{}], [{"speculative_tokens": 0}], ["greedy"], "greedy"])
def test_a_speculators_config_without_a_width_leaves_the_default(methods: object) -> None:
    draft = SPECULATORS.but(speculators_config={"proposal_methods": methods})
    assert default_num_draft_tokens(resolve(LLAMA, draft, None, None, ARCHITECTURES)) == 2


def test_what_the_user_chose_comes_before_the_checkpoint() -> None:
    resolution = resolve(LLAMA, SPECULATORS, "eagle", None, ARCHITECTURES)
    chosen = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=2)
    assert complete_config(chosen, resolution) == chosen
    unset = SpeculativeConfig(speculative_method="eagle", use_greedy_acceptance=True)
    completed = complete_config(unset, resolution)
    assert completed == SpeculativeConfig(
        speculative_method="eagle", num_speculative_tokens=3, use_greedy_acceptance=True
    )


def test_completing_names_the_method_the_draft_decided() -> None:
    resolution = resolve(LLAMA, EAGLE_3, None, None, ARCHITECTURES)
    assert complete_config(SpeculativeConfig(), resolution).speculative_method == "eagle3"


def test_completing_checks_adaptive_widths_against_the_checkpoints_width() -> None:
    resolution = resolve(LLAMA, SPECULATORS, None, None, ARCHITECTURES)
    narrow = SPECULATORS.but(speculators_config={"proposal_methods": [{"speculative_tokens": 1}]})
    config = SpeculativeConfig(speculative_method="eagle3", adaptive_speculative_widths="1,2")
    assert complete_config(config, resolution).adaptive_widths == (1, 2)
    with pytest.raises(ConfigError, match="width 2 cannot be verified when 1 tokens are drafted"):
        complete_config(config, resolve(LLAMA, narrow, None, None, ARCHITECTURES))
