"""A tiny pair of every architecture: checkpoints, bundles, and the torch module that a bundle was traced from."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import tiny
import tiny_dflash
import tiny_medusa
import torch
from fake_device import FakeCompiler
from forced import METHOD
from gpu import gpu_backend
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphspec.architectures.step import FusedStep
from graphspec.building import build, resolve_pair
from graphspec.export.build import BuildOptions
from graphspec.export.build import build as build_bundle
from graphspec.resolution import complete_config
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.speculative_config import SpeculativeConfig

Encoding = Literal["float32", "int8", "int4"]

K = 3
"""Tokens that every pair drafts; bundles have all widths 0 … K."""
WIDTHS = tuple(range(K + 1))
MAX_LENGTH = 128
LAYERS = 3
NAMES = tuple(
    f"Unified{drafter}{target}ForCausalLM"
    for target in ("Llama3", "Qwen3")
    for drafter in ("Eagle", "Eagle3", "Standalone", "Ngram")
) + tuple(f"Unified{drafter}{target}ForCausalLM" for drafter in ("Dflash", "Medusa") for target in ("Llama3", "Qwen3"))
FORCED = "UnifiedForcedLlama3ForCausalLM"
"""Drafts what a test tells it to (forced.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Checkpoints of one architecture."""

    target: Path
    draft: Path | None


class Pairs:
    """Makes each thing once, when it is first asked for; processes that share `root` share what is on disk."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._root = root
        self.pair = cache(self._pair)
        self.bundle = cache(self._bundle)
        self.engines = cache(self._engines)
        self.gpu_engines = cache(self._gpu_engines)
        self.step = cache(self._step)
        self._target = cache(self._save_target)
        self._draft = cache(self._save_draft)
        self._loaded: dict[tuple[str, Encoding], LoadedBundle] = {}

    def loaded(self, name: str, encoding: Encoding = "float32") -> LoadedBundle:
        """The bundle, loaded on one thread, with 8 slots."""
        if (name, encoding) not in self._loaded:
            self._loaded[name, encoding] = load(self.bundle(name, encoding), num_threads=1)
        return self._loaded[name, encoding]

    def close(self) -> None:
        """Closes what is loaded."""
        for bundle in self._loaded.values():
            bundle.close()

    def _pair(self, name: str) -> Pair:
        """Target and draft favour the same tokens, so that drafts are accepted."""
        target = "Qwen3" if "Qwen3" in name else "Llama3"
        drafter = name.removeprefix("Unified").removesuffix(f"{target}ForCausalLM")
        with self._locked():
            return Pair(target=self._target(target), draft=self._draft(drafter))

    def _bundle(self, name: str, encoding: Encoding = "float32", device: str = "cpu") -> Path:
        pair, out = self.pair(name), self._root / f"{name}-{encoding}-{device}"
        with self._locked():
            if not out.exists():
                build(
                    model=pair.target,
                    draft_model_path=pair.draft,
                    arch=name,
                    arch_modules=["forced"],
                    speculative_method=_method(name),
                    encoding=encoding,
                    device=device,
                    max_length=MAX_LENGTH,
                    out=out,
                    num_speculative_tokens=K,
                )
        return out

    def _engines(self, name: str) -> Path:
        """Built for TensorRT-RTX by the stand-in of fake_device.py, in float32, with batches of 1, 2 and 4."""
        pair, out = self.pair(name), self._root / f"{name}-engines"
        with self._locked(), pytest.MonkeyPatch.context() as patch:
            if not out.exists():
                patch.setattr("graphspec.export.assemble.TensorRt", FakeCompiler)
                resolution = resolve_pair(pair.target, pair.draft, method=_method(name), arch=name)
                config = SpeculativeConfig.parse(
                    {"speculative_method": resolution.architecture.methods[0], "num_speculative_tokens": K}
                )
                options = BuildOptions(
                    backend="tensorrt-rtx", encoding="float32", max_length=MAX_LENGTH, max_batch_size=4
                )
                build_bundle(resolution, complete_config(config, resolution), options, out)
        return out

    def _gpu_engines(self, name: str) -> Path:
        """Really compiled, by the backend that is installed, in bfloat16, with batches of 1, 2 and 4."""
        pair, out, backend = self.pair(name), self._root / f"{name}-gpu", gpu_backend()
        with self._locked():
            if not out.exists():
                build(
                    model=pair.target,
                    draft_model_path=pair.draft,
                    arch=name,
                    backend=backend or "tensorrt-rtx",
                    max_length=MAX_LENGTH,
                    max_batch_size=4,
                    out=out,
                    num_speculative_tokens=K,
                )
        return out

    def _step(self, name: str) -> FusedStep:
        """The fused step in torch, for a cache of the bundle's capacity."""
        return self.fresh_step(name)

    def fresh_step(self, name: str) -> FusedStep:
        """The same, of its own: `step` is shared."""
        pair = self.pair(name)
        resolution = resolve_pair(pair.target, pair.draft, method=_method(name), arch=name, arch_modules=["forced"])
        architecture = resolution.architecture
        asked = SpeculativeConfig.parse({"speculative_method": architecture.methods[0], "num_speculative_tokens": K})
        target = architecture.target.load(resolution.target, capacity=MAX_LENGTH + 3 * K + 2)
        config = complete_config(asked, resolution)
        return FusedStep(target, architecture.drafter.load(target, resolution.draft, K, config))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Released by the system, should this process die."""
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _save_target(self, family: str) -> Path:
        save, path = {"Llama3": tiny.save_llama, "Qwen3": tiny.save_qwen3}[family], self._root / family
        return path if path.exists() else _make_frequent(save(path, layers=LAYERS))

    def _save_draft(self, drafter: str) -> Path | None:
        path = self._root / drafter
        if path.exists():
            return path
        if drafter == "Eagle":
            return tiny.save_eagle(path)  # it proposes with the target's head
        if drafter == "Eagle3":
            return _make_frequent(tiny.save_eagle3(path, eagle_aux_hidden_state_layer_ids=[1, 2, LAYERS]))
        if drafter == "Dflash":
            head = {name: tiny.eagle3_tensors()[name] for name in ("lm_head.weight", "d2t", "t2d")}
            block = {"mask_token_id": tiny_dflash.MASK, "target_layer_ids": [0, LAYERS - 1]}
            tensors = tiny_dflash.dflash_tensors() | head
            return _make_frequent(
                tiny_dflash.save_dflash(path, tensors, draft_vocab_size=tiny.PRUNED, dflash_config=block)
            )
        if drafter == "Medusa":
            return tiny_medusa.save_medusa(path, _favouring(tiny_medusa.medusa_tensors(seed=8, heads=K)))
        if drafter == "Standalone":
            return _make_frequent(tiny.save_llama(path, seed=7, layers=2))
        return None


def _make_frequent(path: Path, factor: float = 6.0) -> Path:
    """Makes a checkpoint favour four of the tokens that EAGLE-3's heads keep.

    Drafts of random models are accepted once in a hundred times, those of models with the same favourites often.
    """
    tensors = _favouring(load_file(path / "model.safetensors"), factor)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _favouring(tensors: dict[str, Tensor], factor: float = 6.0) -> dict[str, Tensor]:
    """The tensors, of which those that say tokens favour four."""
    favourites = _kept(tiny.eagle3_tensors())[::8]
    kept = _kept(tensors) if "d2t" in tensors else torch.arange(tiny.VOCABULARY)
    for name in filter(re.compile(r"lm_head\.weight|\d\.1\.weight").fullmatch, tensors):
        tensors[name][torch.isin(kept, favourites)] *= factor
    return tensors


def _kept(tensors: dict[str, Tensor]) -> Tensor:
    """Target ids of the tokens of a pruned head."""
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def _method(name: str) -> str | None:
    """A drafter without a draft checkpoint is chosen by its method; FORCED answers to one that nobody else does."""
    return METHOD if name == FORCED else None
