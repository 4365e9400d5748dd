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
    """Of each place WIDTH elements; zeros where it is not ``inside``."""
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + places[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, values, places, columns, inside, WIDTH: tl.constexpr):
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    values = values.to(base.dtype.element_ty)
    tl.store(base + places[:, None] + columns[None, :], values, mask=mask)


@triton.jit
def _is_visible(distance, left, right):
    """``distance``: of the key from the query's own place, before it (-) or behind (+)."""
    visible = (right < 0) | (distance <= right)
    return visible & ((left < 0) | (distance >= -left))


@triton.jit
def _tokens_and_heads(first, head, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """BLOCK queries: tokens from ``first`` on, TOGETHER heads from ``head`` on of each. The heads
    that share keys and values meet them in one product."""
    m = tl.arange(0, BLOCK)
    return first + m // TOGETHER, head + m % TOGETHER


# --- tiles of one sequence -----------------------------------------------------------------------


@triton.jit
def _attend(
    q, k_head, v_head, acc, total, largest, begin, end, k_end, k_shift, k_stride, v_stride,
    query_place, left, right, scale_log2, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more stretch of keys, [begin, end), for a tile of queries."""
    k_columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        inside = (keys < k_end) if MASKED else (keys >= 0)
        rows = (keys + k_shift).to(tl.int64)
        k = _load(k_head, rows * k_stride, k_columns, inside, K_WIDTH)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        if MASKED:
            distance = keys[None, :] - query_place[:, None]
            visible = _is_visible(distance, left, right) & inside[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet: any finite reference will do.
        reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        p = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_head, rows * v_stride, v_columns, inside, V_WIDTH)
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

    tokens, heads = _tokens_and_heads(first, head, BLOCK_M, TOGETHER)
    inside, rows = tokens < first + count, (tokens + q_shift).to(tl.int64)
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    queries = _load(q, rows * q_stride + heads * q_head_stride, columns, inside, K_WIDTH)
    k_head = k + (head // GROUP) * k_head_stride
    v_head = v + (head // GROUP) * v_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    place = tokens + offset
    acc, total, largest = _attend(
        queries, k_head, v_head, acc, total, largest, begin, full_end, end, k_shift, k_stride,
        v_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V,
        False,
    )  # fmt: skip
    acc, total, largest = _attend(
        queries, k_head, v_head, acc, total, largest, full_end, end, end, k_shift, k_stride,
        v_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V,
        True,
    )  # fmt: skip
    saw = total > 0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    _store(out, acc, (rows * HEADS + heads) * V_WIDTH, v_columns, inside, V_WIDTH)
    log = tl.where(saw, largest + tl.log2(tl.where(saw, total, 1.0)), float("-inf"))
    tl.store(lse + tokens * HEADS + heads, log, mask=inside)


@triton.jit
def _add_dq(
    q, do, lse, delta, k_head, v_head, dq, begin, end, k_end, k_shift, k_stride, v_stride,
    query_place, left, right, scale_log2, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the keys [begin, end) add to dQ of a tile of queries, without the scale."""
    k_columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        inside = (keys < k_end) if MASKED else (keys >= 0)
        rows = (keys + k_shift).to(tl.int64)
        k = _load(k_head, rows * k_stride, k_columns, inside, K_WIDTH)
        v = _load(v_head, rows * v_stride, v_columns, inside, V_WIDTH)
        log_p = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        if MASKED:
            distance = keys[None, :] - query_place[:, None]
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

    tokens, heads = _tokens_and_heads(first, head, BLOCK_M, TOGETHER)
    inside, rows = tokens < first + count, (tokens + q_shift).to(tl.int64)
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    o = _load(out, (rows * HEADS + heads) * V_WIDTH, v_columns, inside, V_WIDTH)
    grad = _load(do, rows * do_stride + heads * V_WIDTH, v_columns, inside, V_WIDTH)
    dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta + tokens * HEADS + heads, dot, mask=inside)
    queries = _load(q, rows * q_stride + heads * q_head_stride, columns, inside, K_WIDTH)
    log = tl.load(lse + tokens * HEADS + heads, mask=inside, other=0.0)
    k_head = k + (head // GROUP) * k_head_stride
    v_head = v + (head // GROUP) * v_head_stride
    place = tokens + offset
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    acc = _add_dq(
        queries, grad, log, dot, k_head, v_head, acc, begin, full_end, end, k_shift, k_stride,
        v_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V,
        False,
    )  # fmt: skip
    acc = _add_dq(
        queries, grad, log, dot, k_head, v_head, acc, full_end, end, end, k_shift, k_stride,
        v_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH, BLOCK_N, BLOCK_K, BLOCK_V,
        True,
    )  # fmt: skip
    _store(dq, acc * scale, (rows * HEADS + heads) * K_WIDTH, columns, inside, K_WIDTH)


@triton.jit
def _add_dk_dv(
    k, v, dk, dv, q, do, lse, delta, head, begin, end, q_end, q_shift, q_stride, q_head_stride,
    do_stride, key_place, left, right, scale_log2, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the queries [begin, end) of some heads add to a tile of keys, without the scale.

    Scores are transposed, keys down, so that P and dS need not be.
    """
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_M // TOGETHER):
        tokens, heads = _tokens_and_heads(first, head, BLOCK_M, TOGETHER)
        inside, rows = tokens < q_end, (tokens + q_shift).to(tl.int64)
        queries = _load(q, rows * q_stride + heads * q_head_stride, columns, inside, K_WIDTH)
        grad = _load(do, rows * do_stride + heads * V_WIDTH, v_columns, inside, V_WIDTH)
        log = tl.load(lse + tokens * HEADS + heads, mask=inside, other=0.0)
        dot = tl.load(delta + tokens * HEADS + heads, mask=inside, other=0.0)
        log_p = tl.dot(k, tl.trans(queries)) * scale_log2 - log[None, :]
        if MASKED:
            distance = key_place[:, None] - tokens[None, :]
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

    n = tl.arange(0, BLOCK_N)
    inside, rows = n < count, (first + n + k_shift).to(tl.int64)
    columns, v_columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    keys = _load(k + kv_head * k_head_stride, rows * k_stride, columns, inside, K_WIDTH)
    values = _load(v + kv_head * v_head_stride, rows * v_stride, v_columns, inside, V_WIDTH)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    place = first + n - offset
    for member in range(0, GROUP, TOGETHER):
        head = kv_head * GROUP + member
        dk_acc, dv_acc = _add_dk_dv(
            keys, values, dk_acc, dv_acc, q, do, lse, delta, head, begin, masked_end, end, q_shift,
            q_stride, q_head_stride, do_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH,
            KV_HEADS * GROUP, TOGETHER, BLOCK_M, BLOCK_K, BLOCK_V, True,
        )  # fmt: skip
        dk_acc, dv_acc = _add_dk_dv(
            keys, values, dk_acc, dv_acc, q, do, lse, delta, head, masked_end, end, end, q_shift,
            q_stride, q_head_stride, do_stride, place, left, right, scale_log2, K_WIDTH, V_WIDTH,
            KV_HEADS * GROUP, TOGETHER, BLOCK_M, BLOCK_K, BLOCK_V, False,
        )  # fmt: skip
    places = rows * KV_HEADS + kv_head
    _store(dk, dk_acc * scale, places * K_WIDTH, columns, inside, K_WIDTH)
    _store(dv, dv_acc, places * V_WIDTH, v_columns, inside, V_WIDTH)


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
