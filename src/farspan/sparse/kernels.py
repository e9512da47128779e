"""Attention of query pages over chosen pages, in Triton: forward, dQ, and dK with dV.

One tile of queries is rows of one query page and one head of keys and values: the r query heads
that share it lie one after the other, row = head * page + token. K and V are read where they lie.

    forward   one program per (tile, b, h): over the pages its query page chose
    delta     rowsum(dO * O), which the two others read
    dQ        the same program, from the out and lse of the whole softmax
    dK, dV    one program per (page, b, h): over the query pages that chose it and all r heads, in
              the order of `Inverse`; adds to the totals once. No atomics: the same bits each time

Written for Triton 3.6 to 3.9: pointers, not block pointers; keyword arguments; arguments in named
tuples (see kernel_calls.py).

Numbers: products are in the inputs' dtype with fp32 sums (`ieee`: no TF32 for fp32 inputs); scores,
softmax and totals are fp32. Scores are kept in base 2 (exp2 is one instruction); lse is natural.
A row that sees nothing has out 0 and lse -inf, and no gradient."""

import triton
import triton.language as tl

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _size(veiled):
    """An integer of `Sizes`."""
    return veiled >> 4


@triton.jit
def _load(x, offset, row, fits, shape: tl.constexpr):
    """Vectors at `offset` + row, [rows, padded_dim]; zeros where they do not fit."""
    d = tl.arange(0, shape.padded_dim)
    mask = fits[:, None] & (d < shape.head_dim)[None, :]
    return tl.load(x.base + offset + row[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, offset, row, fits, values, shape: tl.constexpr):
    d = tl.arange(0, shape.padded_dim)
    mask = fits[:, None] & (d < shape.head_dim)[None, :]
    tl.store(x.base + offset + row[:, None] + d[None, :], values, mask=mask)


@triton.jit
def _query_rows(query_page, tile, sizes, shape: tl.constexpr):
    """Head in the group, token in the chunk, and whether there is such a query, of a tile."""
    row = tile * shape.tile_queries + tl.arange(0, shape.tile_queries)
    head = row // shape.page
    token = query_page * shape.page + row % shape.page
    fits = (head < shape.group) & (token < _size(sizes.queries))
    return head.to(tl.int64), token.to(tl.int64), fits


@triton.jit
def _place(x, batch, kv_head, heads):
    """Where the first of `heads` heads of a group lies."""
    return batch.to(tl.int64) * x.batch + kv_head.to(tl.int64) * heads * x.head


@triton.jit
def _tile_of_program(sizes, shape: tl.constexpr):
    """Tile, query page, batch row and head of keys and values of a program of forward or dQ."""
    tiles: tl.constexpr = (shape.group * shape.page + shape.tile_queries - 1) // shape.tile_queries
    query_page = tl.program_id(0) // tiles
    row = tl.program_id(1)
    return tl.program_id(0) % tiles, query_page, row // sizes.kv_heads, row % sizes.kv_heads


@triton.jit
def _entries(query_page, sizes):
    """Where the choice of a program's query page begins."""
    row = tl.program_id(1).to(tl.int64) * _size(sizes.query_pages) + query_page
    return row * _size(sizes.chosen)


@triton.jit
def _chosen_keys(table, entries, step, sizes, shape: tl.constexpr):
    """Token in the sequence, token in the buffer, and whether there is such a key, of one step."""
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    page = tl.load(table.choice + entries + step // tiles)
    slot = tl.load(table.slots + entries + step // tiles)
    at = (step % tiles) * shape.tile_keys + tl.arange(0, shape.tile_keys)
    key = page * shape.page + at
    # No page is -1, whose keys are below 0.
    fits = (key >= 0) & (at < shape.page) & (key < _size(sizes.tokens))
    return key, slot.to(tl.int64) * shape.page + at, fits


@triton.jit
def _first_keys(first_key, batch, token, fits, sizes):
    row = batch.to(tl.int64) * _size(sizes.queries)
    return tl.load(first_key + row + token, mask=fits, other=0)


@triton.jit
def _row_values(of_rows, at, fits):
    """lse in base 2 and delta. A row without any key gets +inf, so that its weights are 0."""
    lse = tl.load(of_rows.lse + at, mask=fits, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse * LOG2E, tl.load(of_rows.delta + at, mask=fits, other=0.0)


@triton.jit
def forward_kernel(q, keys, values, out, lse, table, sizes, shape: tl.constexpr):
    tile, query_page, batch, kv_head = _tile_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, tile, sizes, shape)
    q_tile = _load(
        q, _place(q, batch, kv_head, shape.group), head * q.head + token * q.token, fits, shape
    )
    entries = _entries(query_page, sizes)
    k_place, v_place = _place(keys, batch, kv_head, 1), _place(values, batch, kv_head, 1)
    if table.first_key is not None:
        first = _first_keys(table.first_key, batch, token, fits, sizes)
    most = tl.full([shape.tile_queries], float("-inf"), tl.float32)
    total = tl.full([shape.tile_queries], 0.0, tl.float32)
    sums = tl.full([shape.tile_queries, shape.padded_dim], 0.0, tl.float32)
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    for step in tl.range(0, _size(sizes.chosen) * tiles, num_stages=shape.stages):
        key, at, there = _chosen_keys(table, entries, step, sizes, shape)
        k_tile = _load(keys, k_place, at * keys.token, there, shape)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (sizes.scale * LOG2E)
        seen = there[None, :]
        if table.first_key is not None:
            seen = seen & (key[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        # -inf - -inf is nan: rows that have seen nothing are compared with 0 instead.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = _load(values, v_place, at * values.token, there, shape)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        most = new_most
    seen_any = total > 0
    result = sums / tl.where(seen_any, total, 1.0)[:, None]
    place = _place(out, batch, kv_head, shape.group)
    rows = head * out.head + token * out.token
    _store(out, place, rows, fits, result.to(out.base.dtype.element_ty), shape)
    natural = tl.where(
        seen_any, (most + tl.log2(tl.where(seen_any, total, 1.0))) * LN2, float("-inf")
    )
    at_lse = (tl.program_id(1).to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
    tl.store(lse + at_lse, natural, mask=fits)


@triton.jit
def delta_kernel(dout, out, delta, sizes, shape: tl.constexpr):
    """delta = rowsum(dO * O), tile by tile: without the fp32 copies of dO and O."""
    tile, query_page, batch, kv_head = _tile_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, tile, sizes, shape)
    place, rows = _place(dout, batch, kv_head, shape.group), head * dout.head + token * dout.token
    dout_tile = _load(dout, place, rows, fits, shape).to(tl.float32)
    place, rows = _place(out, batch, kv_head, shape.group), head * out.head + token * out.token
    out_tile = _load(out, place, rows, fits, shape).to(tl.float32)
    at = (tl.program_id(1).to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
    tl.store(delta + at, tl.sum(dout_tile * out_tile, 1), mask=fits)


@triton.jit
def _load_queries(q, dout, of_rows, batch, kv_head, tile, sizes, shape: tl.constexpr):
    """One tile of a backward: q, dO, lse in base 2 and delta. `tile` is (query page, tile)."""
    head, token, fits = _query_rows(tile[0], tile[1], sizes, shape)
    rows = head * q.head + token * q.token
    q_tile = _load(q, _place(q, batch, kv_head, shape.group), rows, fits, shape)
    rows = head * dout.head + token * dout.token
    dout_tile = _load(dout, _place(dout, batch, kv_head, shape.group), rows, fits, shape)
    first_head = (batch.to(tl.int64) * sizes.kv_heads + kv_head) * shape.group
    lse, delta = _row_values(of_rows, (first_head + head) * _size(sizes.queries) + token, fits)
    return q_tile, dout_tile, lse, delta


@triton.jit
def dq_kernel(q, keys, values, dout, dq, given, sizes, shape: tl.constexpr):
    """`given` is (Softmax, Pages)."""
    of_rows, table = given[0], given[1]
    tile, query_page, batch, kv_head = _tile_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, tile, sizes, shape)
    q_tile, dout_tile, lse, delta = _load_queries(
        q, dout, of_rows, batch, kv_head, (query_page, tile), sizes, shape
    )
    entries = _entries(query_page, sizes)
    k_place, v_place = _place(keys, batch, kv_head, 1), _place(values, batch, kv_head, 1)
    if table.first_key is not None:
        first = _first_keys(table.first_key, batch, token, fits, sizes)
    sums = tl.full([shape.tile_queries, shape.padded_dim], 0.0, tl.float32)
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    for step in tl.range(0, _size(sizes.chosen) * tiles, num_stages=shape.stages):
        key, at, there = _chosen_keys(table, entries, step, sizes, shape)
        k_tile = _load(keys, k_place, at * keys.token, there, shape)
        v_tile = _load(values, v_place, at * values.token, there, shape)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (sizes.scale * LOG2E)
        seen = there[None, :]
        if table.first_key is not None:
            seen = seen & (key[None, :] >= first[:, None])
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) - lse[:, None])
        dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        sums += tl.dot(dscores.to(k_tile.dtype), k_tile, input_precision="ieee")
    place, rows = _place(dq, batch, kv_head, shape.group), head * dq.head + token * dq.token
    _store(dq, place, rows, fits, sums * sizes.scale, shape)


@triton.jit
def dkv_kernel(q, keys, values, dout, totals, given, sizes, shape: tl.constexpr):
    """`given` is (Softmax, Visits). Owns its keys of the totals: nobody else touches them."""
    of_rows, visits = given[0], given[1]
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    row = tl.load(visits.rows + tl.program_id(0) // tiles).to(tl.int64)
    start, stop = tl.load(visits.starts + row), tl.load(visits.starts + row + 1)
    if start == stop:
        return
    batch_head, slot = row // _size(sizes.slots), row % _size(sizes.slots)
    batch, kv_head = batch_head // sizes.kv_heads, batch_head % sizes.kv_heads
    at = tl.program_id(0) % tiles * shape.tile_keys + tl.arange(0, shape.tile_keys)
    key = tl.load(visits.pages + start) * shape.page + at
    there = (at < shape.page) & (key < _size(sizes.tokens))
    at = slot * shape.page + at
    k_tile = _load(keys, _place(keys, batch, kv_head, 1), at * keys.token, there, shape)
    v_tile = _load(values, _place(values, batch, kv_head, 1), at * values.token, there, shape)
    dk = tl.full([shape.tile_keys, shape.padded_dim], 0.0, tl.float32)
    dv = tl.full([shape.tile_keys, shape.padded_dim], 0.0, tl.float32)
    parts: tl.constexpr = (shape.group * shape.page + shape.tile_queries - 1) // shape.tile_queries
    for step in tl.range(start * parts, stop * parts, num_stages=shape.stages):
        query_page = tl.load(visits.query_pages + step // parts)
        q_tile, dout_tile, lse, delta = _load_queries(
            q, dout, of_rows, batch, kv_head, (query_page, step % parts), sizes, shape
        )
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * (sizes.scale * LOG2E)
        if visits.first_key is not None:
            _, token, fits = _query_rows(query_page, step % parts, sizes, shape)
            first = _first_keys(visits.first_key, batch, token, fits, sizes)
            scores = tl.where(key[:, None] >= first[None, :], scores, float("-inf"))
        # Keys that are not there have zeros for scores. Their sums are never stored.
        weights = tl.exp2(scores - lse[None, :])
        dv += tl.dot(weights.to(dout_tile.dtype), dout_tile, input_precision="ieee")
        dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        dscores = weights * (dweights - delta[None, :])
        dk += tl.dot(dscores.to(q_tile.dtype), q_tile, input_precision="ieee")
    place, rows = _place(totals.dk, batch, kv_head, 1), at * totals.dk.token
    dk = dk * sizes.scale + _load(totals.dk, place, rows, there, shape)
    _store(totals.dk, place, rows, there, dk, shape)
    place, rows = _place(totals.dv, batch, kv_head, 1), at * totals.dv.token
    _store(totals.dv, place, rows, there, dv + _load(totals.dv, place, rows, there, shape), shape)
