"""verify: right numbers pass, wrong ones fail, and a step around the check does not notice it."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from padded_sp import PaddedSeqMeta, backends, compare, verify
from padded_sp.backends import torch_attention, torch_linear
from padded_sp.backends.isolation import current_device, isolated
from padded_sp.verdict import Verdict

CPU = torch.device("cpu")
SMALL = {"num_heads": 2, "head_dim": 32}


@pytest.fixture
def broken(monkeypatch):
    """Puts a backend called "broken" beside the others."""

    def put(**names):
        monkeypatch.setitem(sys.modules, "broken_backend", SimpleNamespace(**names))
        for table in (backends.ATTENTION, backends.LINEAR):
            monkeypatch.setitem(table, "broken", "broken_backend")

    return put


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr("padded_sp.verdict._found", {})


class Scaled(torch.autograd.Function):
    """A gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def attention_with(change):
    """The torch backend behind a change of its inputs (a dict by name) or of its output."""

    def dot_product_attention(q, k, v, meta, kv_meta, **options):
        x = change({"q": q, "k": k, "v": v, "meta": meta})
        meta = x["meta"]
        out = torch_attention.dot_product_attention(x["q"], x["k"], x["v"], meta, meta, **options)
        return x["after"](out) if "after" in x else out

    return dot_product_attention


# --- Attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "combination",
    [
        {"num_heads": 2, "head_dim": 64},
        {"num_heads": 4, "head_dim": 48, "num_kv_heads": 2, "window": (32, 16)},
        {"num_heads": 3, "head_dim": 40, "num_kv_heads": 1, "window": (-1, -1)},
        {"num_heads": 3, "head_dim": 24, "v_head_dim": 16, "window": (64, 0), "pads": False},
        {"num_heads": 2, "head_dim": 32, "dtype": torch.float16, "softmax_scale": 1.0},
        {"num_heads": 2, "head_dim": 32, "dtype": torch.float32},
        {"num_heads": 2, "head_dim": 32, "dtype": torch.float64, "softmax_scale": 0.01},
    ],
    ids=str,
)
def test_right_attention_passes(combination):
    verdict = verify.verify_attention("torch", device=CPU, **combination)
    assert verdict.passed, str(verdict)
    assert list(verdict.figures) == ["output", "grad_q", "grad_k", "grad_v", "pads"]
    # The limits are neither far away nor scraped.
    worst = max(verdict.figures[name] / verdict.limits[name] for name in list(verdict.figures)[:4])
    assert worst < 0.5, str(verdict)
    assert combination.get("dtype") in (torch.float32, torch.float64) or worst > 0.02, str(verdict)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_gradient_fails(broken, name):
    wrong = attention_with(lambda x: x | {name: Scaled.apply(x[name], 1.3)})
    broken(dot_product_attention=wrong)
    verdict = verify.verify_attention("broken", device=CPU, **SMALL)
    assert not verdict.passed
    assert list(verdict.too_large) == [f"grad_{name}"]
    assert verdict.figures[f"grad_{name}"] == pytest.approx(0.3, abs=0.02)
    assert f"grad_{name} 0.3 (at most 0.03)" in str(verdict)
    assert "attention by broken, 2 heads of 32, causal, bfloat16, pads: " in str(verdict)


@pytest.mark.parametrize("sequence", range(5))
def test_one_wrong_sequence_fails_however_short(broken, sequence):
    def change(x):
        meta = x["meta"]
        start = sum(meta.padded_lens[:sequence])
        factor = torch.ones(meta.num_rows, 1, 1)
        factor[start : start + meta.padded_lens[sequence]] = 1.3
        return x | {"after": lambda out: out * factor.to(out)}

    broken(dot_product_attention=attention_with(change))
    verdict = verify.verify_attention("broken", device=CPU, **SMALL)
    assert verdict.figures["output"] == pytest.approx(0.3, abs=0.02)
    assert not verdict.passed


def test_attended_pads_fail(broken):
    """The padded boundaries taken for the real ones: right where nothing is padded."""

    def change(x):
        padded = x["meta"].padded_lens
        return x | {"meta": PaddedSeqMeta.from_seq_lens(padded, padded_lens=padded)}

    broken(dot_product_attention=attention_with(change))
    full = {"window": (-1, -1), "device": CPU, **SMALL}
    assert not verify.verify_attention("broken", **full).passed
    assert verify.verify_attention("broken", pads=False, **full).passed


