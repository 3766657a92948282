"""Cache writes and attention in plain operators, as design §5 found them equal in bits at any width and batch.

Query heads that share a key/value head are folded into rows: [B, kv, G · T, D]. A matrix product with one row
takes another path on the CPU, so with G = 1 each head is doubled and half of the answer dropped.
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import MICROSOFT, Builder
from .lowering import merge_heads, static_size

BLOCK = 128
"""Terms of a sum that MLAS adds in one go whatever the other sizes (MLAS_SGEMM_STRIDEK)."""


class AttentionLowering:
    """Lowers WriteCache, Attention and DraftAttention; what layers share (a mask, a slice) is made once."""

    def __init__(self, builder: Builder, *, whole_caches: bool) -> None:
        """`whole_caches`: a cache has L positions, no more, so that nothing is cut from it."""
        self._builder, self._whole = builder, whole_caches
        self._masks: dict[tuple[ir.Value, int], ir.Value] = {}
        self._lengths: dict[ir.Value, ir.Value] = {}
        self._visible: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def write(self, cache: ir.Value, update: ir.Value, start: ir.Value) -> ir.Value:
        """update [B, kv, T, D] into cache [B, kv, S, D] at start i64[B]."""
        return self._builder.op("TensorScatter", [cache, update, start], axis=-2)

    def attend(self, q: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, *, scale: float) -> ir.Value:
        """q [B, heads, T, D] over the first L positions, mask [B, T, L] → [B, T, heads · Dv]."""
        group, rows = self._fold(q, keys)
        scores = self._scores(rows, self._slice(keys, mask), scale)
        weights = self._builder.op("Softmax", [self._masked(scores, mask, group)], axis=-1)
        mixed = self._builder.op("MatMul", [weights, self._slice(values, mask)])
        return self._unfold(mixed, q, values)

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
        """One query row over cache and drafted keys [B, kv, N, D], without copying the cache beside them."""
        op, const = self._builder.op, self._builder.constant
        group, rows = self._fold(q, keys)
        cached = self._masked(self._scores(rows, self._slice(keys, mask), scale), mask, group)
        drafted = self._scores(rows, new_keys, scale)
        weights = op("Softmax", [op("Concat", [cached, drafted], axis=-1)], axis=-1)
        length, end = self._length(mask), const([2**31])
        on_cache = op("Slice", [weights, const([0]), length, const([3])])
        on_drafted = op("Slice", [weights, length, end, const([3])])
        mixed = [op("MatMul", [on_cache, self._slice(values, mask)]), op("MatMul", [on_drafted, new_values])]
        return self._unfold(op("Add", mixed), q, values)

    def _fold(self, q: ir.Value, keys: ir.Value) -> tuple[int, ir.Value]:
        """q [B, kv · G, T, D] → rows of each key head, and [B, kv, that many · T, D]."""
        op, const = self._builder.op, self._builder.constant
        heads = static_size(keys, 1)
        group = static_size(q, 1) // heads
        if group > 1:
            return group, op("Reshape", [q, const([0, heads, -1, static_size(q, 3)])])
        return 2, op("Concat", [q, q], axis=2)

    def _unfold(self, mixed: ir.Value, q: ir.Value, values: ir.Value) -> ir.Value:
        """[B, kv, G · T, Dv] → [B, T, kv · G · Dv]."""
        op, const = self._builder.op, self._builder.constant
        heads, dim = static_size(q, 1), static_size(values, 3)
        if heads == static_size(values, 1):  # doubled: keep the first half
            mixed, _ = self._builder.op_with_outputs("Split", [mixed], 2, axis=2, num_outputs=2)
        else:
            mixed = op("Reshape", [mixed, const([0, heads, -1, dim])])
        return merge_heads(self._builder, mixed, heads * dim)

    def _scores(self, rows: ir.Value, keys: ir.Value, scale: float) -> ir.Value:
        """rows [B, kv, M, D] · keys [B, kv, L, D]ᵀ → [B, kv, M, L].

        Of a longer sum than BLOCK terms the CPU's kernel makes partial sums, and how many depends on L: two blocks
        of our own keep the bits.
        """
        op, dim = self._builder.op, static_size(keys, 3)
        if dim <= BLOCK:
            return op("FusedMatMul", [rows, keys], domain=MICROSOFT, transB=1, alpha=scale)
        const, total = self._builder.constant, None
        for start in range(0, dim, BLOCK):
            ends = [const([start]), const([min(start + BLOCK, dim)]), const([3])]
            parts = [op("Slice", [operand, *ends]) for operand in (rows, keys)]
            product = op("FusedMatMul", parts, domain=MICROSOFT, transB=1, alpha=scale)
            total = product if total is None else op("Add", [total, product])
        assert total is not None
        return total

    def _masked(self, scores: ir.Value, mask: ir.Value, group: int) -> ir.Value:
        """Adds the mask [B, T, L], repeated for each of the G heads of a key head."""
        op, const = self._builder.op, self._builder.constant
        if (mask, group) not in self._masks:
            rows = op("Expand", [op("Unsqueeze", [mask, const([1])]), const([1, group, 1, 1])])
            self._masks[mask, group] = op("Reshape", [rows, const([0, 1, -1, 0])])
        return op("Add", [scores, self._masks[mask, group]])

    def _slice(self, cache: ir.Value, mask: ir.Value) -> ir.Value:
        """The first L positions: what a kernel reads costs time, whether it is masked or not."""
        if self._whole:
            return cache
        if (cache, mask) not in self._visible:
            const = self._builder.constant
            visible = self._builder.op("Slice", [cache, const([0]), self._length(mask), const([2])])
            assert cache.shape is not None
            visible.type, visible.shape = cache.type, ir.Shape([*cache.shape[:2], "visible", cache.shape[3]])
            self._visible[cache, mask] = visible
        return self._visible[cache, mask]

    def _length(self, mask: ir.Value) -> ir.Value:
        if mask not in self._lengths:
            self._lengths[mask] = self._builder.op("Shape", [mask], start=-1)
        return self._lengths[mask]
