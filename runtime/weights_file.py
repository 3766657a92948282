"""Reading a safetensors file by its layout: any type, nothing converted, nothing copied but by who asks."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def stored_tensors(path: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Name and bytes of every tensor, as views of the mapped file.

    The format: u64 length of a JSON header, the header, the data; offsets count from the end of the header
    (huggingface/safetensors, README "Format").
    """
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(bytes(content[8:start]))
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, content[start + first : start + last]
