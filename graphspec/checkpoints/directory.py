"""A Hugging Face directory: config.json, weights in one or more files, tokenizer files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphspec.errors import CheckpointError

from . import safetensors_file, torch_bin
from .checkpoint import TensorInfo
from .json_file import parse_object, read_bytes, read_object
from .listing import listed
from .stored import StoredCheckpoint

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
MEDUSA_FILE = "medusa_lm_head.pt"


@dataclass(frozen=True, slots=True)
class _Format:
    """How one weight format names and reads its files."""

    single: str
    infos: Callable[[Path], dict[str, TensorInfo]]
    tensors: Callable[[Mapping[str, Path], Sequence[str]], Iterator[tuple[str, torch.Tensor]]]
    others: tuple[str, ...] = ()
    """Names that a file goes by where neither `single` nor its index is there."""

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"


_SAFETENSORS = _Format("model.safetensors", safetensors_file.read_infos, safetensors_file.read_tensors)
_BIN = _Format("pytorch_model.bin", torch_bin.read_infos, torch_bin.read_tensors, others=(MEDUSA_FILE,))


def open_directory(path: Path, name: str) -> StoredCheckpoint:
    """Reads config.json and the headers of the weights. Raises CheckpointError naming the file at fault."""
    config_path = path / "config.json"
    weights = _find_weights(path)
    if weights is None or not config_path.is_file():
        raise CheckpointError(_not_a_checkpoint(path))
    weight_format, weight_path = weights
    config = read_object(config_path)
    if weight_path.name.endswith(".index.json"):
        shards = _indexed(weight_format, weight_path)
    else:
        shards = {weight_path: weight_format.infos(weight_path)}
    files = {name: shard for shard, infos in shards.items() for name in infos}
    tokenizer = [path / file for file in TOKENIZER_FILES if (path / file).is_file()]
    return StoredCheckpoint(
        name=name,
        files=tuple(sorted({config_path, weight_path, *shards, *tokenizer})),
        config=config,
        tensors={name: info for infos in shards.values() for name, info in infos.items()},
        read=partial(weight_format.tensors, files),
        read_tokenizer=partial(_tokenizer_files, tokenizer),
    )


def _find_weights(path: Path) -> tuple[_Format, Path] | None:
    """The index, or the one file, that the weights are read from; safetensors before .bin."""
    for weight_format in (_SAFETENSORS, _BIN):
        for name in (weight_format.index, weight_format.single, *weight_format.others):
            if (path / name).is_file():
                return weight_format, path / name
        if weight_format is _SAFETENSORS:
            # Drafts come under other names too, such as medusa_lm_head.safetensors.
            others = sorted(path.glob("*.safetensors"))
            if len(others) > 1:
                names = listed([other.name for other in others], 4)
                raise CheckpointError(
                    f"{path} holds {len(others)} safetensors files ({names}) and neither "
                    f"{weight_format.index} nor {weight_format.single}: add the index that says which tensor "
                    "lies where"
                )
            if others:
                return weight_format, others[0]
    return None


def _not_a_checkpoint(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"cannot read {path}: {error.strerror or error}"
    found = f"found {listed(names, 8)}" if names else "the directory is empty"
    return (
        f"{path} is not a checkpoint: {found}; expected config.json with model.safetensors (or its "
        "index and shards) or pytorch_model.bin, or exactly one .gguf file"
    )


def _indexed(weight_format: _Format, index_path: Path) -> dict[Path, dict[str, TensorInfo]]:
    """Every shard's tensors, once each name is found where the index says it is."""
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index_path} maps tensor {name} to {file!r}, which is not a file name")
    folder = index_path.parent
    file_names = sorted(set(weight_map.values()))
    absent = [file for file in file_names if not (folder / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{index_path} names {len(absent)} of {len(file_names)} files that are not there: "
            f"{listed(absent)}; download them again"
        )
    found = {file: weight_format.infos(folder / file) for file in file_names}
    lacking = [f"{name} ({file})" for name, file in weight_map.items() if name not in found[file]]
    if lacking:
        raise CheckpointError(f"{index_path} names tensors that their file lacks: {listed(lacking)}")
    # A tensor no index entry claims still belongs to the checkpoint, and is checked like the others.
    return {
        folder / file: {name: info for name, info in infos.items() if weight_map.get(name, file) == file}
        for file, infos in found.items()
    }


def _tokenizer_files(paths: list[Path]) -> dict[str, bytes]:
    contents = {path.name: read_bytes(path) for path in paths}
    settings = {
        path.name: parse_object(contents[path.name], str(path))
        for path in paths
        if path.name in ("tokenizer_config.json", "generation_config.json")
    }
    template = _default_template(settings.get("tokenizer_config.json", {}).get("chat_template"))
    if template is not None:
        contents.setdefault("chat_template.jinja", template.encode())
    return contents


def _default_template(template: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones of which "default" counts."""
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return _default_template(entry.get("template"))
    return None
