"""Checkpoints on disk or on the hub: raw config, tensor names and shapes, and lazily loaded tensors."""

from .checkpoint import Checkpoint, TensorInfo
from .fingerprint import fingerprint
from .opening import open_checkpoint
from .tensor_check import check_tensors

__all__ = ["Checkpoint", "TensorInfo", "check_tensors", "fingerprint", "open_checkpoint"]
