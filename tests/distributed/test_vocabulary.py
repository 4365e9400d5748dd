"""Embedding and cross entropy over a vocabulary that is divided over ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_helpers import comm_counts, device_of, drawn, part
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import PaddedSeqMeta
from padded_sp.backends import reference
from padded_sp.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

V, H, T = 48, 10, 24


def meta_of(group, seq_lens=(5, 0, 1, 7), padded_lens=(6, 2, 4, 12)):
    return PaddedSeqMeta.from_seq_lens(
        seq_lens, padded_lens=padded_lens, tp_size=group.size(), device=device_of(group)
    )


def drawn_ids(group, meta, pad_id, dtype=torch.int64):
    ids = torch.randint(V, (T,), generator=torch.Generator().manual_seed(4)).to(device_of(group))
    return ids.masked_fill(meta.padding_mask, pad_id).to(dtype)


# --- Embedding -----------------------------------------------------------------------------------


def embedding_matches(group, dtype, sequence_parallel, ids_dtype):
    size, meta = group.size(), meta_of(group)
    arguments = {"params_dtype": dtype, "device": device_of(group)}
    torch.manual_seed(3)
    whole = VocabParallelEmbedding(V, H, **arguments)
    torch.manual_seed(3)
    layer = VocabParallelEmbedding(
        V, H, tp_group=group, sequence_parallel=sequence_parallel, **arguments
    )
    assert torch.equal(layer.weight, part(whole.weight, group))
    ids = drawn_ids(group, meta, -100, ids_dtype)
    grad_full = drawn(group, T, H, seed=2, dtype=dtype)
    with CommDebugMode() as forward:
        y = layer.forward(ids, meta)  # CommDebugMode hooks modules, and no input has a gradient
    with CommDebugMode() as backward:
        y.backward((part(grad_full, group) if sequence_parallel else grad_full).clone())

    expected = reference.vocab_parallel_embedding(ids, whole.weight.chunk(size), meta)
    torch.autograd.backward(expected, grad_full.chunk(size))
    # Every term of the sum over ranks is zero but one: exact at every size.
    assert torch.equal(y, expected[group.rank()] if sequence_parallel else torch.cat(expected))
    assert torch.equal(layer.weight.grad, part(whole.weight.grad, group))
    if size == 1:
        counts = {}, {}
    elif sequence_parallel:
        counts = {"reduce_scatter_tensor": 1}, {"all_gather_into_tensor": 1}
    else:
        counts = {"all_reduce": 1}, {}
    assert (comm_counts(forward), comm_counts(backward)) == counts


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_matches_reference(ranks, dtype, sequence_parallel, ids_dtype):
    ranks.run(
        embedding_matches, dtype=dtype, sequence_parallel=sequence_parallel, ids_dtype=ids_dtype
    )


def embedding_ignores_pads(group):
    meta, outcomes = meta_of(group), []
    for pad_id, poison in ((0, 0.0), (-100, float("nan")), (2**62, 1e4), (7, float("inf"))):
        torch.manual_seed(3)
        layer = VocabParallelEmbedding(V, H, tp_group=group, device=device_of(group))
        y = layer(drawn_ids(group, meta, pad_id), meta)
        grad_full = drawn(group, T, H, seed=2).masked_fill(meta.padding_mask[:, None], poison)
        y.backward(part(grad_full, group).clone())
        assert (y[part(meta.padding_mask, group)] == 0).all()
        outcomes.append((y, layer.weight.grad))
    for y, grad in outcomes[1:]:
        assert torch.equal(y, outcomes[0][0])
        assert torch.equal(grad, outcomes[0][1])


def test_embedding_pads_are_inert(ranks):
    ranks.run(embedding_ignores_pads)


def embedding_raises(group):
    meta, device = meta_of(group), device_of(group)
    layer = VocabParallelEmbedding(V, H, tp_group=group, device=device)
    ids = drawn_ids(group, meta, 0)
    with CommDebugMode() as comms:
        for message, bad in {
            "rows": ids[1:],
            "one integer a row": ids[:, None],
            "integer dtype": ids.float(),
            r"torch\.bool": ids > 3,
            "move them": ids.to("meta"),
        }.items():
            with pytest.raises(ValueError, match=message):
                layer.forward(bad, meta)
        with pytest.raises(ValueError, match="seq_meta"):
            layer.forward(ids)
        if group.size() > 1:
            with pytest.raises(ValueError, match="set_tensor_parallel_group"):
                VocabParallelEmbedding(V, H, tp_size=group.size(), device=device).forward(ids, meta)
            with pytest.raises(ValueError, match="do not divide over"):
                VocabParallelEmbedding(V + 1, H, tp_group=group)
            odd = PaddedSeqMeta.from_seq_lens([T + 1], tp_size=1, device=device)
            with pytest.raises(ValueError, match="do not divide over"):
                layer.forward(torch.zeros(T + 1, dtype=torch.int64, device=device), odd)
        if device.type == "cpu":  # on CUDA the assertion ends the process
            for wrong in (-1, V, 2**40):
                with pytest.raises(RuntimeError, match=rf"outside \[0, {V}\)"):
                    layer.forward(
                        drawn_ids(group, meta, 0).index_fill(0, meta.real_rows, wrong), meta
                    )
    assert comms.get_total_counts() == 0


def test_embedding_raises_before_communicating(ranks):
    ranks.run(embedding_raises)


# --- Cross entropy -------------------------------------------------------------------------------


def cross_entropy_matches(group, dtype):
    size = group.size()
    for meta in (meta_of(group), meta_of(group, (T,), (T,)), meta_of(group, (0,), (T,))):
        labels = drawn_ids(group, meta, -1).index_fill(0, meta.real_rows[:2], -100)
        logits_full = (4 * drawn(group, T, V, dtype=dtype)).requires_grad_()
        logits = part(logits_full, group, 1).detach().clone().requires_grad_()
        with CommDebugMode() as forward:
            loss = vocab_parallel_cross_entropy(logits, labels, meta, tp_group=group)
        with CommDebugMode() as backward:
            (3 * loss).backward()
        expected = reference.vocab_parallel_cross_entropy(logits_full.chunk(size, 1), labels, meta)
        (3 * expected).backward()
        assert loss.shape == ()
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits.grad, part(logits_full.grad, group, 1))
        assert comm_counts(forward) == ({"all_reduce": 2} if size > 1 else {})
        assert comm_counts(backward) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_matches_reference(ranks, dtype):
    ranks.run(cross_entropy_matches, dtype=dtype)


def cross_entropy_ignores_pads(group):
    meta, outcomes = meta_of(group), []
    pads = meta.padding_mask[:, None]
    for poison, pad_label in ((0.0, 0), (float("nan"), -100), (1e4, 2**40), (float("inf"), 5)):
        logits = drawn(group, T, V // group.size(), seed=group.rank()).masked_fill(pads, poison)
        logits.requires_grad_()
        labels = drawn_ids(group, meta, pad_label)
        before = logits.detach().clone()
        loss = vocab_parallel_cross_entropy(logits, labels, meta, tp_group=group)
        loss.backward()
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
        assert (logits.grad[meta.padding_mask] == 0).all()
        outcomes.append((loss, logits.grad))
    for loss, grad in outcomes[1:]:
        assert torch.equal(loss, outcomes[0][0])
        assert torch.equal(grad, outcomes[0][1])


def test_cross_entropy_pads_are_inert(ranks):
    ranks.run(cross_entropy_ignores_pads)


def shares_add_up(group):
    """Every rank a pack of its own, vocabulary whole: the shares sum to the mean of all tokens."""
    rank, size, device = group.rank(), group.size(), device_of(group)
    all_logits, all_labels, share = [], [], None
    for r in range(size):
        n = 3 * r  # the first rank has no token at all
        meta = PaddedSeqMeta.from_seq_lens([n, 0], padded_lens=[n + 1, T - n - 1], device=device)
        logits, labels = drawn(group, T, V, seed=r), drawn_ids(group, meta, 1)
        all_logits.append(logits[:n])
        all_labels.append(labels[:n])
        if r == rank:
            with CommDebugMode() as comms:
                share = vocab_parallel_cross_entropy(logits, labels, meta, dp_group=group)
    assert comm_counts(comms) == ({"all_reduce": 1} if size > 1 else {})
    total = share.clone()
    dist.all_reduce(total, group=group)
    expected = F.cross_entropy(torch.cat(all_logits), torch.cat(all_labels), reduction="sum")
    torch.testing.assert_close(total, expected / max(1, sum(3 * r for r in range(size))))
    assert total.isfinite()


def test_shares_of_data_parallel_ranks_add_up(ranks):
    ranks.run(shares_add_up)


def large_logits_stay_finite(group):
    meta = meta_of(group)
    logits = (1e4 * drawn(group, T, V // group.size(), seed=group.rank())).requires_grad_()
    vocab_parallel_cross_entropy(logits, drawn_ids(group, meta, 0), meta, tp_group=group).backward()
    assert logits.grad.isfinite().all()


def test_large_logits(ranks):
    ranks.run(large_logits_stay_finite)


def saves_no_softmax(group):
    meta, saved = meta_of(group), []
    logits = drawn(group, T, V // group.size()).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, drawn_ids(group, meta, 0), meta, tp_group=group)
    large = [t for t in saved if t.numel() > 2 * T]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


def test_cross_entropy_saves_no_softmax(ranks):
    ranks.run(saves_no_softmax)


def compiled_equals_eager(group):
    meta, results = meta_of(group), []
    embedding = VocabParallelEmbedding(
        V, V // group.size(), tp_group=group, device=device_of(group)
    )
    embedding.sequence_parallel = False

    def step(ids):
        logits = embedding(ids, meta)
        return vocab_parallel_cross_entropy(logits, ids, meta, tp_group=group)

    torch._dynamo.reset()
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        embedding.zero_grad()
        loss = call(drawn_ids(group, meta, 0))
        loss.backward()
        results.append((loss, embedding.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_compiles_in_one_graph(ranks):
    ranks.run(compiled_equals_eager)


def cross_entropy_raises(group):
    meta, columns = meta_of(group), V // group.size()
    logits, labels = drawn(group, T, columns), drawn_ids(group, meta, 0)
    wrong = {
        "labels has 23 rows": (logits, labels[1:]),
        "logits has 23 rows": (logits[1:], labels),
        "one integer a row": (logits, labels[:, None]),
        "integer dtype": (logits, labels.float()),
        r"torch\.bool": (logits, labels > 3),
        "floating dtype": (logits.long(), labels),
        "flatten": (logits[:, None], labels),
        "move them": (logits.to("meta"), labels),
    }
    with CommDebugMode() as comms:
        for message, (bad_logits, bad_labels) in wrong.items():
            with pytest.raises(ValueError, match=message):
                vocab_parallel_cross_entropy(bad_logits, bad_labels, meta, tp_group=group)
        with pytest.raises(ValueError, match="seq_meta"):
            vocab_parallel_cross_entropy(logits, labels, tp_group=group)
        if logits.device.type == "cpu":  # on CUDA the assertion ends the process
            for label in (-1, V):
                bad = labels.index_fill(0, meta.real_rows[:1], label)
                with pytest.raises(RuntimeError, match=rf"neither in \[0, {V}\) nor"):
                    vocab_parallel_cross_entropy(logits, bad, meta, tp_group=group)
    assert comms.get_total_counts() == 0


def test_cross_entropy_raises_before_communicating(ranks):
    ranks.run(cross_entropy_raises)


# --- Both ----------------------------------------------------------------------------------------

BYTES = 300  # a vocabulary beyond what 8 bits hold


def narrow_integers_are_ids(group, dtype):
    meta, device = meta_of(group), device_of(group)
    layer = VocabParallelEmbedding(BYTES, H, tp_group=group, device=device)
    ids = torch.randint(120, (T,), generator=torch.Generator().manual_seed(4)).to(device)
    logits = drawn(group, T, BYTES // group.size(), seed=group.rank())
    assert torch.equal(layer(ids.to(dtype), meta), layer(ids, meta))
    # In uint8 the ignored -100 would be 156.
    labels = ids.index_fill(0, meta.real_rows[:1], 156) if dtype == torch.uint8 else ids
    assert torch.equal(
        vocab_parallel_cross_entropy(logits, labels.to(dtype), meta, tp_group=group),
        vocab_parallel_cross_entropy(logits, labels, meta, tp_group=group),
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64],
)
def test_any_integers_are_ids(ranks, dtype):
    ranks.run(narrow_integers_are_ids, dtype=dtype)


class LargeResults(TorchDispatchMode):
    """Keeps every [T, H] tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (T, H):
            self.kept.append(out)
        return out


def test_embedding_makes_its_rows_once():
    meta = PaddedSeqMeta.from_seq_lens([5, 0, 1, 7], padded_lens=[6, 2, 4, 12])
    layer = VocabParallelEmbedding(V, H)
    with LargeResults() as results:
        layer(torch.zeros(T, dtype=torch.int64), meta)
    assert len({t.data_ptr() for t in results.kept}) == 1


@pytest.mark.parametrize("size", [0, -1, 8.0, True])
def test_sizes_are_counts(size):
    with pytest.raises(ValueError, match="num_embeddings must be an integer of at least 1"):
        VocabParallelEmbedding(size, H)
    with pytest.raises(ValueError, match="embedding_dim must be an integer of at least 1"):
        VocabParallelEmbedding(V, size)
