"""graphspec: fused speculative-decoding graphs, built once and served anywhere.

The names below are loaded when they are first used: importing graphspec imports no backend and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from graphspec.errors import GraphspecError

if TYPE_CHECKING:
    from graphspec.building import build
    from graphspec.checkpoints import open_checkpoint
    from graphspec.registry import registered
    from graphspec.resolution import resolve
    from graphspec.runtime.answer import Generation, Piece
    from graphspec.runtime.generate import load
    from graphspec.runtime.sampling import SamplingParams
    from graphspec.speculative_config import SpeculativeConfig

__all__ = [
    "Generation",
    "GraphspecError",
    "Piece",
    "SamplingParams",
    "SpeculativeConfig",
    "build",
    "load",
    "open_checkpoint",
    "registered",
    "resolve",
]
__version__ = "0.1.0"

_HOMES = {
    "Generation": "graphspec.runtime.answer",
    "Piece": "graphspec.runtime.answer",
    "SamplingParams": "graphspec.runtime.sampling",
    "SpeculativeConfig": "graphspec.speculative_config",
    "build": "graphspec.building",
    "load": "graphspec.runtime.generate",
    "open_checkpoint": "graphspec.checkpoints",
    "registered": "graphspec.registry",
    "resolve": "graphspec.resolution",
}

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'graphspec' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
