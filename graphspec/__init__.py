"""graphspec: fused speculative-decoding graphs, built once and served anywhere."""

from graphspec.errors import GraphspecError

__all__ = ["GraphspecError"]
__version__ = "0.1.0"
