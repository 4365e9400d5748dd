"""FlashAttention-4's two entry points as ``flash4_attention`` calls them, in plain PyTorch.

What the real ones do to rows that are no sequence's, they do: they multiply whole tiles, what lies
behind a sequence included, by probabilities of zero, and leave rows of results unwritten.
Source: Dao-AILab/flash-attention, flash_attn/cute/interface.py.
"""

import itertools

import torch

TILE = 128


def _tiles(x, starts, used):
    """Of each sequence: its rows up to the end of its last tile, and how many of them are real."""
    starts = starts.tolist()
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    for first, count in zip(starts, lengths if used is None else used.tolist(), strict=False):
        stop = min(first + -(-count // TILE) * TILE, x.shape[0])
        yield first, count, x[first:stop].double()


def _probabilities(q, k, n, m, how):
    """[heads, rows, keys] of whole tiles; zero where one is not real or does not see the other."""
    left, right = how["window_size_left"], how["window_size_right"]
    if how["causal"]:
        left, right = None, 0
    scores = how["softmax_scale"] * torch.einsum("qhd,khd->hqk", q, k)
    rows, keys = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
    place = rows + m - n
    seen = (rows < n) & (keys < m)
    if left is not None:
        seen = seen & (keys >= place - left)
    if right is not None:
        seen = seen & (keys <= place + right)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]).masked_fill(~seen, 0), lse


def _groups(q, k):
    return q.shape[1] // k.shape[1]


def _flash_attn_fwd(q, k, v, *, out, return_lse, **how):
    assert return_lse
    group = _groups(q, k)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    starts = how["cu_seqlens_q"], how["cu_seqlens_k"]
    used = how["seqused_q"], how["seqused_k"]
    for (a, n, q_), (_, m, k_), (_, _, v_) in zip(
        _tiles(q, starts[0], used[0]),
        _tiles(k, starts[1], used[1]),
        _tiles(v, starts[1], used[1]),
        strict=True,
    ):
        assert n <= how["max_seqlen_q"]
        assert m <= how["max_seqlen_k"]
        k_, v_ = (x.repeat_interleave(group, 1) for x in (k_, v_))
        p, log = _probabilities(q_, k_, n, m, how)
        out[a : a + n] = torch.einsum("hqk,khd->qhd", p, v_)[:n].to(out.dtype)
        lse[:, a : a + n] = log[:, :n]
    return out, lse, None, None, None


def _flash_attn_bwd(q, k, v, out, dout, lse, *, deterministic, dq, dk, dv, **how):
    assert deterministic in (True, False)
    group = _groups(q, k)
    starts = how["cu_seqlens_q"], how["cu_seqlens_k"]
    used = how["seqused_q"], how["seqused_k"]
    for (a, n, q_), (b, m, k_), (_, _, v_), (_, _, do) in zip(
        _tiles(q, starts[0], used[0]),
        _tiles(k, starts[1], used[1]),
        _tiles(v, starts[1], used[1]),
        _tiles(dout, starts[0], used[0]),
        strict=True,
    ):
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k_, v_))
        p, log = _probabilities(q_, wide_k, n, m, how)
        assert torch.allclose(log[:, :n].float(), lse[:, a : a + n])
        delta = torch.zeros(q_.shape[:2], dtype=torch.float64)
        delta[:n] = (out[a : a + n].double() * do[:n]).sum(-1)
        ds = p * (torch.einsum("qhd,khd->hqk", do, wide_v) - delta.T[..., None])
        ds = ds * how["softmax_scale"]
        of_keys = torch.einsum("hqk,qhd->khd", ds, q_), torch.einsum("hqk,qhd->khd", p, do)
        dq[a : a + n] = torch.einsum("hqk,khd->qhd", ds, wide_k)[:n].to(dq.dtype)
        for target, of_heads in zip((dk, dv), of_keys, strict=True):
            summed = of_heads.unflatten(1, (-1, group)).sum(2)
            target[b : b + m] = summed[:m].to(target.dtype)
    return dq, dk, dv
