"""Why a draft does not belong to a target, from config and tensor shapes alone; imports no torch.

What needs the tensors' values (a d2t that points past the vocabulary) is checked when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphspec.architecture import Facts
from graphspec.detection import (
    TAP_FIELD,
    architecture_name,
    draft_body,
    number,
    other_tap_field,
    plain_names,
    tap_ids,
    target_body,
    verifier_architecture,
)
from graphspec.errors import CheckpointError
from graphspec.speculative_config import LONGEST_DRAFT

from .dflash_config import BLOCK_FIELD, MASK_FIELD, block_size, entered_layers, mask_token, tap_field
from .medusa_tensors import block, output, read_layout

LEAST_LAYERS = 7
"""Of a target, so that an EAGLE-3 head's usual taps, 2, L//2 and L - 3, are three layers in ascending order."""


def eagle_misfits(target: Facts, draft: Facts) -> Sequence[str]:
    """An EAGLE-1/2 head reads [embedding, feature] and shares the target's embedding and output head."""
    shapes = plain_names(draft)
    problems = [*_other_verifier(target, draft), *_other_hidden(target, draft), *_other_vocabulary(target, draft)]
    hidden = number(target_body(target.config), "hidden_size")
    fc = shapes.get("fc.weight")
    if fc is None:
        problems.append("it has no fc.weight")
    elif hidden and fc != (hidden, 2 * hidden):
        problems.append(f"its fc.weight is {list(fc)} and an EAGLE-1/2 head needs {[hidden, 2 * hidden]}")
    if signs := [name for name in shapes if name == "d2t" or name.startswith("midlayer.")]:
        problems.append(f"it calls itself EAGLE-1/2 and holds {signs[0]}, which only EAGLE-3 heads have")
    return problems


def eagle3_misfits(target: Facts, draft: Facts) -> Sequence[str]:
    """An EAGLE-3 head reads several target layers and may have its own, smaller vocabulary."""
    shapes = plain_names(draft)
    problems = [*_other_verifier(target, draft), *_wrong_taps(target, draft), *_other_vocabulary(target, draft)]
    problems += _wrong_draft_vocabulary(target, draft)
    if "embed_tokens.weight" not in shapes or "lm_head.weight" not in shapes:
        problems += _other_hidden(target, draft)
    stated = number(draft.config, "target_hidden_size")
    hidden = number(target_body(target.config), "hidden_size")
    if stated and hidden and stated != hidden:
        problems.append(f"it was trained for hidden size {stated} and the target's is {hidden}")
    return problems


def dflash_misfits(target: Facts, draft: Facts) -> Sequence[str]:
    """A DFlash draft reads several target layers, and says how long its blocks are and what stands for a mask."""
    shapes = plain_names(draft)
    problems = [*_other_verifier(target, draft), *_other_vocabulary(target, draft)]
    problems += _wrong_draft_vocabulary(target, draft)
    if "embed_tokens.weight" not in shapes or "lm_head.weight" not in shapes:
        problems += _other_hidden(target, draft)
    try:
        return [*problems, *_wrong_block(target, draft)]
    except CheckpointError as error:  # a value of another kind
        return [*problems, f"its {error}"]


def medusa_misfits(target: Facts, draft: Facts) -> Sequence[str]:
    """Medusa heads read the target's last hidden state and say its tokens; their sizes are in their tensors alone."""
    shapes = plain_names(draft)
    layout = read_layout(shapes)
    if not layout.heads:
        return [f"it has no {block(0, 0, 'weight')}, with which Medusa heads begin"]
    problems, body = [], target_body(target.config)
    for name, key in ((block(0, 0, "weight"), "hidden_size"), (output(0, layout.blocks), "vocab_size")):
        rows, needed = _rows(draft, name), number(body, key)
        if rows and needed and rows != needed:
            problems.append(f"its {name} has {rows} rows and the target's {key} is {needed}")
    return problems


def standalone_misfits(target: Facts, draft: Facts) -> Sequence[str]:
    """A draft language model proposes token ids: it needs the target's vocabulary."""
    return list(_other_vocabulary(target, draft))


def _other_verifier(target: Facts, draft: Facts) -> Iterator[str]:
    verifier, named = verifier_architecture(draft), architecture_name(target.config)
    if verifier and named and verifier != named:
        yield f"it was trained for a {verifier} and the target is a {named}"


def _other_hidden(target: Facts, draft: Facts) -> Iterator[str]:
    ours = number(draft_body(draft.config), "hidden_size")
    theirs = number(target_body(target.config), "hidden_size")
    if ours and theirs and ours != theirs:
        yield (
            f"its hidden size is {ours} and the target's is {theirs}, "
            "and it shares the target's embedding or output head"
        )


