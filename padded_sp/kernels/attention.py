"""Triton kernels of attention on packs, forward and backward.

A program works on one tile of one head: some tokens of one sequence, or all tokens of several short
ones. Tiles come as lists (``backends/tiles.py``), so that there is no work on pads and none for
empty blocks. Tokens are counted without pads; where they lie in memory a tile says by a shift, or,
for several sequences, an index. Pad rows are neither read nor written.

No two programs add to one number: results are the same bits at every run. Scores are kept in units
of log2. Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (that an int is a tl.constexpr here, and a sum a tensor, Triton's types do not say)

import triton
import triton.language as tl


@triton.jit
def _load(base, places, columns, inside, WIDTH: tl.constexpr):
    """Of each place WIDTH elements; zeros where it is not ``inside``, if that is not None."""
    at = base + places[:, None] + columns[None, :]
    if columns.shape[0] > WIDTH:
        mask = (columns < WIDTH)[None, :]
        if inside is not None:
            mask = mask & inside[:, None]
        x = tl.load(at, mask=mask, other=0.0)
    elif inside is not None:
        x = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _store(base, values, places, columns, inside, WIDTH: tl.constexpr):
    mask = inside[:, None]
    if columns.shape[0] > WIDTH:
        mask = mask & (columns < WIDTH)[None, :]
    at = base + places[:, None] + columns[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _is_visible(distance, left, right):
    """``distance``: of the key from the query's own place, before it (-) or behind (+)."""
    visible = (right < 0) | (distance <= right)
    return visible & ((left < 0) | (distance >= -left))


# --- tiles of one sequence -----------------------------------------------------------------------

# Places are counted from the first row of a tile, so that they are small numbers. Those behind its
# last row repeat that row, which is as finite as the sequence is: loads need no mask.