def test_nan_of_pads_stays_in_them_or_fails(broken):
    def in_pads(x):
        pads = x["meta"].padding_mask[:, None, None]
        return x | {"after": lambda out: out.masked_fill(pads, torch.nan)}

    def everywhere(x):
        return x | {"after": lambda out: out + 0 * in_pads(x)["after"](out).sum()}

    broken(dot_product_attention=attention_with(in_pads))
    assert verify.verify_attention("broken", device=CPU, **SMALL).passed
    broken(dot_product_attention=attention_with(everywhere))
    verdict = verify.verify_attention("broken", device=CPU, **SMALL)
    assert not verdict.passed
    assert verdict.figures["output"] == torch.inf


@pytest.mark.parametrize("left", [-7.0, torch.nan])
def test_pads_that_are_not_zeroed_fail(broken, monkeypatch, left):
    def change(x):
        pads = x["meta"].padding_mask[:, None, None]
        return x | {"after": lambda out: out.masked_fill(pads, left)}

    broken(dot_product_attention=attention_with(change))
    assert verify.verify_attention("broken", device=CPU, **SMALL).passed
    monkeypatch.setattr("padded_sp.backends.attend.inert_output", lambda y, meta, **how: y)
    verdict = verify.verify_attention("broken", device=CPU, **SMALL)
    assert verdict.figures["pads"] == (7 if left == -7 else torch.inf)
    assert list(verdict.too_large) == ["pads"]
    assert not verdict.passed


def test_only_the_ends_of_many_heads_are_compared(broken):
    """Heads are independent; a wrong one at either end is seen."""

    def wrong_head(head):
        def change(x):
            factor = torch.ones(8, 1)
            factor[head] = 1.3
            return x | {"after": lambda out: out * factor.to(out)}

        return attention_with(change)

    for head in (0, 3, 4, 7):
        broken(dot_product_attention=wrong_head(head))
        heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
        assert not verify.verify_attention("broken", device=CPU, **heads).passed, head


def test_a_backend_that_raises_is_a_failing_verdict(broken):
    def dot_product_attention(*_, **__):
        raise RuntimeError("no kernel image\nand a page of other things")

    broken(dot_product_attention=dot_product_attention)
    verdict = verify.verify_attention("broken", device=CPU, **SMALL)
    assert not verdict.passed
    assert verdict.figures == {}
    assert str(verdict).endswith(": RuntimeError: no kernel image")


def test_the_callers_mistakes_raise():
    with pytest.raises(ValueError, match="no backend 'flash9'"):
        verify.verify_attention("flash9", **SMALL)
    with pytest.raises(ValueError, match="num_heads=3 is no multiple of num_kv_heads=2"):
        verify.verify_attention("torch", num_heads=3, num_kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="dtype must be one of"):
        verify.verify_attention("torch", dtype=torch.int32, **SMALL)
    with pytest.raises(ValueError, match="layer must be one of column, row, layer_norm_column"):
        verify.verify_linear("torch", layer="mlp")
    with pytest.raises(ValueError, match="recipe one of bf16, "):
        verify.verify_linear("torch", recipe="int4")
    with pytest.raises(ValueError, match="backend 'torch' has no FP8"):
        verify.verify_linear("torch", recipe="fp8_current")


# --- Linears -------------------------------------------------------------------------------------

LAYERS = ("column", "row", "layer_norm_column")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_right_linears_pass(layer, dtype):
    verdict = verify.verify_linear("torch", layer=layer, dtype=dtype, device=CPU)
    assert verdict.passed, str(verdict)
    norm = ["grad_layer_norm_weight", "grad_layer_norm_bias"] if layer == LAYERS[2] else []
    assert [*verdict.figures] == [
        "output", "grad_x", "grad_weight", "grad_bias", *norm, "pads"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "figure"), [(0, "grad_x"), (1, "grad_weight"), (2, "grad_bias")]
)
def test_a_wrong_linear_fails(broken, argument, figure):
    def multiply(*arguments):
        arguments = list(arguments)
        arguments[argument] = Scaled.apply(arguments[argument], 0.7)
        return torch_linear.column_parallel_linear(*arguments)

    broken(column_parallel_linear=multiply, row_parallel_linear=multiply)
    for layer in ("column", "row"):
        verdict = verify.verify_linear("broken", layer=layer, device=CPU)
        assert list(verdict.too_large) == [figure]
        assert not verdict.passed


te_recipes = pytest.mark.parametrize(
    "recipe", ["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise"]
)


