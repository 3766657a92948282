"""Cache writes and attention in plain operators, as design §5 found them equal in bits at any width and batch.

Query heads that share a key/value head are folded into rows: [B, kv, T · G, D]. A matrix product with one row
takes another path on the CPU, so with G = 1 each head is doubled and half of the answer dropped.
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import MICROSOFT, Builder


class AttentionLowering:
    """Lowers WriteCache, Attention and DraftAttention; what layers share (a mask, a slice) is made once."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._masks: dict[tuple[ir.Value, int], ir.Value] = {}
        self._lengths: dict[ir.Value, ir.Value] = {}
        self._visible: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def write(self, cache: ir.Value, update: ir.Value, start: ir.Value) -> ir.Value:
        """update [B, T, kv · D] into cache [B, kv, S, D] at start i64[B]."""
        heads, dim = _heads(cache)
        return self._builder.op("TensorScatter", [cache, self._per_head(update, heads, dim), start], axis=-2)

    def attend(self, q: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, *, scale: float) -> ir.Value:
        """q [B, T, heads · D] over the first L positions, mask [B, T, L] → [B, T, heads · Dv]."""
        group, rows = self._fold(q, keys)
        scores = self._scores(rows, self._slice(keys, mask), scale)
        weights = self._builder.op("Softmax", [self._masked(scores, mask, max(group, 2))], axis=-1)
        mixed = self._builder.op("MatMul", [weights, self._slice(values, mask)])
        return self._unfold(mixed, group, values)

    def attend_drafted(
        self,
        q: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        mask: ir.Value,
        new_keys: ir.Value,
        new_values: ir.Value,
        *,
        scale: float,
    ) -> ir.Value:
        """One query row over cache and drafted keys [B, N, kv · D], without copying the cache beside them."""
        op, const = self._builder.op, self._builder.constant
        (heads, dim), (_, value_dim) = _heads(keys), _heads(values)
        group, rows = self._fold(q, keys)
        cached = self._masked(self._scores(rows, self._slice(keys, mask), scale), mask, max(group, 2))
        drafted = self._scores(rows, self._per_head(new_keys, heads, dim), scale)
        weights = op("Softmax", [op("Concat", [cached, drafted], axis=-1)], axis=-1)
        length, end = self._length(mask), const([2**31])
        on_cache = op("Slice", [weights, const([0]), length, const([3])])
        on_drafted = op("Slice", [weights, length, end, const([3])])
        mixed = op(
            "Add",
            [
                op("MatMul", [on_cache, self._slice(values, mask)]),
                op("MatMul", [on_drafted, self._per_head(new_values, heads, value_dim)]),
            ],
        )
        return self._unfold(mixed, group, values)

    def _per_head(self, x: ir.Value, heads: int, dim: int) -> ir.Value:
        """[B, T, heads · D] → [B, heads, T, D]."""
        shaped = self._builder.op("Reshape", [x, self._builder.constant([0, 0, heads, dim])])
        return self._builder.op("Transpose", [shaped], perm=[0, 2, 1, 3])

    def _fold(self, q: ir.Value, keys: ir.Value) -> tuple[int, ir.Value]:
        """[B, T, kv · G · D] → G and [B, kv, T · max(G, 2), D]."""
        op, const = self._builder.op, self._builder.constant
        heads, dim = _heads(keys)
        group = _static(q, -1) // (heads * dim)
        rows = self._per_head(q, heads, group * dim)
        if group == 1:
            rows = op("Concat", [rows, rows], axis=-1)
        return group, op("Reshape", [rows, const([0, 0, -1, dim])])

    def _unfold(self, mixed: ir.Value, group: int, values: ir.Value) -> ir.Value:
        """[B, kv, T · max(G, 2), Dv] → [B, T, kv · G · Dv]."""
        op, const = self._builder.op, self._builder.constant
        heads, dim = _heads(values)
        rows = op("Reshape", [mixed, const([0, 0, -1, max(group, 2) * dim])])
        if group == 1:
            rows = op("Slice", [rows, const([0]), const([dim]), const([3])])
        return op("Reshape", [op("Transpose", [rows], perm=[0, 2, 1, 3]), const([0, 0, heads * group * dim])])

    def _scores(self, rows: ir.Value, keys: ir.Value, scale: float) -> ir.Value:
        return self._builder.op("FusedMatMul", [rows, keys], domain=MICROSOFT, transB=1, alpha=scale)

    def _masked(self, scores: ir.Value, mask: ir.Value, group: int) -> ir.Value:
        """Adds the mask [B, T, L], repeated for each of the G rows of a token."""
        op, const = self._builder.op, self._builder.constant
        if (mask, group) not in self._masks:
            rows = op("Expand", [op("Unsqueeze", [mask, const([2])]), const([1, 1, group, 1])])
            self._masks[mask, group] = op("Reshape", [rows, const([0, 1, -1, 0])])
        return op("Add", [scores, self._masks[mask, group]])

    def _slice(self, cache: ir.Value, mask: ir.Value) -> ir.Value:
        """The first L positions: what a CPU kernel reads costs time, whether it is masked or not."""
        if (cache, mask) not in self._visible:
            const = self._builder.constant
            self._visible[cache, mask] = self._builder.op("Slice", [cache, const([0]), self._length(mask), const([2])])
        return self._visible[cache, mask]

    def _length(self, mask: ir.Value) -> ir.Value:
        if mask not in self._lengths:
            self._lengths[mask] = self._builder.op("Shape", [mask], start=-1)
        return self._lengths[mask]


def _heads(cache: ir.Value) -> tuple[int, int]:
    """kv heads and head dimension of a cache [B, kv, S, D]."""
    return _static(cache, 1), _static(cache, 3)


def _static(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size