@triton.jit
def _queries_of_tile(count, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """BLOCK queries: tokens from 0 on, TOGETHER heads from 0 on of each. The heads that share keys
    and values meet them in one product."""
    m = tl.arange(0, BLOCK)
    return tl.minimum(m // TOGETHER, count - 1), m % TOGETHER, m // TOGETHER < count


@triton.jit
def _keys_of_tile(count, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    return tl.minimum(n, count - 1), n < count


@triton.jit
def _row(base, number, stride):
    return base + number.to(tl.int64) * stride


@triton.jit
def _attend(
    q, k_head, v_head, acc, total, largest, begin, end, k_shift, k_stride, v_stride,
    query_place, left, right, scale_log2, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more stretch of keys, [begin, end), for a tile of queries. ``largest`` is without the
    scale. Where it is not MASKED the stretch is whole blocks."""
    k_columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N):
        if MASKED:
            keys, inside = _keys_of_tile(end - first, BLOCK_N)
        row = first + k_shift
        k = _load(_row(k_head, row, k_stride), keys * k_stride, k_columns, None, K_WIDTH)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            distance = (first + keys)[None, :] - query_place[:, None]
            visible = _is_visible(distance, left, right) & inside[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet: any finite reference will do.
        reference = now_largest
        if MASKED:
            reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        p = tl.exp2(scores * scale_log2 - (reference * scale_log2)[:, None])
        shrink = tl.exp2((largest - reference) * scale_log2)
        total = total * shrink + tl.sum(p, 1)
        v = _load(_row(v_head, row, v_stride), keys * v_stride, v_columns, None, V_WIDTH)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        largest = now_largest
    return acc, total, largest


@triton.jit(do_not_specialize=["left", "right"])
def forward_tiles(
    q, k, v, out, lse, tiles, left, right, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS * V_WIDTH] and lse [N, HEADS] of the tiles' queries."""
    program = tl.program_id(0)
    head = program % (HEADS // TOGETHER) * TOGETHER
    tile = tiles + program // (HEADS // TOGETHER) * 8
    first, count = tl.load(tile), tl.load(tile + 1)
    begin, full_end, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    q_shift, k_shift, offset = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)

    tokens, heads, inside = _queries_of_tile(count, BLOCK_M, TOGETHER)
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_tile = _row(q, first + q_shift, q_stride) + head * q_head_stride
    queries = _load(q_tile, tokens * q_stride + heads * q_head_stride, columns, None, K_WIDTH)
    k_head = k + (head // GROUP) * k_head_stride
    v_head = v + (head // GROUP) * v_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    place = first + tokens + offset
    acc, total, largest = _attend(
        queries, k_head, v_head, acc, total, largest, begin, full_end, k_shift, k_stride, v_stride,
        place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V, False,
    )  # fmt: skip
    acc, total, largest = _attend(
        queries, k_head, v_head, acc, total, largest, full_end, end, k_shift, k_stride, v_stride,
        place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V, True,
    )  # fmt: skip
    saw = total > 0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    places = tokens * HEADS + heads
    out_tile = _row(out, first + q_shift, HEADS * V_WIDTH) + head * V_WIDTH
    _store(out_tile, acc, places * V_WIDTH, v_columns, inside, V_WIDTH)
    log = largest * scale_log2 + tl.log2(tl.where(saw, total, 1.0))
    log = tl.where(saw, log, float("-inf"))
    tl.store(lse + first * HEADS + head + places, log, mask=inside)


@triton.jit
def _add_dq(
    q, do, lse, delta, k_head, v_head, dq, begin, end, k_shift, k_stride, v_stride,
    query_place, left, right, scale_log2, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the keys [begin, end) add to dQ of a tile of queries, without the scale."""
    k_columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N):
        if MASKED:
            keys, inside = _keys_of_tile(end - first, BLOCK_N)
        row = first + k_shift
        k = _load(_row(k_head, row, k_stride), keys * k_stride, k_columns, None, K_WIDTH)
        v = _load(_row(v_head, row, v_stride), keys * v_stride, v_columns, None, V_WIDTH)
        log_p = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        if MASKED:
            distance = (first + keys)[None, :] - query_place[:, None]
            visible = _is_visible(distance, left, right) & inside[None, :]
            log_p = tl.where(visible, log_p, float("-inf"))
        ds = tl.exp2(log_p) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["left", "right"])
def backward_query_tiles(
    q, k, v, out, do, dq, lse, delta, tiles, left, right, scale, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, do_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq [T, HEADS, K_WIDTH], and delta [N, HEADS] = sum of out * do over each head's features."""
    program = tl.program_id(0)
    head = program % (HEADS // TOGETHER) * TOGETHER
    tile = tiles + program // (HEADS // TOGETHER) * 8
    first, count = tl.load(tile), tl.load(tile + 1)
    begin, full_end, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    q_shift, k_shift, offset = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)

    tokens, heads, inside = _queries_of_tile(count, BLOCK_M, TOGETHER)
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row, places = first + q_shift, tokens * HEADS + heads
    out_tile = _row(out, row, HEADS * V_WIDTH) + head * V_WIDTH
    do_tile = _row(do, row, do_stride) + head * V_WIDTH
    o = _load(out_tile, places * V_WIDTH, v_columns, None, V_WIDTH)
    grad = _load(do_tile, tokens * do_stride + heads * V_WIDTH, v_columns, None, V_WIDTH)
    dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
    per_token = first * HEADS + head + places
    tl.store(delta + per_token, dot, mask=inside)
    q_tile = _row(q, row, q_stride) + head * q_head_stride
    queries = _load(q_tile, tokens * q_stride + heads * q_head_stride, columns, None, K_WIDTH)
    log = tl.load(lse + per_token)
    k_head = k + (head // GROUP) * k_head_stride
    v_head = v + (head // GROUP) * v_head_stride
    place = first + tokens + offset
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    acc = _add_dq(
        queries, grad, log, dot, k_head, v_head, acc, begin, full_end, k_shift, k_stride, v_stride,
        place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V, False,
    )  # fmt: skip
    acc = _add_dq(
        queries, grad, log, dot, k_head, v_head, acc, full_end, end, k_shift, k_stride, v_stride,
        place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V, True,
    )  # fmt: skip
    dq_tile = _row(dq, row, HEADS * K_WIDTH) + head * K_WIDTH
    _store(dq_tile, acc * scale, places * K_WIDTH, columns, inside, K_WIDTH)


@triton.jit
def _add_dk_dv(
    k, v, dk, dv, q_heads, do_heads, lse, delta, begin, end, q_end, q_shift, q_stride,
    q_head_stride, do_stride, key_place, left, right, scale_log2,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the queries [begin, end) of some heads add to a tile of keys, without the scale.

    Scores are transposed, keys down, so that P and dS need not be.
    """
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_M // TOGETHER):
        tokens, heads, inside = _queries_of_tile(q_end - first, BLOCK_M, TOGETHER)
        row = first + q_shift
        q_tile, do_tile = _row(q_heads, row, q_stride), _row(do_heads, row, do_stride)
        queries = _load(q_tile, tokens * q_stride + heads * q_head_stride, columns, None, K_WIDTH)
        grad = _load(do_tile, tokens * do_stride + heads * V_WIDTH, v_columns, None, V_WIDTH)
        # Those behind the last one: a probability of 0.
        per_token = (first + tokens) * HEADS + heads
        log = tl.load(lse + per_token, mask=inside, other=float("inf"))
        dot = tl.load(delta + per_token)
        log_p = tl.dot(k, tl.trans(queries)) * scale_log2 - log[None, :]
        if MASKED:
            distance = key_place[:, None] - (first + tokens)[None, :]
            visible = _is_visible(distance, left, right) & inside[None, :]
            log_p = tl.where(visible, log_p, float("-inf"))
        p = tl.exp2(log_p)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = p * (tl.dot(v, tl.trans(grad)) - dot[None, :])
        dk = tl.dot(ds.to(queries.dtype), queries, dk)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right"])
def backward_key_tiles(
    q, k, v, do, dk, dv, lse, delta, tiles, left, right, scale, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, do_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dk [T_kv, KV_HEADS, K_WIDTH] and dv [T_kv, KV_HEADS, V_WIDTH], over a KV head's queries."""
    program = tl.program_id(0)
    kv_head, tile = program % KV_HEADS, tiles + (program // KV_HEADS) * 8
    first, count = tl.load(tile), tl.load(tile + 1)
    begin, masked_end, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    q_shift, k_shift, offset = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)

    n, inside = _keys_of_tile(count, BLOCK_N)
    row = first + k_shift
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_tile = _row(k, row, k_stride) + kv_head * k_head_stride
    v_tile = _row(v, row, v_stride) + kv_head * v_head_stride
    keys = _load(k_tile, n * k_stride, columns, None, K_WIDTH)
    values = _load(v_tile, n * v_stride, v_columns, None, V_WIDTH)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    place = first + n - offset
    for member in range(0, GROUP, TOGETHER):
        head = kv_head * GROUP + member
        q_heads, do_heads = q + head * q_head_stride, do + head * V_WIDTH
        dk_acc, dv_acc = _add_dk_dv(
            keys, values, dk_acc, dv_acc, q_heads, do_heads, lse + head, delta + head, begin,
            masked_end, end, q_shift, q_stride, q_head_stride, do_stride, place, left, right,
            scale_log2, K_WIDTH, V_WIDTH, KV_HEADS * GROUP, TOGETHER, BLOCK_M, BLOCK_K, BLOCK_V,
            True,
        )  # fmt: skip
        dk_acc, dv_acc = _add_dk_dv(
            keys, values, dk_acc, dv_acc, q_heads, do_heads, lse + head, delta + head, masked_end,
            end, end, q_shift, q_stride, q_head_stride, do_stride, place, left, right,
            scale_log2, K_WIDTH, V_WIDTH, KV_HEADS * GROUP, TOGETHER, BLOCK_M, BLOCK_K, BLOCK_V,
            False,
        )  # fmt: skip
    places = n * KV_HEADS
    dk_tile = _row(dk, row, KV_HEADS * K_WIDTH) + kv_head * K_WIDTH
    dv_tile = _row(dv, row, KV_HEADS * V_WIDTH) + kv_head * V_WIDTH
    _store(dk_tile, dk_acc * scale, places * K_WIDTH, columns, inside, K_WIDTH)
    _store(dv_tile, dv_acc, places * V_WIDTH, v_columns, inside, V_WIDTH)


# --- tiles of several whole sequences ------------------------------------------------------------


@triton.jit
def _packed_tile(tiles, number, q_rows, k_rows, low, high, BLOCK: tl.constexpr):
    """A tile's queries and keys, all of some sequences, and which key each query sees."""
    first, count = tl.load(tiles + number * 4), tl.load(tiles + number * 4 + 1)
    k_first, k_count = tl.load(tiles + number * 4 + 2), tl.load(tiles + number * 4 + 3)
    i = tl.arange(0, BLOCK)
    inside, k_inside = i < count, i < k_count
    rows = tl.load(q_rows + first + i, mask=inside, other=0).to(tl.int64)
    key_rows = tl.load(k_rows + k_first + i, mask=k_inside, other=0).to(tl.int64)
    lowest = tl.load(low + first + i, mask=inside, other=0) - k_first
    highest = tl.load(high + first + i, mask=inside, other=0) - k_first
    return first + i, inside, rows, k_inside, key_rows, lowest, highest


@triton.jit
def forward_packed(
    q, k, v, out, lse, tiles, q_rows, k_rows, low, high, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As ``forward_tiles``: query i sees the keys [low[i], high[i])."""
    program = tl.program_id(0)
    head = program % HEADS
    tokens, inside, rows, k_inside, key_rows, lowest, highest = _packed_tile(
        tiles, program // HEADS, q_rows, k_rows, low, high, BLOCK
    )
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    kv_head, j = head // GROUP, tl.arange(0, BLOCK)
    queries = _load(q + head * q_head_stride, rows * q_stride, columns, inside, K_WIDTH)
    keys = _load(k + kv_head * k_head_stride, key_rows * k_stride, columns, k_inside, K_WIDTH)
    values = _load(v + kv_head * v_head_stride, key_rows * v_stride, v_columns, k_inside, V_WIDTH)
    visible = (j[None, :] >= lowest[:, None]) & (j[None, :] < highest[:, None])
    scores = tl.dot(queries, tl.trans(keys)) * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, 1)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    p = tl.exp2(scores - reference[:, None])
    total = tl.sum(p, 1)
    saw = total > 0
    divisor = tl.where(saw, total, 1.0)
    acc = tl.dot(p.to(values.dtype), values) / divisor[:, None]
    _store(out, acc, (rows * HEADS + head) * V_WIDTH, v_columns, inside, V_WIDTH)
    log = tl.where(saw, largest + tl.log2(divisor), float("-inf"))
    tl.store(lse + tokens * HEADS + head, log, mask=inside)


@triton.jit
def backward_packed(
    q, k, v, out, do, dq, dk, dv, lse, tiles, q_rows, k_rows, low, high,
    scale, scale_log2,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, do_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv in one pass: keys and values of a KV head stay on chip for all its queries."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    tokens, inside, rows, k_inside, key_rows, lowest, highest = _packed_tile(
        tiles, program // KV_HEADS, q_rows, k_rows, low, high, BLOCK
    )
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    keys = _load(k + kv_head * k_head_stride, key_rows * k_stride, columns, k_inside, K_WIDTH)
    values = _load(v + kv_head * v_head_stride, key_rows * v_stride, v_columns, k_inside, V_WIDTH)
    j = tl.arange(0, BLOCK)
    visible = (j[:, None] >= lowest[None, :]) & (j[:, None] < highest[None, :])  # keys down
    dk_acc = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    dv_acc = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        queries = _load(q + head * q_head_stride, rows * q_stride, columns, inside, K_WIDTH)
        places = rows * KV_HEADS * GROUP + head
        o = _load(out, places * V_WIDTH, v_columns, inside, V_WIDTH)
        grad = _load(do + head * V_WIDTH, rows * do_stride, v_columns, inside, V_WIDTH)
        delta = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
        log = tl.load(lse + tokens * KV_HEADS * GROUP + head, mask=inside, other=0.0)
        log_p = tl.dot(keys, tl.trans(queries)) * scale_log2 - log[None, :]
        p = tl.exp2(tl.where(visible, log_p, float("-inf")))
        dv_acc = tl.dot(p.to(grad.dtype), grad, dv_acc)
        ds = (p * (tl.dot(values, tl.trans(grad)) - delta[None, :])).to(queries.dtype)
        dk_acc = tl.dot(ds, queries, dk_acc)
        dq_acc = tl.dot(tl.trans(ds), keys) * scale
        _store(dq, dq_acc, places * K_WIDTH, columns, inside, K_WIDTH)
    places = key_rows * KV_HEADS + kv_head
    _store(dk, dk_acc * scale, places * K_WIDTH, columns, k_inside, K_WIDTH)
    _store(dv, dv_acc, places * V_WIDTH, v_columns, k_inside, V_WIDTH)
