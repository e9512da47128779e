"""Attention of query pages over chosen pages, in Triton: forward, dQ, and dK with dV.

One tile of queries is rows of one query page and one head of keys and values: the r query heads
that share it lie one after the other, row = head * query_page + token. K and V are read in place. A
tile of vectors is a tuple of the parts of their width (`PageShape`): a product of two is the sum
over parts, and sums of vectors are a tuple, too.

    forward   one program per (tile, b, h): over the pages its query page chose
    rows      per query, for the two others: lse, rowsum(dO * O), its first key
    dQ        the same program, from the out and lse of the whole softmax
    dK, dV    one program per (page, b, h): over the query pages that chose it and all r heads, in
              the order of `Inverse`; adds to the totals once. No atomics: the same bits each time

The loads of a loop run during the products of the two tiles before. The compiler does so only if
addresses do not come from a load of the same iteration: the number of the next page is carried from
the previous iteration.

Written for Triton 3.6 to 3.9: pointers, not block pointers; keyword arguments; arguments in named
tuples (see kernel_calls.py).

Numbers: products are in the inputs' dtype with fp32 sums (`ieee`: no TF32 for fp32 inputs); scores,
softmax and totals are fp32. Scores are kept in base 2 (exp2 is one instruction); lse is natural. A
row that sees no key has out 0 and lse -inf, and no gradient.
"""

import triton
import triton.language as tl

# Triton reads annotations itself: only tl.constexpr may stand there. A tuple grows by parts.
# mypy: disable-error-code="no-untyped-def,assignment"


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOWHERE = tl.constexpr(2**20)  # a query page after every chunk


@triton.jit
def _size(veiled):
    """Decode an integer argument of a kernel, which `veiled` encoded."""
    return veiled >> 4


@triton.jit
def _vectors(x, offset, row, fits, part: tl.constexpr, shape: tl.constexpr):
    """Return the addresses of one part (of the width) of the vectors in these rows, and a mask."""
    d = part * shape.parts[0] + tl.arange(0, shape.parts[part])
    mask = fits[:, None]
    if part * shape.parts[0] + shape.parts[part] > shape.head_dim:
        mask = mask & (d < shape.head_dim)[None, :]
    return x.base + offset + row[:, None] + d[None, :], mask


@triton.jit
def _load(x, offset, row, fits, shape: tl.constexpr):
    """Load vectors as a tuple of the parts of their width; zeros for rows outside `fits`."""
    tile = ()
    for part in tl.static_range(len(shape.parts)):
        at, mask = _vectors(x, offset, row, fits, part, shape)
        tile += (tl.load(at, mask=mask, other=0.0),)
    return tile


@triton.jit
def _store(x, offset, row, fits, tile, shape: tl.constexpr):
    for part in tl.static_range(len(shape.parts)):
        at, mask = _vectors(x, offset, row, fits, part, shape)
        tl.store(at, tile[part], mask=mask)


@triton.jit
def _query_rows(query_page, row, sizes, shape: tl.constexpr):
    """Return each tile row's query head within its group, its token in the chunk, and whether the
    row exists. `query_page` is one number, or one for each row."""
    head = row // shape.query_page
    token = query_page * shape.query_page + row % shape.query_page
    fits = (head < shape.group) & (token < _size(sizes.queries))
    return head.to(tl.int64), token.to(tl.int64), fits


@triton.jit
def _place(x, batch, kv_head, heads):
    """Return the offset, in elements, of the first of `heads` heads that share a KV head."""
    return batch.to(tl.int64) * x.batch + kv_head.to(tl.int64) * heads * x.head


@triton.jit
def _rows_of_program(sizes, shape: tl.constexpr):
    """Return a forward or dQ program's rows, query page, batch row and key-value head."""
    rows: tl.constexpr = shape.group * shape.query_page
    tiles: tl.constexpr = (rows + shape.tile_queries - 1) // shape.tile_queries
    tile, query_page = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = tile * shape.tile_queries + tl.arange(0, shape.tile_queries)
    of_batch = tl.program_id(1)
    return row, query_page, of_batch // sizes.kv_heads, of_batch % sizes.kv_heads


