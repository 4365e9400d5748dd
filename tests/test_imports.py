"""What ``import padded_sp`` brings along, and what it must leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import padded_sp


def run(code: str) -> str:
    """In a fresh interpreter: what other tests imported must not count."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_touches_neither_the_gpu_nor_optional_packages():
    optional = "transformer_engine triton megatron matplotlib flash_attn rich tyro"
    loaded = run(
        "import sys, padded_sp, padded_sp.testing, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        f"print([name for name in {optional.split()} if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_import_prints_nothing():
    assert run("import padded_sp") == ""


def test_without_triton():
    """Its kernels are imported with their first launch, its absence is told before."""
    told = run(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from padded_sp import DotProductAttention, backends\n"
        "DotProductAttention(2, 8)  # 'auto' leaves it out\n"
        "print(backends.import_error(backends.ATTENTION['triton']))\n"
        "DotProductAttention(2, 8, backend='torch')\n"
        "try:\n"
        "    DotProductAttention(2, 8, backend='triton')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    assert told.count("backend 'triton' needs Triton: python -m pip install triton") == 2, told
    assert "\nImportError " in told


def test_the_names_that_callers_rely_on():
    from padded_sp import (  # noqa: F401
        AlignPolicy,
        ColumnParallelLinear,
        DotProductAttention,
        LayerNorm,
        LayerNormColumnParallelLinear,
        PaddedSeqMeta,
        RMSNorm,
        RowParallelLinear,
        VocabParallelEmbedding,
        apply_rotary,
        carry_meta,
        check_agreement,
        gather_from_sequence_parallel_region,
        pad,
        reduce_scatter_to_sequence_parallel_region,
        roll,
        scatter_to_sequence_parallel_region,
        seq_meta,
        unpad,
        vocab_parallel_cross_entropy,
        zero_padding,
        zero_padding_,
    )


def test_every_public_name_exists_and_is_documented():
    assert sorted(padded_sp.__all__) == padded_sp.__all__
    for name in padded_sp.__all__:
        assert getattr(padded_sp, name).__doc__, name


def test_the_package_is_typed():
    assert Path(padded_sp.__file__).with_name("py.typed").exists()