@te_recipes
@pytest.mark.parametrize("layer", LAYERS)
def test_recipes_stay_within_their_limits(recipe, layer):
    """Limits follow from the formats: right FP8 is near half of them, BF16 far below."""
    verdict = verify.verify_linear("te", recipe=recipe, layer=layer)
    assert verdict.passed, str(verdict)
    shares = [verdict.figures[name] / verdict.limits[name] for name in ("output", "grad_weight")]
    assert all(s < 0.7 for s in shares), str(verdict)
    assert recipe == "bf16" or all(s > 0.3 for s in shares), str(verdict)
    assert all(limit < 0.15 for limit in verdict.limits.values())


@te_recipes
def test_a_wrong_te_linear_fails(monkeypatch, recipe):
    module = backends.load(backends.LINEAR, "te")
    right = module.run

    def run(held, x, *arguments, **options):
        return right(held, Scaled.apply(x, 1.3), *arguments, **options)

    monkeypatch.setattr(module, "run", run)
    verdict = verify.verify_linear("te", recipe=recipe)
    assert [*verdict.too_large] == ["grad_x"]


def test_a_recipe_that_this_gpu_lacks():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has it")
    verdict = verify.verify_linear("te", recipe="mxfp8")
    assert not verdict.passed
    assert "compute capability 10.0" in str(verdict)


# --- In the middle of a step ---------------------------------------------------------------------


def check_quietly():
    return verify.verify_attention("torch", device=CPU, **SMALL)


def test_random_states_are_untouched():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_quietly()
    verify.verify_linear("torch", device=CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "surrounding",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default device"],
)
def test_the_surroundings_change_nothing(surrounding):
    options = {"dtype": torch.float32, "device": CPU, **SMALL}
    expected = verify.verify_attention("torch", **options)
    with surrounding():
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        verdict = verify.verify_attention("torch", **options)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference)
    assert verdict == expected
    assert verdict.passed


def test_inside_an_activation_checkpoint():
    """Its hooks count saved tensors; a check that runs in the forward alone would upset them."""
    weight = torch.randn(4, 4, requires_grad=True)
    verdicts = []

    def block(x):
        if not verdicts:
            verdicts.append(check_quietly())
        return (x @ weight).exp()

    checkpoint(block, torch.randn(2, 4), use_reentrant=False).sum().backward()
    assert verdicts[0].passed
    assert weight.grad is not None


def test_isolation_ends_with_an_error():
    def fails():
        with torch.no_grad(), isolated(CPU):
            torch.rand(1)
            raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_never_under_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for check in (
        check_quietly,
        lambda: verify.verify_linear("torch", device=CPU),
        lambda: verify.agreed(check_quietly, "key", None),
    ):
        with pytest.raises(ValueError, match=r"prepare\(\) before the capture"):
            check()


# --- Transformer Engine's state ------------------------------------------------------------------


class OldManager:
    """Where 2.12 keeps it."""

    FP8_ENABLED = False
    AUTOCAST_DEPTH = 0
    global_amax_buffer: ClassVar[dict] = {}

    @classmethod
    def reset(cls):
        cls.FP8_ENABLED, cls.AUTOCAST_DEPTH, cls.global_amax_buffer = False, 0, {}

    @classmethod
    def state(cls):
        return SimpleNamespace(enabled=cls.FP8_ENABLED, buffer=cls.global_amax_buffer)

    @classmethod
    def enter(cls):
        cls.FP8_ENABLED = True
        cls.AUTOCAST_DEPTH += 1


class NewManager:
    """Where 2.20 keeps it."""

    quantization_state = SimpleNamespace(enabled=False, depth=0, buffer={})

    @classmethod
    def reset(cls):
        cls.quantization_state = SimpleNamespace(enabled=False, depth=0, buffer={})

    @classmethod
    def state(cls):
        return cls.quantization_state

    @classmethod
    def enter(cls):
        cls.quantization_state.enabled = True
        cls.quantization_state.depth += 1