@triton.jit
def _entries(table, query_page, sizes):
    """Return which chosen pages (entries) a query page reads: the first, and their number."""
    row = tl.program_id(1).to(tl.int64) * _size(sizes.query_pages) + query_page
    first, count = row * _size(sizes.chosen), _size(sizes.chosen)
    if table.runs is not None:
        first += tl.load(table.runs + 2 * row)
        count = tl.load(table.runs + 2 * row + 1)
    return first, count


@triton.jit
def _chosen_page(table, entry):
    """Return the page in an entry of the choice (-1: none), and the page's place in the buffer."""
    page = tl.load(table.choice + entry)
    slot = page
    if table.slots is not None:
        slot = tl.load(table.slots + entry)
    return page, slot


@triton.jit
def _keys_of(page, slot, tile, sizes, shape: tl.constexpr):
    """Return a tile's first token in the sequence and in the buffer, and a mask of its keys."""
    first = tile * shape.tile_keys
    count = tl.where(page < 0, 0, tl.minimum(shape.page, _size(sizes.tokens) - page * shape.page))
    fits = tl.arange(0, shape.tile_keys) < count - first
    return page * shape.page + first, slot.to(tl.int64) * shape.page + first, fits


@triton.jit
def _first_keys(first_key, batch, token, fits, sizes):
    row = batch.to(tl.int64) * _size(sizes.queries)
    return tl.load(first_key + row + token, mask=fits, other=0)


@triton.jit
def _product(a, b, start):
    """Return a @ b.T + start (None: 0). In fp32, used for bit-exact checks, add `start` last."""
    late: tl.constexpr = start is not None and a[0].dtype == tl.float32
    product = None if late else start
    for part in tl.static_range(len(a)):
        product = tl.dot(a[part], tl.trans(b[part]), product, input_precision="ieee")
    if late:
        product += start
    return product


@triton.jit
def _zeros(rows: tl.constexpr, tile):
    return [tl.full([rows, part.shape[1]], 0.0, tl.float32) for part in tile]


@triton.jit
def _add_product(sums, weights, tile):
    """Return sums + weights @ tile, by parts of the tile's width (such as 80 = 64 + 16), the last
    part first."""
    # With few rows Triton distributes all products of a loop over warps as the last one requires.
    # Were that 16 x 16, four warps would repeat its work: width 80 would cost 2.5 times width 128.
    weights, added = weights.to(tile[0].dtype), ()
    for part in tl.static_range(len(tile) - 1, -1, -1):
        sum_of_part = tl.dot(weights, tile[part], sums[part], input_precision="ieee")
        added = (sum_of_part,) + added  # noqa: RUF005 -- Triton has no star
    return added


