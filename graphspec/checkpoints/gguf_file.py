"""A .gguf file as a checkpoint under Hugging Face tensor names and config keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphspec.errors import CheckpointError

from .gguf_config import make_config
from .gguf_header import GgufHeader, GgufTensor, read_header
from .gguf_tokenizer import tokenizer_files
from .stored import StoredCheckpoint

if TYPE_CHECKING:
    import torch

_ROPE_FACTORS = "rope_freqs.weight"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCKS_AT_ONCE = 1 << 13
_PLAIN_TYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one Hugging Face tensor comes from."""

    gguf_name: str
    tensor: GgufTensor
    num_permuted_heads: int
    """Heads whose rows llama.cpp reordered, or 0."""


def open_gguf(path: Path, name: str) -> StoredCheckpoint:
    """Raises CheckpointError for a damaged file or an architecture that is not supported."""
    header = read_header(path)
    config = make_config(header)
    if (factors := header.tensors.get(_ROPE_FACTORS)) is not None:
        config["graphspec_rope_freq_factors"] = _rope_factors(path, factors, config["head_dim"])
    sources = _sources(header, config["num_attention_heads"], config["num_key_value_heads"])
    return StoredCheckpoint(
        name=name,
        files=(path,),
        config=config,
        tensors={name: source.tensor.info for name, source in sources.items()},
        read=partial(_read_tensors, path, sources),
        read_tokenizer=partial(tokenizer_files, header),
    )


def _sources(header: GgufHeader, num_heads: int, num_kv_heads: int) -> dict[str, _Source]:
    # llama.cpp rotates interleaved pairs for this architecture and half-split ones for the others.
    permuted = header.fields["general.architecture"] == "llama"
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if permuted else {}
    sources: dict[str, _Source] = {}
    for gguf_name, tensor in header.tensors.items():
        if gguf_name == _ROPE_FACTORS:
            continue
        name = hugging_face_name(gguf_name)
        if name in sources:
            raise CheckpointError(f"{header.path}: {gguf_name} and {sources[name].gguf_name} are both {name}")
        num_permuted = heads.get(name.split(".")[-2] if "." in name else "", 0)
        rows = tensor.info.shape[0] if tensor.info.shape else 0
        if num_permuted and (rows == 0 or rows % (2 * num_permuted)):
            raise CheckpointError(
                f"{header.path}: tensor {gguf_name} has {rows} rows, which {num_permuted} heads cannot share"
            )
        sources[name] = _Source(gguf_name, tensor, num_permuted)
    return sources


def hugging_face_name(gguf_name: str) -> str:
    """A name that is not known stays as it is, for the check against the model to report."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        index, stem, kind = layer.groups()
        return f"model.layers.{index}.{_INNER[stem]}.{kind}" if stem in _INNER else gguf_name
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else gguf_name


def _read_tensors(
    path: Path, sources: Mapping[str, _Source], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        source = sources[name]
        tensor = _read(path, source.gguf_name, source.tensor)
        if source.num_permuted_heads:
            tensor = unpermute(tensor, source.num_permuted_heads)
        yield name, tensor
        del tensor  # not alive while the next one is read


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Puts q or k rows (weights [heads × head_dim, in], or biases) back in Hugging Face's order.

    llama.cpp interleaves the two halves of each head: its row 2i + j is row j × head_dim / 2 + i here."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _read(path: Path, name: str, tensor: GgufTensor) -> torch.Tensor:
    """Plain floats and integers as stored; every quantised type as float32."""
    import torch

    try:
        content = np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if content.size != tensor.num_bytes:
        raise CheckpointError(f"{path} became shorter while it was read: tensor {name} is cut off")
    kind, shape = tensor.info.dtype, tensor.info.shape
    if kind == "BF16":
        return torch.from_numpy(content).view(torch.bfloat16).reshape(shape)
    if kind in _PLAIN_TYPES:
        plain = np.dtype(f"{'f' if kind[0] == 'F' else 'i'}{int(kind[1:]) // 8}")
        return torch.from_numpy(content.view(plain)).reshape(shape)
    return torch.from_numpy(_dequantize(path, name, kind, content)).reshape(shape)


def _dequantize(path: Path, name: str, kind: str, content: np.ndarray) -> np.ndarray:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantization = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    values = np.empty(content.size // block_bytes * block, np.float32)
    # The package works on 16 rows at a time, few of ours; one long row is faster, and bounds what it copies.
    step, done = _BLOCKS_AT_ONCE * block_bytes, 0
    try:
        for start in range(0, content.size, step):
            # Scales that overflow become NaN, which is looked for afterwards and reported by tensor.
            with np.errstate(all="ignore"):
                part = dequantize(content[start : start + step].reshape(1, -1), quantization).reshape(-1)
            values[done : done + part.size] = part
            done += part.size
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: tensor {name} has type {kind}, which the installed gguf package cannot dequantise; "
            "convert the file to one of F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K"
        ) from error
    return values


def _rope_factors(path: Path, tensor: GgufTensor, head_dim: int) -> list[float]:
    factors = [float(factor) for factor in _read(path, _ROPE_FACTORS, tensor).reshape(-1)]
    bad = [factor for factor in factors if not 0 < factor < float("inf")]
    if bad or len(factors) != head_dim // 2:
        raise CheckpointError(
            f"{path}: {_ROPE_FACTORS} must hold {head_dim // 2} positive finite numbers; it holds "
            f"{len(factors)}, {len(bad)} of them not positive and finite"
        )
    return factors