@pytest.mark.parametrize("manager", [OldManager, NewManager])
def test_te_state_is_set_aside_and_comes_back(monkeypatch, manager):
    te_state = importlib.import_module("padded_sp.backends.te_state")
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    monkeypatch.setattr(te_state, "FP8GlobalStateManager", manager)
    flag = "_FP8_ACTIVATION_RECOMPUTE_PHASE"
    monkeypatch.setattr(distributed, flag, True, raising=False)
    manager.reset()
    manager.enter()
    manager.state().buffer["forward"] = [1]
    before, buffer, numbers = vars(manager).copy(), manager.state().buffer, torch.get_rng_state()

    def fails():
        with torch.no_grad(), te_state.undisturbed():
            assert not manager.state().enabled
            assert manager.state().buffer == {}
            assert not getattr(distributed, flag)
            assert torch.is_grad_enabled()
            manager.enter()
            manager.state().buffer["forward"] = [2]
            torch.rand(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert vars(manager) == before
    assert manager.state().enabled
    assert manager.state().buffer is buffer
    assert buffer == {"forward": [1]}
    assert getattr(distributed, flag)
    assert torch.equal(torch.get_rng_state(), numbers)


@te_recipes
def test_between_two_modules_of_an_autocast(recipe):
    """Their scales, and which of them is the first, are what they are without the check."""
    te = importlib.import_module("padded_sp.backends.te")
    device = current_device()

    def two_steps(check):
        te.FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        modules = [te.te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2)]
        x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
        seen = []
        for _ in range(2):
            with te.autocast(te.make_recipe(recipe)):
                y = modules[0](x)
                check()
                y = modules[1](y)
            y.square().sum().backward()
            check()
            seen += [y.detach(), torch.rand(2), torch.rand(2, device=device)]
        for module in modules:
            seen += [p.grad for p in module.parameters()]
            for key in ("scaling_fwd", "scaling_bwd") if recipe == "fp8_delayed" else ():
                seen += [module.fp8_meta[key].scale, module.fp8_meta[key].amax_history]
        te.FP8GlobalStateManager.reset()
        return seen

    def check():
        for other in ("bf16", "fp8_delayed", "fp8_current"):
            assert verify.verify_linear("te", recipe=other).passed

    expected = two_steps(lambda: None)
    for a, b in zip(two_steps(check), expected, strict=True):
        assert torch.equal(a, b)


# --- Verdicts ------------------------------------------------------------------------------------


def test_one_check_a_process_and_key(nothing_known):
    verdicts = [Verdict("first", True, {}, {}), Verdict("second", True, {}, {})]
    given = iter(verdicts)
    assert verify.agreed(lambda: next(given), "a", None) is verdicts[0]
    assert verify.agreed(lambda: next(given), "a", None) is verdicts[0]
    assert verify.agreed(lambda: next(given), "b", None) is verdicts[1]


def test_a_check_that_raises_is_made_again(nothing_known):
    def raises():
        raise KeyError("odd")

    for _ in range(2):
        with pytest.raises(KeyError, match="odd"):
            verify.agreed(raises, "key", None)


def test_the_switch(monkeypatch):
    for value, expected in ((None, True), ("1", True), ("0", False)):
        if value is None:
            monkeypatch.delenv("PADDED_SP_VERIFY", raising=False)
        else:
            monkeypatch.setenv("PADDED_SP_VERIFY", value)
        assert verify.is_enabled() is expected


def test_relative_errors():
    spans = [(0, 2), (2, 4)]
    exact = torch.tensor([1.0, 1, 2, 2], dtype=torch.float64)[:, None]
    error = compare._relative_error
    assert error(exact, exact, spans) == 0
    assert error(exact * 1.1, exact, spans) == pytest.approx(0.1)
    assert error(exact + torch.tensor([0, 0, 1, 1])[:, None], exact, spans) == pytest.approx(0.5)
    assert error(exact * torch.nan, exact, spans) == torch.inf
    assert error(exact * torch.inf, exact, spans) == torch.inf
    assert error(0 * exact, 0 * exact, spans) == 0
    assert error(exact, 0 * exact, spans) == torch.inf
    # A sequence without a gradient is measured by a tenth of the others'.
    exact[:2] = 0
    wrong = exact.clone()
    wrong[:2] = 1e-3
    assert error(wrong, exact, spans) == pytest.approx(1e-3 / (0.1 * 2**0.5), rel=1e-3)


def test_importing_it_needs_nothing():
    code = (
        "import sys, padded_sp.verify, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([n for n in ('transformer_engine', 'triton', 'rich') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("heads", [(2, 2, 256, 256), (4, 4, 192, 128), (6, 2, 128, 128)])
def test_keys_of_their_own_are_judged_as_well_as_others(heads):
    """Rounding to bfloat16 must not look like a wrong kernel: no query equals a key."""
    num_heads, num_kv_heads, head_dim, v_head_dim = heads
    verdict = verify.verify_attention(
        "torch",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        other_keys=True,
        device="cpu",
    )
    assert verdict.passed
    assert max(verdict.figures.values()) < 0.01
