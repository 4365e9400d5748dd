"""Which of its allowed backends ``DotProductAttention`` takes: preference, reasons, verdicts, logs.

Without the real Transformer Engine "te" is the double in ``tests/fake_te``.
"""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from rank_helpers import device_of, drawn
from te_helpers import on_te

from padded_sp import DotProductAttention, PaddedSeqMeta, backends, verdict, verify
from padded_sp import attention_choice as choice
from padded_sp.backends import te_attention

HEADS, HEAD_DIM = 2, 64
REAL, PADDED = [100, 0, 33, 1], [112, 16, 48, 16]
LOG = logging.getLogger("padded_sp")


@pytest.fixture(autouse=True)
def _nothing_known(ranks):
    forget()
    ranks.run(forget)
    yield
    forget()
    ranks.run(forget)


def forget(group=None):
    for known in (verdict._found, verdict._agreed, verdict._common, choice._logged):
        known.clear()
    te_attention._problem.cache_clear()
    backends.import_error.cache_clear()


@contextmanager
def heard(level):
    """The lines that padded_sp logs at this level, and nowhere else."""
    lines = []

    def hear(record):
        if record.levelno == level:
            lines.append(record.getMessage())
        return False

    before = LOG.level
    LOG.setLevel(level)
    LOG.addFilter(hear)
    try:
        yield lines
    finally:
        LOG.removeFilter(hear)
        LOG.setLevel(before)


BOTH = ("te", "torch")  # "auto" may have more of them


def layer_of(group, backend=BOTH, **arguments):
    heads = HEADS * group.size()
    return DotProductAttention(heads, HEAD_DIM, tp_group=group, backend=backend, **arguments)


def meta_of(group, real=REAL):
    return PaddedSeqMeta.from_seq_lens(real, padded_lens=PADDED, device=device_of(group))


def inputs_of(group, meta, dtype=torch.bfloat16):
    shape = meta.num_rows, HEADS, HEAD_DIM
    return [drawn(group, *shape, seed=seed, dtype=dtype) for seed in range(3)]