def _other_vocabulary(target: Facts, draft: Facts) -> Iterator[str]:
    ours = number(draft_body(draft.config), "vocab_size")
    theirs = number(target_body(target.config), "vocab_size")
    pruned = {number(draft.config, "draft_vocab_size"), _rows(draft, "d2t")}
    # Some pruned heads write their own size into vocab_size; d2t then leads back to the target's.
    if ours and theirs and ours != theirs and ours not in pruned:
        yield f"its vocabulary has {ours} tokens and the target's {theirs}"


def _wrong_draft_vocabulary(target: Facts, draft: Facts) -> Iterator[str]:
    vocabulary = number(target_body(target.config), "vocab_size")
    mapped, head = _rows(draft, "d2t"), _rows(draft, "lm_head.weight")
    stated = number(draft.config, "draft_vocab_size")
    size = stated or mapped or head
    if not vocabulary or not size:
        return
    if size > vocabulary:
        yield f"its draft vocabulary has {size} tokens, more than the target's {vocabulary}"
    if size < vocabulary and mapped is None:
        yield f"its draft vocabulary has {size} of the target's {vocabulary} tokens and no d2t that maps them"
    if size < vocabulary and head is None:
        yield f"its draft vocabulary has {size} tokens and no lm_head of its own"
    for name, rows in (("d2t", mapped), ("lm_head.weight", head)):
        if rows is not None and rows != size:
            yield f"its draft vocabulary has {size} tokens and its {name} {rows} rows"


def _wrong_taps(target: Facts, draft: Facts) -> Iterator[str]:
    fc = plain_names(draft).get("fc.weight")
    hidden = number(target_body(target.config), "hidden_size")
    layers = number(target_body(target.config), "num_hidden_layers")
    if fc is None or len(fc) != 2:
        yield "it has no fc.weight that joins target layers"
        return
    if not hidden or not layers:
        return
    if fc[1] % hidden:
        yield f"its fc reads {fc[1]} values, which is no multiple of the target's hidden size {hidden}"
        return
    count, ids = fc[1] // hidden, tap_ids(draft.config)
    if ids is None and (other := other_tap_field(draft.config)):
        yield f"its config names target layers in {other}, which is not read: only {TAP_FIELD} is"
    elif ids is None and count != 3:
        yield f"its fc reads {count} target layers and its config does not say which"
    if ids is not None and len(ids) != count:
        yield f"its fc reads {count} target layers and its config names {len(ids)}"
    if ids is None and count == 3 and not other_tap_field(draft.config) and layers < LEAST_LAYERS:
        yield (
            f"its config does not say which target layers it reads, and the usual three are there in targets of "
            f"{LEAST_LAYERS} layers and more; this one has {layers}"
        )
    if ids is not None and all(isinstance(tap, int) for tap in ids) and len(set(ids)) < len(ids):
        yield f"its {TAP_FIELD} names a layer twice: {ids}"
    if wrong := [tap for tap in ids or () if not (isinstance(tap, int) and 0 <= tap <= layers)]:
        yield f"its {TAP_FIELD} names {wrong}, and the target has {layers} layers: 0 to {layers} are possible"


def _wrong_block(target: Facts, draft: Facts) -> Iterator[str]:
    size, mask = block_size(draft.config), mask_token(draft.config)
    vocabulary = number(target_body(target.config), "vocab_size")
    if size is None:
        yield f"its config does not say how many tokens a block has ({BLOCK_FIELD})"
    elif not 2 <= size <= LONGEST_DRAFT + 1:
        yield f"its blocks have {size} tokens ({BLOCK_FIELD}): 2 to {LONGEST_DRAFT + 1} are possible"
    if mask is None:
        yield f"its config does not say which token stands for a mask ({MASK_FIELD})"
    elif vocabulary and mask >= vocabulary:
        yield f"its {MASK_FIELD} is {mask} and the target's vocabulary ends at {vocabulary - 1}"
    layers, hidden = (number(target_body(target.config), key) for key in ("num_hidden_layers", "hidden_size"))
    own_layers, fc = number(draft_body(draft.config), "num_hidden_layers"), plain_names(draft).get("fc.weight")
    if fc is None or len(fc) != 2:
        yield "it has no fc.weight that joins target layers"
        return
    if not layers or not hidden or not own_layers:
        return
    taps, field = entered_layers(draft.config, target_layers=layers, draft_layers=own_layers), tap_field(draft.config)
    if fc[1] != len(taps) * hidden:
        yield (
            f"its fc reads {fc[1]} values, and the {len(taps)} layers it reads ({field}) of a target of hidden size "
            f"{hidden} give {len(taps) * hidden}"
        )
    if wrong := [tap for tap in taps if not 0 <= tap <= layers]:
        yield f"it reads what enters layers {wrong} ({field}), and the target has {layers} layers"


def _rows(draft: Facts, name: str) -> int | None:
    shape = plain_names(draft).get(name)
    return shape[0] if shape else None
