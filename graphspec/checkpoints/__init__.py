"""Checkpoints on disk or on the hub: raw config, tensor names and shapes, and lazily loaded tensors."""

from . import fields
from .checkpoint import Checkpoint, TensorInfo
from .fingerprint import fingerprint
from .opening import local_path, open_checkpoint
from .tensor_check import check_tensors

__all__ = ["Checkpoint", "TensorInfo", "check_tensors", "fields", "fingerprint", "local_path", "open_checkpoint"]
