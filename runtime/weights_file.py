"""Reading a safetensors file by its layout: any type, nothing converted, nothing copied but by who asks."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graphspec.errors import BundleError


def stored_tensors(path: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Name and bytes of every tensor, as views of the mapped file. Raises BundleError.

    The format: u64 length of a JSON header, the header, the data; offsets count from the end of the header
    (huggingface/safetensors, README "Format").
    """
    try:
        with path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        start = 8 + int(content[:8].view("<u8")[0])
        header = json.loads(bytes(content[8:start]))
        places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        if start > content.size:
            raise ValueError("its header is not all there")
        for name, (first, last) in places.items():
            if not 0 <= first <= last <= content.size - start:
                raise ValueError(f"{name} is not all there")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise BundleError(f"{path} holds no weights that can be read ({error}); copy the bundle again") from None
    for name, (first, last) in places.items():
        yield name, content[start + first : start + last]