def chosen(layer, inputs, meta, kv_meta=None):
    """The backend that a call goes to; the call is made."""
    called = []

    def spy(backend):
        def compute(*args, **kwargs):
            called.append(backend.name)
            return backend.compute(*args, **kwargs)

        return backend._replace(compute=compute)

    twin = copy.copy(layer._choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_choice", twin)
        twin._allowed = tuple(map(spy, twin._allowed))
        twin._only = twin._only and twin._allowed[0]
        layer(*(x.clone() for x in inputs), meta, kv_meta)
    (name,) = called
    return name


def right_verdict(backend, **combination):
    return verify.Verdict(f"attention by {backend}", True, {"grad_k": 0.001}, {"grad_k": 0.03})


def wrong_verdict(backend, **combination):
    return verify.Verdict(f"attention by {backend}", False, {"grad_k": 0.3}, {"grad_k": 0.03})


def verifies(patch, **answers):
    """Lets the checks of these backends answer so; counts who was asked."""
    asked = []
    real = verify.verify_attention

    def verify_attention(backend, **combination):
        asked.append(backend)
        return answers.get(backend, real)(backend, **combination)

    patch.setattr(verify, "verify_attention", verify_attention)
    return asked


# --- what is allowed -----------------------------------------------------------------------------


def installed():
    return tuple(
        name for name in backends.AUTO if backends.import_error(backends.ATTENTION[name]) is None
    )


@pytest.mark.max_ranks(1)
def test_names():
    for backend, names in (
        ("torch", ("torch",)),
        (("torch", "te"), ("torch", "te")),
        (["te"], ("te",)),
        ("auto", installed()),
    ):
        assert DotProductAttention(2, 8, backend=backend)._choice.names == names
    for backend in ("flash9", ("torch", "flash9"), ("torch", "auto"), ""):
        with pytest.raises(ValueError, match="there is no backend"):
            DotProductAttention(2, 8, backend=backend)
    with pytest.raises(ValueError, match="names no backend"):
        DotProductAttention(2, 8, backend=())


@pytest.mark.max_ranks(1)
def test_only_auto_leaves_out_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    for name in ("te", "te_attention"):
        monkeypatch.delitem(sys.modules, f"padded_sp.backends.{name}", raising=False)
    for named in ("te", ("te", "torch"), ("torch", "te")):
        with pytest.raises(ImportError, match=r"pip install 'padded_sp\[te\]'"):
            DotProductAttention(2, 8, backend=named)
    with heard(logging.WARNING) as lines:
        assert "te" not in DotProductAttention(2, 8, backend="auto")._choice.names
    assert lines == []


@pytest.mark.max_ranks(1)
def test_auto_tells_of_what_is_installed_and_broken(monkeypatch):
    def broken(path):
        if path == backends.ATTENTION["te"]:
            raise OSError("undefined symbol: _ZN3c10")
        return importlib.import_module(path)

    monkeypatch.setattr(backends, "_module", broken)
    with heard(logging.WARNING) as lines:
        for _ in range(2):
            assert "te" not in DotProductAttention(2, 8, backend="auto")._choice.names
    assert lines == ["backend 'auto' leaves out 'te': undefined symbol: _ZN3c10"]


# --- what is taken -------------------------------------------------------------------------------


@on_te
def preference_body(group):
    meta = meta_of(group)
    half, single = inputs_of(group, meta), inputs_of(group, meta, torch.float32)
    for backend, expected in (
        (BOTH, ("te", "torch")),
        (("torch", "te"), ("torch", "torch")),
    ):
        layer = layer_of(group, backend)
        assert (chosen(layer, half, meta), chosen(layer, single, meta)) == expected
    for backend, inputs in (("te", half), ("torch", single)):
        results = [layer_of(group, name)(*inputs, meta) for name in (BOTH, backend)]
        assert torch.equal(*results)


@pytest.mark.max_ranks(2)
def test_the_first_that_takes_it(ranks):
    ranks.run(preference_body)


@on_te
def log_body(group):
    meta = meta_of(group)
    half, single = inputs_of(group, meta), inputs_of(group, meta, torch.float32)
    with heard(logging.DEBUG) as lines:
        for layer in (layer_of(group), layer_of(group)):
            for inputs in (half, single, half, single):
                layer(*inputs, meta)
        layer_of(group, "te")(*half, meta)
    subject = f"attention, {HEADS} heads of 64/64, {HEADS} KV heads, causal"
    te, plain = lines
    assert te == f"{subject}, bfloat16, pads: backend 'te'"
    assert plain.startswith(f"{subject}, float32, pads: backend 'torch'; not 'te': no attention")


@pytest.mark.max_ranks(2)
def test_each_choice_is_logged_once(ranks):
    ranks.run(log_body)


@on_te
def none_left_body(group):
    meta = meta_of(group)
    capacity = meta.with_capacity(8, meta.num_rows, 128)
    inputs = inputs_of(group, meta, torch.float32)
    with pytest.raises(ValueError, match="none of the allowed backends") as raised:
        layer_of(group)(*inputs, capacity)
    _, te, plain = str(raised.value).split("\n")
    assert te.startswith("  te: no attention backend of Transformer Engine takes 2 heads of 64")
    assert plain.startswith("  torch: attention in torch.float32")
    assert "which a meta with capacity does not have" in plain
    # One that stands alone says the same by itself.
    for backend, words in (("te", "takes 2 heads of 64"), ("torch", "a meta with capacity")):
        with pytest.raises(ValueError, match=words):
            layer_of(group, backend, verify=False)(*inputs, capacity)


@pytest.mark.max_ranks(2)
def test_none_is_left(ranks):
    ranks.run(none_left_body)


# --- verdicts ------------------------------------------------------------------------------------


@on_te
def one_wrong_rank_body(group):
    """The last rank alone finds wrong numbers; all pass over the backend, none computes with it."""
    meta = meta_of(group)
    inputs = inputs_of(group, meta)
    is_last = group.rank() == group.size() - 1
    with pytest.MonkeyPatch.context() as patch:
        asked = verifies(patch, te=wrong_verdict if is_last else right_verdict)
        with heard(logging.WARNING) as lines:
            for _ in range(2):
                layer = layer_of(group)
                assert chosen(layer, inputs, meta) == "torch"
                assert chosen(layer, inputs, meta) == "torch"
        assert asked == ["te"]
        (line,) = lines
        assert line.startswith("backend 'te' is passed over: it is wrong on this machine")
        assert "grad_k 0.3 (at most 0.03)" in line
        assert group.size() == 1 or f"on rank {group.size() - 1} of {group.size()}" in line
        with pytest.raises(ValueError, match=r"backend 'te' is wrong .*grad_k 0\.3"):
            layer_of(group, "te")(*inputs, meta)
        with pytest.raises(ValueError, match=r"backend 'te' is wrong .*grad_k 0\.3"):
            layer_of(group, ("te",))(*inputs, meta)
        assert chosen(layer_of(group, verify=False), inputs, meta) == "te"
        patch.setenv("PADDED_SP_VERIFY", "0")
        assert chosen(layer_of(group), inputs, meta) == "te"


@pytest.mark.max_ranks(2)
def test_wrong_numbers_on_one_rank(ranks):
    ranks.run(one_wrong_rank_body)


@on_te
def prepare_body(group):
    meta, tight = meta_of(group), meta_of(group, real=PADDED)
    inputs = inputs_of(group, meta)
    layer = layer_of(group)
    with pytest.MonkeyPatch.context() as patch:
        asked = verifies(patch)
        for pads in (True, False):
            layer.prepare(torch.bfloat16, device_of(group), pads=pads)
        layer.prepare(torch.float32, device_of(group))  # with pads and without
        assert asked == ["te", "torch"] * 2 + ["torch"] * 2  # te does not take float32
        patch.setattr(verdict, "agreed", None)
        assert chosen(layer, inputs, meta) == "te"
        assert chosen(copy.deepcopy(layer), inputs, tight) == "te"
        assert chosen(layer, inputs_of(group, meta, torch.float32), meta) == "torch"


@pytest.mark.max_ranks(2)
def test_nothing_is_proved_after_prepare(ranks):
    ranks.run(prepare_body)


@on_te
def prepare_wrong_body(group):
    meta = meta_of(group)
    inputs = inputs_of(group, meta)
    with pytest.MonkeyPatch.context() as patch:
        verifies(patch, te=wrong_verdict)
        layer = layer_of(group)
        with heard(logging.WARNING) as lines:
            layer.prepare(torch.bfloat16, device_of(group))
        assert len(lines) == 1
        assert chosen(layer, inputs, meta) == "torch"
    forget(group)
    with pytest.MonkeyPatch.context() as patch:
        verifies(patch, te=wrong_verdict, torch=wrong_verdict)
        layer = layer_of(group)
        with heard(logging.WARNING):
            with pytest.raises(ValueError, match="none of the allowed backends") as raised:
                layer.prepare(torch.bfloat16, device_of(group))
            with pytest.raises(ValueError, match="none of the allowed backends"):
                layer(*inputs, meta)
    assert str(raised.value).count("grad_k 0.3") == 2


@pytest.mark.max_ranks(2)
def test_prepare_keeps_failing_verdicts(ranks):
    ranks.run(prepare_wrong_body)


@on_te
def other_group_body(group):
    """What was proved by other ranks is proved anew by those that the layer gets."""
    meta = meta_of(group)
    layer = DotProductAttention(HEADS * group.size(), HEAD_DIM, tp_size=group.size(), backend="te")
    layer.prepare(torch.bfloat16, device_of(group))
    layer.set_tensor_parallel_group(group)
    with pytest.MonkeyPatch.context() as patch:
        verifies(patch, te=wrong_verdict)
        forget(group)
        with pytest.raises(ValueError, match="wrong on this machine"):
            layer(*inputs_of(group, meta), meta)


@pytest.mark.max_ranks(2)
def test_another_group_proves_for_itself(ranks):
    ranks.run(other_group_body)


@on_te
def capture_body(group):
    def refuse():
        raise ValueError("under capture")

    meta = meta_of(group)
    inputs, single = inputs_of(group, meta), inputs_of(group, meta, torch.float32)
    prepared, unproved = layer_of(group), layer_of(group)
    prepared.prepare(torch.bfloat16, device_of(group))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "refuse_capture", refuse)
        assert chosen(prepared, inputs, meta) == "te"
        for layer in (unproved, layer_of(group, "te")):
            with pytest.raises(ValueError, match="under capture"):
                layer(*inputs, meta)
        assert chosen(unproved, single, meta) == "torch"  # which needs no proof
        assert chosen(layer_of(group, ("torch", "te")), inputs, meta) == "torch"


