"""Checkpoints on disk or on the hub: raw config, tensor names and shapes, and lazily loaded tensors."""

from .checkpoint import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "TensorInfo"]