@triton.jit
def forward_kernel(q, keys, values, out, lse, table, sizes, shape: tl.constexpr):
    row, query_page, batch, kv_head = _rows_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, row, sizes, shape)
    q_tile = _load(
        q, _place(q, batch, kv_head, shape.group), head * q.head + token * q.token, fits, shape
    )
    k_place, v_place = _place(keys, batch, kv_head, 1), _place(values, batch, kv_head, 1)
    if table.first_key is not None:
        first = _first_keys(table.first_key, batch, token, fits, sizes)
    most = tl.full([shape.tile_queries], float("-inf"), tl.float32)
    total = tl.full([shape.tile_queries], 0.0, tl.float32)
    sums = _zeros(shape.tile_queries, q_tile)
    scale = sizes.scale * LOG2E
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    within = tl.arange(0, shape.tile_keys)
    entries, count = _entries(table, query_page, sizes)
    last = count * tiles - 1
    page, slot = _chosen_page(table, entries)
    for step in tl.range(0, last + 1, num_stages=shape.stages):
        key, at, there = _keys_of(page, slot, step % tiles, sizes, shape)
        page, slot = _chosen_page(table, entries + tl.minimum(step + 1, last) // tiles)
        k_tile = _load(keys, k_place + at * keys.token, within * keys.token, there, shape)
        scores = _product(q_tile, k_tile, None) * scale
        seen = there[None, :]
        if table.first_key is not None:
            seen = seen & (key + within[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        # -inf - -inf is nan: rows without visible keys so far are compared with 0 instead.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = _load(values, v_place + at * values.token, within * values.token, there, shape)
        sums = [part * shrink[:, None] for part in sums]
        sums = _add_product(sums, weights, v_tile)
        most = new_most
    seen_any = total > 0
    result = [part / tl.where(seen_any, total, 1.0)[:, None] for part in sums]
    place = _place(out, batch, kv_head, shape.group)
    rows = head * out.head + token * out.token
    result = [part.to(out.base.dtype.element_ty) for part in result]
    _store(out, place, rows, fits, result, shape)
    natural = tl.where(
        seen_any, (most + tl.log2(tl.where(seen_any, total, 1.0))) * LN2, float("-inf")
    )
    at_lse = (tl.program_id(1).to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
    tl.store(lse + at_lse, natural, mask=fits)


@triton.jit
def rows_kernel(dout, out, lse, first_key, rows, sizes, shape: tl.constexpr):
    """Store -lse / scale, -rowsum(dO * O) and the first visible key of each query for dQ, dK and dV
    kernels, without fp32 copies of dO and O. Without keys the first is -inf: weights are 0."""
    row, query_page, batch, kv_head = _rows_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, row, sizes, shape)
    dout_tile, out_tile = _load_both(dout, out, batch, kv_head, head, token, fits, shape)
    delta = tl.sum(dout_tile[0].to(tl.float32) * out_tile[0].to(tl.float32), 1)
    for part in tl.static_range(1, len(shape.parts)):
        delta += tl.sum(dout_tile[part].to(tl.float32) * out_tile[part].to(tl.float32), 1)
    at = (tl.program_id(1).to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
    natural = tl.load(lse + at, mask=fits, other=0.0)
    unseen = natural == float("-inf")
    tl.store(rows + 4 * at, tl.where(unseen, natural, -natural / sizes.scale), mask=fits)
    tl.store(rows + 4 * at + 1, -delta, mask=fits)
    if first_key is not None:
        first = _first_keys(first_key, batch, token, fits, sizes)
        tl.store(rows + 4 * at + 2, first.to(tl.float32, bitcast=True), mask=fits)


@triton.jit
def _row_values(rows, offset, row, fits):
    """Return what `rows_kernel` stored per query: -lse / scale, -rowsum(dO * O) and the first
    visible key; zeros for rows outside `fits`."""
    # One load of 16 bytes per query: three tensors would take three times the copies of four bytes,
    # and their addresses. Products that start from these values save a subtraction's registers.
    at = rows + offset * 4 + row[:, None] * 4 + tl.arange(0, 4)[None, :]
    four = tl.load(at, mask=fits[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(four, [four.shape[0], 2, 2]))
    lse, first = tl.split(even)
    delta, _ = tl.split(odd)
    return lse, delta, first.to(tl.int32, bitcast=True)


@triton.jit
def _load_both(x, y, batch, kv_head, head, token, fits, shape: tl.constexpr):
    place, rows = _place(x, batch, kv_head, shape.group), head * x.head + token * x.token
    x_tile = _load(x, place, rows, fits, shape)
    place, rows = _place(y, batch, kv_head, shape.group), head * y.head + token * y.token
    return x_tile, _load(y, place, rows, fits, shape)


@triton.jit
def dq_kernel(q, keys, values, dout, dq, rows, table, sizes, shape: tl.constexpr):
    row, query_page, batch, kv_head = _rows_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, row, sizes, shape)
    q_tile, dout_tile = _load_both(q, dout, batch, kv_head, head, token, fits, shape)
    at_row = tl.program_id(1).to(tl.int64) * shape.group * _size(sizes.queries)
    lse, delta, first = _row_values(rows, at_row, head * _size(sizes.queries) + token, fits)
    k_place, v_place = _place(keys, batch, kv_head, 1), _place(values, batch, kv_head, 1)
    sums = _zeros(shape.tile_queries, q_tile)
    scale = sizes.scale * LOG2E
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    within = tl.arange(0, shape.tile_keys)
    entries, count = _entries(table, query_page, sizes)
    last = count * tiles - 1
    page, slot = _chosen_page(table, entries)
    for step in tl.range(0, last + 1, num_stages=shape.stages):
        key, at, there = _keys_of(page, slot, step % tiles, sizes, shape)
        page, slot = _chosen_page(table, entries + tl.minimum(step + 1, last) // tiles)
        k_tile = _load(keys, k_place + at * keys.token, within * keys.token, there, shape)
        v_tile = _load(values, v_place + at * values.token, within * values.token, there, shape)
        sum_from = tl.broadcast_to(lse[:, None], [shape.tile_queries, shape.tile_keys])
        scores = _product(q_tile, k_tile, sum_from) * scale
        seen = there[None, :]
        if table.first_key is not None:
            seen = seen & (key + within[None, :] >= first[:, None])
        weights = tl.exp2(tl.where(seen, scores, float("-inf")))
        sum_from = tl.broadcast_to(delta[:, None], [shape.tile_queries, shape.tile_keys])
        dscores = weights * _product(dout_tile, v_tile, sum_from)
        sums = _add_product(sums, dscores, k_tile)
    place, at_rows = _place(dq, batch, kv_head, shape.group), head * dq.head + token * dq.token
    _store(dq, place, at_rows, fits, [part * sizes.scale for part in sums], shape)


@triton.jit
def _visitors(visits, start, stop, step, shape: tl.constexpr):
    """Return the query page of each row in tile number `step`, or one number if all rows have the
    same. Tiles hold the query pages that chose one page of keys; rows after the last of these get
    the number of a query page without queries."""
    rows: tl.constexpr = shape.group * shape.query_page
    if rows >= shape.tile_queries:
        parts: tl.constexpr = (rows + shape.tile_queries - 1) // shape.tile_queries
        query_page = tl.load(visits.query_pages + tl.minimum(start + step // parts, stop - 1))
    else:
        row = step * shape.tile_queries + tl.arange(0, shape.tile_queries)
        at = start + row // rows
        query_page = tl.load(visits.query_pages + at, mask=at < stop, other=NOWHERE)
    return query_page


@triton.jit
def _rows_of_tile(step, shape: tl.constexpr):
    """Return a tile's first row, as query head within its group and token within its query page,
    and the offsets (heads, tokens) of all rows from it. The offsets are the same for all tiles,
    unless a tile has several query pages or cuts heads unevenly."""
    rows: tl.constexpr = shape.group * shape.query_page
    parts: tl.constexpr = (rows + shape.tile_queries - 1) // shape.tile_queries
    part, within = step % parts, tl.arange(0, shape.tile_queries)
    if shape.query_page % shape.tile_queries == 0:
        of_head: tl.constexpr = shape.query_page // shape.tile_queries
        head, token = part // of_head, part % of_head * shape.tile_queries
        heads, tokens = 0 * within, within
    elif rows >= shape.tile_queries and shape.tile_queries % shape.query_page == 0:
        head, token = part * (shape.tile_queries // shape.query_page), 0 * part
        heads, tokens = within // shape.query_page, within % shape.query_page
    else:
        row = part * shape.tile_queries + within
        if rows < shape.tile_queries:
            row = (step * shape.tile_queries + within) % rows
        head, token = 0 * part, 0 * part
        heads, tokens = row // shape.query_page, row % shape.query_page
    return head, token, heads, tokens


@triton.jit
def _rows_from(x, place, head, token, shape: tl.constexpr):
    """Return the offset of a tile's first row, or of each row if the tile spans query pages."""
    at = place + tl.cast(head, tl.int64) * x.head + tl.cast(token, tl.int64) * x.token
    if shape.group * shape.query_page < shape.tile_queries:
        at = at[:, None]
    return at


@triton.jit
def _owned(visits, row, start, sizes, shape: tl.constexpr):
    """Return the keys for which a Triton program sums dK and dV: batch row, KV head, first token in
    the sequence and in the buffer, and a mask of the keys that exist."""
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    batch_head, slot = row // _size(sizes.slots), row % _size(sizes.slots)
    page = tl.load(visits.pages + start)
    key, at, there = _keys_of(page, slot, tl.program_id(0) % tiles, sizes, shape)
    return batch_head // sizes.kv_heads, batch_head % sizes.kv_heads, key, at, there


@triton.jit
def _add(total, sums, visits, tiles: tl.constexpr, sizes, shape: tl.constexpr):
    """Add a Triton program's sums of dK or dV to the totals of its keys."""
    # Read again (`volatile`): addresses held through the loop would cost 20 registers too many.
    row = tl.load(visits.rows + tl.program_id(0) // tiles, volatile=True).to(tl.int64)
    start = tl.load(visits.starts + row)
    batch, kv_head, _, at, there = _owned(visits, row, start, sizes, shape)
    place = _place(total, batch, kv_head, 1) + at * total.token
    rows = tl.arange(0, shape.tile_keys) * total.token
    for part in tl.static_range(len(shape.parts)):
        at, mask = _vectors(total, place, rows, there, part, shape)
        tl.store(at, sums[part] + tl.load(at, mask=mask, other=0.0), mask=mask)


@triton.jit
def dkv_kernel(q, keys, values, dout, totals, rows, visits, sizes, shape: tl.constexpr):
    """Compute dK and dV for a tile of a page's keys, which no other Triton program writes."""
    tiles: tl.constexpr = (shape.page + shape.tile_keys - 1) // shape.tile_keys
    row = tl.load(visits.rows + tl.program_id(0) // tiles).to(tl.int64)
    start, stop = tl.load(visits.starts + row), tl.load(visits.starts + row + 1)
    if start == stop:
        return
    batch, kv_head, key, at, there = _owned(visits, row, start, sizes, shape)
    within = tl.arange(0, shape.tile_keys)
    place = _place(keys, batch, kv_head, 1) + at * keys.token
    k_tile = _load(keys, place, within * keys.token, there, shape)
    place = _place(values, batch, kv_head, 1) + at * values.token
    v_tile = _load(values, place, within * values.token, there, shape)
    dk, dv = _zeros(shape.tile_keys, k_tile), _zeros(shape.tile_keys, v_tile)
    scale = sizes.scale * LOG2E
    q_place = _place(q, batch, kv_head, shape.group)
    dout_place = _place(dout, batch, kv_head, shape.group)
    row_place = (batch * sizes.kv_heads + kv_head) * shape.group * _size(sizes.queries)
    of_page: tl.constexpr = shape.group * shape.query_page
    steps = (stop - start) * ((of_page + shape.tile_queries - 1) // shape.tile_queries)
    if of_page < shape.tile_queries:
        steps = ((stop - start) * of_page + shape.tile_queries - 1) // shape.tile_queries
    if len(shape.parts) > 1:
        # Zeros for a loop without iterations would follow it; ptxas would wait for products.
        steps = tl.maximum(steps, 1)
    query_page = _visitors(visits, start, stop, 0, shape)
    for step in tl.range(0, steps, num_stages=shape.stages):
        head, token, heads, tokens = _rows_of_tile(step, shape)
        token += query_page * shape.query_page
        query_page = _visitors(visits, start, stop, step + 1, shape)
        fits = tokens < _size(sizes.queries) - token
        if of_page > shape.tile_queries and of_page % shape.tile_queries != 0:
            fits = fits & (heads < shape.group - head)
        from_row = heads * q.head + tokens * q.token
        q_tile = _load(q, _rows_from(q, q_place, head, token, shape), from_row, fits, shape)
        if not shape.alike:
            from_row = heads * dout.head + tokens * dout.token
        at_dout = _rows_from(dout, dout_place, head, token, shape)
        dout_tile = _load(dout, at_dout, from_row, fits, shape)
        at_row = row_place + tl.cast(head, tl.int64) * _size(sizes.queries) + token
        if of_page < shape.tile_queries:
            at_row = at_row[:, None]
        lse, delta, first = _row_values(rows, at_row, heads * _size(sizes.queries) + tokens, fits)
        # Missing keys are zeros in products. Their sums are never stored.
        sum_from = tl.broadcast_to(lse[None, :], [shape.tile_keys, shape.tile_queries])
        scores = _product(k_tile, q_tile, sum_from) * scale
        if visits.first_key is not None:
            scores = tl.where((key + within)[:, None] >= first[None, :], scores, float("-inf"))
        weights = tl.exp2(scores)
        sum_from = tl.broadcast_to(delta[None, :], [shape.tile_keys, shape.tile_queries])
        dscores = weights * _product(v_tile, dout_tile, sum_from)
        # These two come last: weights and their gradients are 32 registers as bf16, and 64 as fp32.
        dv = _add_product(dv, weights, dout_tile)
        dk = _add_product(dk, dscores, q_tile)
    _add(totals.dk, [part * sizes.scale for part in dk], visits, tiles, sizes, shape)
    _add(totals.dv, dv, visits, tiles, sizes, shape)


# -- votes ----------------------------------------------------------------------------------------
#
# Of each query for pages, in proportion to exp(score); a page's score is the largest of its
# representatives'. Two walks over the representatives write nothing as large as the scores:
#
#     lse     one program per (tile of queries, b, h): the log of the sum over all pages, base 2
#     votes   one program per (tile of pages, query page, b, h): the sum over its queries, or the
#             largest; without an lse, the largest score
#
# Pages are all there are, or those of the superpages of a page of queries.


@triton.jit
def _pages(superpages, query_page, column, sizes, shape: tl.constexpr):
    """Return the page of each column of votes; for columns after the last, one above all pages."""
    page = column
    if superpages is not None:
        each = _size(sizes.columns) // shape.superpage
        row = tl.program_id(1).to(tl.int64) * _size(sizes.query_pages) + query_page
        there = column < _size(sizes.columns)
        at = superpages + row * each + column // shape.superpage
        page = tl.load(at, mask=there, other=0) * shape.superpage + column % shape.superpage
        page = tl.where(there, page, _size(sizes.pages))
    return page


@triton.jit
def _best_scores(q_tile, representatives, place, page, sizes, shape: tl.constexpr):
    """Return the scores of a tile's queries for its pages, [tile_queries, tile_keys], in base 2:
    for each page the largest over the keys that represent it."""
    row = (page * shape.each).to(tl.int64) * representatives.token
    there = page < _size(sizes.pages)
    if shape.each == 1:
        tile = _load(representatives, place, row, there, shape)
        best = _product(q_tile, tile, None)
    else:
        best = tl.full([shape.tile_queries, shape.tile_keys], float("-inf"), tl.float32)
        for which in tl.range(0, shape.each, num_stages=shape.stages):
            at = place + which * representatives.token
            tile = _load(representatives, at, row, there, shape)
            best = tl.maximum(best, _product(q_tile, tile, None))
    return best * (sizes.scale * LOG2E)


@triton.jit
def _seen_pages(first_key, batch, token, fits, page, sizes, shape: tl.constexpr):
    """Return a mask of the pages that exist and hold a key visible to the query."""
    seen = (page < _size(sizes.pages))[None, :]
    if first_key is not None:
        first = _first_keys(first_key, batch, token, fits, sizes) // shape.page
        seen = seen & (_size(sizes.first) + page[None, :] >= first[:, None])
    return seen


@triton.jit
def vote_lse_kernel(q, representatives, first_key, superpages, lse, sizes, shape: tl.constexpr):
    row, query_page, batch, kv_head = _rows_of_program(sizes, shape)
    head, token, fits = _query_rows(query_page, row, sizes, shape)
    rows = head * q.head + token * q.token
    q_tile = _load(q, _place(q, batch, kv_head, shape.group), rows, fits, shape)
    place = _place(representatives, batch, kv_head, 1)
    most = tl.full([shape.tile_queries], float("-inf"), tl.float32)
    total = tl.full([shape.tile_queries], 0.0, tl.float32)
    ahead: tl.constexpr = shape.stages if shape.each == 1 else 1
    tiles = (_size(sizes.columns) + shape.tile_keys - 1) // shape.tile_keys
    for tile in tl.range(0, tiles, num_stages=ahead):
        column = tile * shape.tile_keys + tl.arange(0, shape.tile_keys)
        page = _pages(superpages, query_page, column, sizes, shape)
        scores = _best_scores(q_tile, representatives, place, page, sizes, shape)
        seen = _seen_pages(first_key, batch, token, fits, page, sizes, shape)
        scores = tl.where(seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        most = new_most
    # A query that sees no page does not vote: its weights are exp2(-inf).
    found = most + tl.log2(tl.where(total > 0, total, 1.0))
    found = tl.where(total > 0, found, float("inf"))
    at = (tl.program_id(1).to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
    tl.store(lse + at, found, mask=fits)


@triton.jit
def vote_kernel(q, representatives, first_key, superpages, lse, votes, sizes, shape: tl.constexpr):
    tiles = (_size(sizes.columns) + shape.tile_keys - 1) // shape.tile_keys
    tile, query_page = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    of_batch = tl.program_id(1)
    batch, kv_head = of_batch // sizes.kv_heads, of_batch % sizes.kv_heads
    column = tile * shape.tile_keys + tl.arange(0, shape.tile_keys)
    page = _pages(superpages, query_page, column, sizes, shape)
    place = _place(representatives, batch, kv_head, 1)
    least: tl.constexpr = float("-inf") if lse is None else 0.0
    sums = tl.full([shape.tile_queries, shape.tile_keys], least, tl.float32)
    parts: tl.constexpr = (
        shape.group * shape.query_page + shape.tile_queries - 1
    ) // shape.tile_queries
    for part in tl.range(0, parts, num_stages=1):
        row = part * shape.tile_queries + tl.arange(0, shape.tile_queries)
        head, token, fits = _query_rows(query_page, row, sizes, shape)
        rows = head * q.head + token * q.token
        q_tile = _load(q, _place(q, batch, kv_head, shape.group), rows, fits, shape)
        scores = _best_scores(q_tile, representatives, place, page, sizes, shape)
        seen = _seen_pages(first_key, batch, token, fits, page, sizes, shape)
        if lse is None:
            weights = tl.where(seen & fits[:, None], scores * LN2, float("-inf"))
        else:
            at = (of_batch.to(tl.int64) * shape.group + head) * _size(sizes.queries) + token
            base = tl.load(lse + at, mask=fits, other=float("inf"))
            weights = tl.exp2(tl.where(seen, scores - base[:, None], float("-inf")))
        sums = tl.maximum(sums, weights) if shape.largest else sums + weights
    row = of_batch.to(tl.int64) * _size(sizes.query_pages) + query_page
    at = row * _size(sizes.columns) + column
    found = tl.max(sums, 0) if shape.largest else tl.sum(sums, 0)
    tl.store(votes + at, found, mask=column < _size(sizes.columns))