@pytest.mark.max_ranks(2)
def test_nothing_is_proved_under_capture(ranks):
    ranks.run(capture_body)


# --- reasons -------------------------------------------------------------------------------------


def rows(group, num_rows, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16):
    """[num_rows, heads, head_dim] of one element of memory."""
    return torch.zeros(1, 1, 1, dtype=dtype, device=device_of(group)).expand(
        num_rows, heads, head_dim
    )


def reason_of_te(group, meta, kv_meta=None, heads=HEADS, window=(-1, 0), dropout=0.0, **of_rows):
    kv_meta = kv_meta or meta
    q = rows(group, meta.num_rows, heads, **of_rows)
    k = rows(group, kv_meta.num_rows, heads, **of_rows)
    options = {"window": window, "dropout": dropout}
    return te_attention.reason_against(q, k, k, meta, kv_meta, **options)


@on_te
def deterministic_body(group):
    def meta(*lengths):
        return PaddedSeqMeta.from_seq_lens(lengths, device=device_of(group))

    below, at = meta(2**14, 2**14 - 1), meta(2**14, 2**14)
    cross = meta(2**13, 2**13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_attention, "is_hopper", lambda device: True)
        reason = reason_of_te(group, at)
        assert "2 * 2 * 16384 * 16384 = 1073741824" in reason
        assert "deterministic" in reason
        assert reason_of_te(group, below)  # as the longest counts, not the sum
        assert reason_of_te(group, at, heads=1) == ""
        assert reason_of_te(group, at, cross) == ""
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
        assert reason_of_te(group, at) == ""
        torch.use_deterministic_algorithms(True)
        try:
            assert reason_of_te(group, at) == reason
        finally:
            torch.use_deterministic_algorithms(False)
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        patch.setattr(te_attention, "is_hopper", lambda device: False)
        assert reason_of_te(group, at) == ""

        # By the length of a pack one layer goes to one backend or to the other.
        patch.setattr(te_attention, "is_hopper", lambda device: True)
        patch.setattr(te_attention, "_MOST_DETERMINISTIC_SCORES", 4 * HEADS * 112 * 112)
        layer, packed = layer_of(group, verify=False), meta_of(group)
        shorter = PaddedSeqMeta.from_seq_lens(
            [100, 0, 0], padded_lens=[112, 40, 40], device=device_of(group)
        )
        inputs = inputs_of(group, packed)
        assert [chosen(layer, inputs, m) for m in (packed, shorter)] == ["torch", "te"]
        with pytest.raises(ValueError, match=r"4 \* 2 \* 112 \* 112 = 100352; .*backend='torch'"):
            layer_of(group, "te", verify=False)(*inputs, packed)


