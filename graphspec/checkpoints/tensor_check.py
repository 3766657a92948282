"""Whether a checkpoint holds exactly the tensors a module expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphspec.errors import CheckpointError

from .checkpoint import Checkpoint
from .listing import listed


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool] | None = None,
) -> None:
    """Raises one CheckpointError naming every missing, unexpected and wrongly shaped tensor.

    `expected` maps tensor names to shapes. `ignored` says which tensors of the checkpoint are known not to
    be needed; one that is in `expected` is checked all the same."""
    found = checkpoint.tensors
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(name for name in found.keys() - expected.keys() if ignored is None or not ignored(name))
    wrong = [
        f"{name} (found {list(found[name].shape)}, expected {list(shape)})"
        for name, shape in sorted(expected.items())
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    problems = [
        f"{len(names)} {kind}: {listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the tensors of checkpoint {checkpoint.name} do not fit the model: {'; '.join(problems)}; "
            "check that the checkpoint is the one its config.json describes"
        )
