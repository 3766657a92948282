"""GGUF files, written here with the gguf package, as checkpoints under Hugging Face names."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.checkpoints import check_tensors, open_checkpoint
from graphspec.errors import CheckpointError

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2
Write = Callable[[gguf.GGUFWriter], None]


def gguf_tensors(random: np.random.Generator, *, bias: bool = False) -> dict[str, np.ndarray]:
    """A tiny model under GGUF names, in Hugging Face's row order."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        linear = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        if bias:
            shapes |= {f"blk.{layer}.{name}.bias": linear[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    arch: str = "llama",
    more: Write | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    if more is not None:
        more(writer)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            # Bytes of a type the package cannot write come as they are.
            content = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama checkpoint."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def permuted(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    return {
        name: permute(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return gguf_tensors(np.random.default_rng(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


HUGGING_FACE_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def test_names_and_shapes_are_those_transformers_gives_the_same_model(
    path: Path, tensors: dict[str, np.ndarray]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(write(path, permuted(tensors)))
    config = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "torch_dtype")}
    with torch.device("meta"):
        expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    del expected["lm_head.weight"]  # tied
    check_tensors(checkpoint, {name: tuple(tensor.shape) for name, tensor in expected.items()})


def test_q_and_k_come_back_in_hugging_face_row_order(path: Path) -> None:
    tensors = gguf_tensors(np.random.default_rng(1), bias=True)
    checkpoint = open_checkpoint(write(path, permuted(tensors)))
    loaded = dict(checkpoint.load(checkpoint.tensors))
    assert checkpoint.config["attention_bias"] is True
    for layer in range(LAYERS):
        for name, part in HUGGING_FACE_PARTS.items():
            for kind in ("weight", "bias"):
                if (original := tensors.get(f"blk.{layer}.{name}.{kind}")) is not None:
                    found = loaded.pop(f"model.layers.{layer}.{part}.{kind}")
                    assert np.array_equal(found.numpy(), original)
    assert np.array_equal(loaded.pop("model.embed_tokens.weight").numpy(), tensors["token_embd.weight"])
    assert np.array_equal(loaded.pop("model.norm.weight").numpy(), tensors["output_norm.weight"])
    assert loaded == {}


def test_the_permutation_moves_rows_so_that_the_test_above_can_fail(tensors: dict[str, np.ndarray]) -> None:
    name = "blk.0.attn_k.weight"
    assert not np.array_equal(permuted(tensors)[name], tensors[name])


def test_qwen3_rows_are_not_permuted(path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors |= {f"blk.0.attn_{part}_norm.weight": np.ones(HEAD_DIM, np.float32) for part in "qk"}
    checkpoint = open_checkpoint(write(path, tensors, "qwen3"))
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    loaded = dict(checkpoint.load([*names, "model.layers.0.self_attn.q_norm.weight"]))
    assert np.array_equal(loaded[names[0]].numpy(), tensors["blk.0.attn_q.weight"])
    assert np.array_equal(loaded[names[1]].numpy(), tensors["blk.1.attn_k.weight"])
    assert "model.layers.0.self_attn.k_norm.weight" in checkpoint.tensors
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert checkpoint.config["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (Kind.F32, torch.float32, 0.0),
        (Kind.F16, torch.float16, 2**-11),
        (Kind.BF16, torch.bfloat16, 2**-8),
        (Kind.Q8_0, torch.float32, 1 / 127 * 0.51),
        (Kind.Q4_0, torch.float32, 1 / 8 * 1.01),
        (Kind.Q4_1, torch.float32, 2 / 15 * 0.51),
        (Kind.Q5_0, torch.float32, 1 / 16 * 1.01),
        (Kind.Q5_1, torch.float32, 2 / 31 * 0.51),
    ],
)
def test_each_type_loads_within_its_precision(
    path: Path, tensors: dict[str, np.ndarray], kind: Kind, dtype: torch.dtype, tolerance: float
) -> None:
    """Tolerances are relative to the largest value of the tensor, at most a step of the type."""
    name = "blk.0.attn_q.weight"
    content = permuted(tensors)
    checkpoint = open_checkpoint(write(path, content, kinds={name: kind}))
    hugging_face = "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.tensors[hugging_face].dtype == kind.name
    ((_, loaded),) = checkpoint.load([hugging_face])
    assert loaded.dtype == dtype
    original = torch.from_numpy(tensors[name])
    assert (loaded.float() - original).abs().max() <= tolerance * original.abs().max()
    reference = gguf.quants.dequantize(gguf.quants.quantize(content[name], kind), kind)
    assert np.array_equal(permute(loaded.float().numpy(), HEADS), reference.reshape(content[name].shape))


def q4_k_block(block: bytes) -> list[float]:
    """ggml's Q4_K: 8 groups of 32, each with a 6-bit scale and minimum."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, quants = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
        for i in range(32):
            quant = quants[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            values.append(float(d * scale * quant - dmin * minimum))
    return values


def q6_k_block(block: bytes) -> list[float]:
    """ggml's Q6_K: 16 groups of 16, low 4 bits and high 2 bits apart, 8-bit scales."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = float(np.frombuffer(block[208:210], np.float16)[0])
    values = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        low_bits = low[half * 64 + (quarter % 2) * 32 + column] >> (4 * (quarter // 2)) & 15
        high_bits = high[half * 32 + column] >> (2 * quarter) & 3
        values.append(d * int(scales[i // 16]) * ((low_bits | high_bits << 4) - 32))
    return values


@pytest.mark.parametrize(("kind", "reference"), [(Kind.Q4_K, q4_k_block), (Kind.Q6_K, q6_k_block)])
def test_k_quants_agree_with_the_format_written_out(
    path: Path, tensors: dict[str, np.ndarray], kind: Kind, reference: Callable[[bytes], list[float]]
) -> None:
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(2).integers(0, 256, (6, num_bytes), np.uint8)
    # Random bytes as a half-precision scale could be anything, so scales are set.
    places = (0, 2) if kind is Kind.Q4_K else (208,)
    for place in places:
        blocks[:, place : place + 2] = np.frombuffer(np.float16(0.037).tobytes(), np.uint8)
    content = tensors | {"blk.0.ffn_down.weight": blocks.reshape(3, 2 * num_bytes)}
    checkpoint = open_checkpoint(write(path, content, kinds={"blk.0.ffn_down.weight": kind}))
    ((_, loaded),) = checkpoint.load(["model.layers.0.mlp.down_proj.weight"])
    assert loaded.shape == (3, 512)
    expected = torch.tensor([reference(block.tobytes()) for block in blocks]).reshape(3, 512)
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-5)


def test_a_tensor_of_many_blocks_is_put_together_in_order(path: Path, tensors: dict[str, np.ndarray]) -> None:
    large = np.random.default_rng(3).standard_normal((4100, HIDDEN)).astype(np.float32)
    name = "token_embd.weight"
    checkpoint = open_checkpoint(write(path, tensors | {name: large}, kinds={name: Kind.Q8_0}))
    ((_, loaded),) = checkpoint.load(["model.embed_tokens.weight"])
    assert np.array_equal(loaded.numpy(), gguf.quants.dequantize(gguf.quants.quantize(large, Kind.Q8_0), Kind.Q8_0))
    assert checkpoint.config["vocab_size"] == 4100


def test_the_config_has_hugging_face_keys(path: Path, tensors: dict[str, np.ndarray]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(3)

    assert dict(open_checkpoint(write(path, tensors, more=more)).config) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def test_an_output_matrix_unties_the_head(path: Path, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = open_checkpoint(write(path, tensors | {"output.weight": tensors["token_embd.weight"] * 2}))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.tensors["lm_head.weight"].shape == (VOCAB, HIDDEN)


def test_heads_may_be_wider_than_the_hidden_size_shared_out(path: Path, tensors: dict[str, np.ndarray]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_value_length(32)

    assert open_checkpoint(write(path, tensors, "qwen3", more)).config["head_dim"] == 32


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE), None),
        (
            lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(4.0)),
            {"rope_type": "linear", "factor": 4.0},
        ),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), {"rope_type": "linear", "factor": 2.0}),
        (lambda w: w.add_float32("llama.rope.scale_linear", 1.0), None),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(128),
                w.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0),
            ),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_becomes_a_config_key(
    path: Path, tensors: dict[str, np.ndarray], more: Write, scaling: dict[str, Any] | None
) -> None:
    assert open_checkpoint(write(path, tensors, more=more)).config["rope_scaling"] == scaling


def test_llama3_factors_are_handed_over_as_a_list_and_not_as_a_tensor(
    path: Path, tensors: dict[str, np.ndarray]
) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = open_checkpoint(write(path, tensors | {"rope_freqs.weight": factors}))
    assert checkpoint.config["graphspec_rope_freq_factors"] == factors.tolist()
    assert not any("rope" in name for name in checkpoint.tensors)


@pytest.mark.parametrize("factors", [np.ones(3), np.zeros(HEAD_DIM // 2), np.full(HEAD_DIM // 2, np.nan)])
def test_llama3_factors_that_make_no_sense_are_refused(
    path: Path, tensors: dict[str, np.ndarray], factors: np.ndarray
) -> None:
    write(path, tensors | {"rope_freqs.weight": factors.astype(np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold 8 positive finite numbers"):
        open_checkpoint(path)


def test_a_separate_end_of_turn_token_ends_generation_too(path: Path, tensors: dict[str, np.ndarray]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)

    assert open_checkpoint(write(path, tensors, more=more)).config["eos_token_id"] == [2, 5]


def test_a_directory_with_one_gguf_is_that_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write(path, tensors)
    (path.parent / "config.json").write_text("not read")
    checkpoint = open_checkpoint(path.parent)
    assert checkpoint.files == (path,)
    assert checkpoint.name == str(path.parent)


def test_a_tensor_of_another_name_is_reported_under_its_own(path: Path, tensors: dict[str, np.ndarray]) -> None:
    more = {"blk.0.ffn_gate_inp.weight": np.ones(4, np.float32), "foo": np.ones(4, np.float32)}
    assert set(more) < set(open_checkpoint(write(path, tensors | more)).tensors)


def test_a_non_finite_scale_is_found_in_a_quantised_tensor(path: Path, tensors: dict[str, np.ndarray]) -> None:
    content = gguf.quants.quantize(tensors["blk.1.ffn_up.weight"], Kind.Q8_0)
    content[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    write(path, tensors | {"blk.1.ffn_up.weight": content}, kinds={"blk.1.ffn_up.weight": Kind.Q8_0})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \(32 of"):
        list(open_checkpoint(path).load(["model.layers.1.mlp.up_proj.weight"]))


def set_integer(key: str, value: int) -> Write:
    return lambda writer: writer.add_uint32(key, value)


@pytest.mark.parametrize(
    ("arch", "more", "message"),
    [
        ("gemma3", None, "general.architecture is 'gemma3'; GGUF files of llama and qwen3"),
        ("llama", set_integer("llama.expert_count", 8), "is a mixture of experts"),
        ("llama", lambda w: w.add_uint16("split.count", 3), "is one of 3 parts of a split GGUF"),
        ("llama", set_integer("llama.rope.dimension_count", 8), "a rotary part of 8 dimensions"),
        ("llama", set_integer("llama.attention.value_length", 8), "values of 8"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "'longrope' is not supported"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "scaling.factor is missing"),
        ("llama", lambda w: w.add_float32("llama.rope.scaling.factor", float("nan")), "must be finite, not nan"),
        ("llama", lambda w: w.add_string("split.count", "3"), "split.count must be an integer"),
        (
            "llama",
            lambda w: (
                w.add_string("llama.rope.scaling.type", "yarn"),
                w.add_float32("llama.rope.scaling.factor", 2.0),
                w.add_float32("llama.rope.scaling.attn_factor", 0.5),
            ),
            "attn_factor other than 1",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_key(
    path: Path, tensors: dict[str, np.ndarray], arch: str, more: Write | None, message: str
) -> None:
    write(path, tensors, arch, more)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_missing_key_is_named(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"has no metadata field llama\.embedding_length"):
        open_checkpoint(path)


def test_a_file_without_an_embedding_is_refused(path: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"no two-dimensional tensor token_embd\.weight"):
        open_checkpoint(write(path, tensors))


def test_rows_that_heads_cannot_share_are_refused(path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q.weight"] = np.ones((60, HIDDEN), np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has 60 rows, which 4 heads cannot share"):
        open_checkpoint(write(path, tensors))


def test_a_type_the_package_cannot_dequantise_is_named(path: Path, tensors: dict[str, np.ndarray]) -> None:
    num_bytes = gguf.GGML_QUANT_SIZES[Kind.Q8_1][1]
    content = tensors | {"blk.0.ffn_up.weight": np.zeros((3, num_bytes), np.uint8)}
    checkpoint = open_checkpoint(write(path, content, kinds={"blk.0.ffn_up.weight": Kind.Q8_1}))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has type Q8_1, which .* cannot dequantise"):
        list(checkpoint.load(["model.layers.0.mlp.up_proj.weight"]))


def test_a_type_nobody_knows_is_refused(path: Path, tensors: dict[str, np.ndarray]) -> None:
    content = bytearray(write(path, tensors).read_bytes())
    name = b"output_norm.weight"
    # After the name: number of dimensions (4 bytes), one length (8), type (4).
    place = content.index(name) + len(name) + 12
    content[place : place + 4] = struct.pack("<I", 999)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor output_norm\.weight has type 999"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read|is not a GGUF file"),
        (b"GGU", "is not a GGUF file"),
        (b"<html>", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "is truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "is truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 10, 2**60), "is truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "field of unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4), "is not UTF-8"),
    ],
)
def test_a_damaged_header_is_refused_at_once(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_cut_off_file_says_which_tensor_is_missing(path: Path, tensors: dict[str, np.ndarray]) -> None:
    content = write(path, tensors).read_bytes()
    path.write_bytes(content[:-40])
    with pytest.raises(CheckpointError, match=r"truncated: its tensors need \d+ bytes .* \(1 of 20 tensors"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        writer.add_token_types([1, 1, 1])

    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return write(path, gguf_tensors(np.random.default_rng(0)), more=more).read_bytes()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "tiny.gguf"
    # The last tensor is padded to the alignment, and nothing is lost with the padding.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 32))])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        open_checkpoint(path)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "tiny.gguf"
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer_files()
        assert len(list(checkpoint.load(checkpoint.tensors))) == len(checkpoint.tensors)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017 — not raising is fine too