@pytest.mark.max_ranks(1)
def test_the_limit_of_deterministic_algorithms(ranks):
    ranks.run(deterministic_body)


@on_te
def windows_body(group):
    longer = PaddedSeqMeta.from_seq_lens([64, 64], device=device_of(group))
    shorter = PaddedSeqMeta.from_seq_lens([32, 64 - 32], device=device_of(group))
    for window in ((16, 0), (-1, 4)):
        assert "window" in reason_of_te(group, longer, window=window, dropout=0.1)
        assert "window" in reason_of_te(group, longer, shorter, window=window)
        assert reason_of_te(group, shorter, longer, window=window) == ""
    for window in ((-1, 0), (-1, -1)):
        assert reason_of_te(group, longer, shorter, window=window, dropout=0.1) == ""

    # One side without a limit: Transformer Engine asserts that it has one.
    meta = meta_of(group)
    for window in ((16, -1), (-1, 16)):
        one_sided = layer_of(group, ("te",), mask="full", window=window)
        plain = layer_of(group, "torch", mask="full", window=window)
        inputs = inputs_of(group, meta)
        out, expected = one_sided(*inputs, meta), plain(*inputs, meta)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)

    layer = layer_of(group, window=(16, 0), dropout=0.1, verify=False)
    meta = meta_of(group)
    assert chosen(layer, inputs_of(group, meta), meta) == "torch"
    assert chosen(layer.eval(), inputs_of(group, meta), meta) == "te"


