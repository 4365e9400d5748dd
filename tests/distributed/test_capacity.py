"""A meta with capacity: one captured step serves packs of other lengths, bit for bit.

On GPUs a whole step, communication included, is captured in a CUDA graph and replayed. On CPU the
step runs again with the refilled meta: the same arrays, the same kernels, no graph.
"""

import copy

import pytest
import torch
from rank_helpers import device_of, needs_own_gpu

from padded_sp import PaddedSeqMeta
from padded_sp.attention import DotProductAttention
from padded_sp.linear import LayerNormColumnParallelLinear, RowParallelLinear
from padded_sp.padding import pad, roll, unpad
from padded_sp.rotary import apply_rotary
from padded_sp.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 12, 16, 48, 96
ROWS, ENTRIES, LONGEST = 240, 9, 120
# Real lengths, padded lengths: pads inside, none, a long tail, an empty sequence.
PACKS = [
    ([10, 33, 70, 9], [12, 40, 72, 12]),
    ([120, 119, 1], [120, 119, 1]),
    ([5], [24]),
    ([40, 0, 41], [48, 12, 60]),
]


class Step(torch.nn.Module):
    """Embedding, norm + column, rotary, attention (on GPUs), row, norm + column, cross entropy."""

    def __init__(self, group, device, dtype):
        super().__init__()
        common = {"tp_group": group, "device": device, "params_dtype": dtype}
        self.group, self.has_attention = group, device.type == "cuda"
        self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, **common)
        self.qkv = LayerNormColumnParallelLinear(HIDDEN, 3 * HEADS * HEAD_DIM, **common)
        self.attention = DotProductAttention(HEADS, HEAD_DIM, tp_group=group)
        self.projection = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, **common)
        self.head = LayerNormColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, **common)
        angles = torch.outer(torch.arange(LONGEST), torch.logspace(0, -2, HEAD_DIM // 2)).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, ids, meta):
        hidden = self.embedding(ids, meta)
        q, k, v = self.qkv(hidden, meta).unflatten(1, (-1, HEAD_DIM)).chunk(3, 1)
        q, k = (apply_rotary(t, self.cos, self.sin, meta) for t in (q, k))
        mixed = self.attention(q, k, v, meta) if self.has_attention else (q + k + v).flatten(1)
        hidden = hidden + self.projection(mixed, meta)
        labels = roll(ids, meta)
        return vocab_parallel_cross_entropy(
            self.head(hidden, meta), labels, meta, tp_group=self.group
        )


def random_ids(meta, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (meta.num_rows,), generator=generator).to(device)


def run_step(step, ids, meta):
    step.zero_grad(set_to_none=False)
    loss = step(ids, meta)
    loss.backward()
    return loss


def results(loss, step):
    return [loss.detach().clone(), *(p.grad.clone() for p in step.parameters())]


def replays_serve_other_packs(group):
    device = device_of(group)
    on_gpu = device.type == "cuda"
    step = Step(group, device, torch.bfloat16 if on_gpu else torch.float32)
    metas = [
        PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device)
        for real, padded in PACKS
    ]
    capacity = metas[0].with_capacity(ENTRIES, ROWS, LONGEST)
    addresses = capacity.cu_seqlens.data_ptr(), capacity.cu_seqlens_padded.data_ptr()
    ids = random_ids(capacity, 0, device)

    # Not the captured module itself: its gradients accumulate on the stream of the capture.
    eager_step = copy.deepcopy(step)
    for parameter in (*step.parameters(), *eager_step.parameters()):
        parameter.grad = torch.zeros_like(parameter)

    def replay():
        return run_step(step, ids, capacity)

    if on_gpu:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run_step(step, ids, capacity)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured_loss = run_step(step, ids, capacity)

        def replay():
            graph.replay()
            return captured_loss

    for number, meta in enumerate(metas):
        capacity.copy_(meta)
        ids.copy_(random_ids(capacity, number, device))
        replayed = results(replay(), step)
        # The same layout as a meta of its own, with nothing captured.
        plain = PaddedSeqMeta.from_cu_seqlens(capacity.cu_seqlens, capacity.cu_seqlens_padded)
        fresh = results(run_step(eager_step, ids.clone(), plain), eager_step)
        for a, b in zip(replayed, fresh, strict=True):
            assert torch.isfinite(b).all()
            if on_gpu:  # attention may cut the pads into other segments, and add up in its order
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
            else:
                assert torch.equal(a, b)
    assert addresses == (capacity.cu_seqlens.data_ptr(), capacity.cu_seqlens_padded.data_ptr())
    assert len({tuple(m.cu_seqlens.tolist()) for m in metas}) == len(metas)


@needs_own_gpu
def test_replays_serve_other_packs(ranks):
    ranks.run(replays_serve_other_packs)


def host_counts_raise(group):
    meta = PaddedSeqMeta.from_seq_lens([5, 3], device=device_of(group))
    capacity = meta.with_capacity(4, 12 * group.size(), 12 * group.size())
    for name in ("seq_lens", "padded_lens", "num_tokens", "real_rows", "pad_rows"):
        with pytest.raises(ValueError, match="stale"):
            getattr(capacity, name)
    x = torch.zeros(8, 2, device=meta.device)
    with pytest.raises(ValueError, match="number of real tokens"):
        pad(x, capacity)
    with pytest.raises(ValueError, match="number of real tokens"):
        unpad(torch.zeros(capacity.num_rows, 2, device=meta.device), capacity)


def test_stale_host_counts_raise(ranks):
    ranks.run(host_counts_raise)


def plain_meta_under_capture_raises(group):
    device = device_of(group)
    if device.type != "cuda":
        return
    meta = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[8, 8], device=device)
    one = torch.ones(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)  # PyTorch warns of empty graphs
        with pytest.raises(ValueError, match="with_capacity"):
            _ = meta.padding_mask
    torch.cuda.synchronize()
    assert int(meta.padding_mask.sum()) == 8  # derived now, and not what a capture left behind
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        _ = meta.padding_mask.sum()  # there already: nothing is derived


def test_plain_meta_under_capture_raises(ranks):
    """A plain meta must not keep what a capture only recorded. Nothing to capture without CUDA."""
    ranks.run(plain_meta_under_capture_raises)