@pytest.mark.max_ranks(1)
def test_windows_that_cudnn_does_not_take(ranks):
    ranks.run(windows_body)


@on_te
def kernels_body(group):
    meta, tight = meta_of(group), meta_of(group, real=PADDED)
    assert reason_of_te(group, meta) == reason_of_te(group, tight) == ""
    for of_rows in ({"head_dim": 36}, {"head_dim": 264}, {"dtype": torch.float32}):
        for each in (meta, tight):
            assert "no attention backend of Transformer" in reason_of_te(group, each, **of_rows)
    te_attention._problem.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_attention, "cudnn_version", lambda: (9, 14, 0))
        patch.setattr(te_attention, "is_hopper", lambda device: True)
        assert reason_of_te(group, meta).startswith("cuDNN 9.14.0, which Transformer Engine loaded")
        assert reason_of_te(group, tight) == ""
        assert chosen(layer_of(group, verify=False), inputs_of(group, meta), meta) == "torch"


@pytest.mark.max_ranks(1)
def test_kernels_that_there_are_not(ranks):
    ranks.run(kernels_body)


@on_te
def flash_body(group):
    """FlashAttention, where Transformer Engine has it, may take what cuDNN does not."""
    meta, tight = meta_of(group), meta_of(group, real=PADDED)
    longer, shorter = (
        PaddedSeqMeta.from_seq_lens([n, n], device=device_of(group)) for n in (64, 32)
    )
    call = {"window": (16, 0), "dropout": 0.1}
    internals = te_attention._te_internals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_FLASH_ATTN", "1")
        for installed, taken in (
            ((), (False, False)),
            (("is_installed",), (False, True)),
            (("v3_is_installed",), (False, False)),
            (("v4_is_installed",), (False, False)),
        ):
            flags = dict.fromkeys(("is_installed", "v3_is_installed", "v4_is_installed"), False)
            flags |= dict.fromkeys(installed, True)
            patch.setattr(internals.dpa_utils, "FlashAttentionUtils", SimpleNamespace(**flags))
            assert tuple(not reason_of_te(group, m, **call) for m in (meta, tight)) == taken
            # A window without dropout, its queries longer than its keys.
            assert (not reason_of_te(group, longer, shorter, window=(16, 0))) == bool(installed)
        patch.setenv("NVTE_FLASH_ATTN", "0")
        assert reason_of_te(group, tight, **call)


@pytest.mark.max_ranks(1)
def test_flash_attention_of_te(ranks):
    ranks.run(flash_body)


@on_te
def own_reasons_body(group):
    """Head sizes that no other test has: Transformer Engine keeps its last choice, by shape."""
    meta = meta_of(group)
    x = drawn(group, meta.num_rows, HEADS, 72, dtype=torch.bfloat16)
    layer = DotProductAttention(
        HEADS * group.size(), 72, tp_group=group, backend="te", verify=False
    )
    logger = logging.getLogger("DotProductAttention")
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("FUSED", "UNFUSED", "FLASH"):
            patch.setenv(f"NVTE_{kind}_ATTN", "0")
        with pytest.raises(ValueError, match="takes 2 heads of 72") as raised:
            layer(x, x, x, meta)
        level, filters = logger.level, list(logger.filters)
        told = str(raised.value)
        assert "Its own reasons: Disabling " in told
        assert "due to NVTE_FUSED_ATTN=0; Disabling " in told
        assert "config=" not in told
        assert "\n" not in told
        assert (level, filters) == (logging.WARNING, [])
        # What cannot be told is left out.
        patch.setattr(te_attention, "_te_internals", lambda: None)
        with pytest.raises(ValueError, match=r"\(not NVTE_FUSED_ATTN=0\); use [^.]*'auto'$"):
            layer(x, x, x, meta)


@pytest.mark.max_ranks(1)
def test_reasons_of_te_itself(ranks):
    ranks.run(own_reasons_body)


# --- a layer like any other ----------------------------------------------------------------------


@on_te
def compiled_body(group):
    """What cannot be traced is not reached: a graph gets the backend that needs no proof."""
    torch._dynamo.reset()
    meta = meta_of(group).to("cpu")
    inputs = [x.cpu() for x in inputs_of(group, meta, torch.float32)]
    expected = layer_of(group, "torch")(*inputs, meta)
    for backend in ("auto", ("torch", "te")):
        layer = layer_of(group, backend)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs, meta), expected)
        half = [x.bfloat16() for x in inputs]
        torch.testing.assert_close(
            compiled(*half, meta), layer_of(group, "torch")(*half, meta), atol=1e-2, rtol=1e-2
        )


@pytest.mark.max_ranks(1)
def test_compiles(ranks):
    ranks.run(compiled_body)


@on_te
def compiled_choice_body(group):
    """None of them is traced, and none goes unproved."""
    meta = meta_of(group)
    inputs = inputs_of(group, meta)
    forget(group)
    with pytest.MonkeyPatch.context() as patch:
        asked = verifies(patch)
        layer = layer_of(group, ("triton", "te"))  # on a GPU the former, else the latter
        out = torch.compile(layer, backend="aot_eager")(*inputs, meta)
        assert asked
    assert torch.equal(out, layer(*inputs, meta))


@pytest.mark.max_ranks(1)
def test_compiled_code_leaves_its_graph_to_choose(ranks):
    ranks.run(compiled_choice_body)


@on_te
def kinds_body(group):
    """A proof tells nothing of calls of another kind."""
    meta = meta_of(group)
    keys = meta_of(group, real=[n + 1 for n in REAL])
    inputs = inputs_of(group, meta)
    combinations = []

    def record(backend, **combination):
        deterministic = torch.are_deterministic_algorithms_enabled()
        combinations.append((combination["pads"], combination["other_keys"], deterministic))
        return right_verdict(backend)

    forget(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "verify_attention", record)
        layer = layer_of(group, "te")
        for _ in range(2):
            layer(*inputs, meta)
            layer(*inputs, meta, keys)
            torch.use_deterministic_algorithms(True)
            try:
                layer(*inputs, meta)
            finally:
                torch.use_deterministic_algorithms(False)
    expected = [(True, False, False), (True, True, False), (True, False, True)]
    assert combinations == expected


@pytest.mark.max_ranks(1)
def test_each_kind_of_call_has_its_own_proof(ranks):
    ranks.run(kinds_body)


@on_te
def other_environment_body(group):
    """Ranks that would wait for others that do not come say so, all of them, at once."""
    if group.size() == 1:
        return
    meta = meta_of(group)
    inputs = inputs_of(group, meta)
    forget(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PADDED_SP_VERIFY", str(group.rank() % 2))
        with pytest.raises(ValueError, match="differ in PADDED_SP_VERIFY: 0 on rank 0, 1 on rank"):
            layer_of(group, "te")(*inputs, meta)
    layer = layer_of(group)
    if group.rank():
        layer._choice._list = "torch"
    with pytest.raises(ValueError, match=r"backends of attention that .* te, torch on rank 0"):
        layer(*inputs, meta)
    forget(group)
    assert chosen(layer_of(group), inputs, meta) == "te"


@pytest.mark.max_ranks(2)
def test_ranks_with_other_environments(ranks):
    ranks.run(other_environment_body)


@on_te
def copies_body(group):
    meta = meta_of(group)
    inputs = inputs_of(group, meta)
    layer = layer_of(group)
    out = layer(*inputs, meta)
    assert list(layer_of(group, "te").state_dict()) == ["_extra_state"]
    assert list(layer.state_dict()) == []  # which must not go by what is installed
    assert "backend=('te', 'torch')" in repr(layer)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(*inputs, meta), out)
        assert twin._choice._proved == layer._choice._proved  # the pickled one proved it again
        assert twin._choice._proved is not layer._choice._proved
    assert not pickle.loads(pickle.dumps(layer))._choice._proved


@pytest.mark.max_ranks(1)
def test_copies(ranks):
    ranks.run(copies_body)
