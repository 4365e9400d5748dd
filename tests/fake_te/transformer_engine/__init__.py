"""A double of what padded_sp and Megatron-Core call of Transformer Engine, for CPU ranks on gloo.

It proves nothing about Transformer Engine: GPU hosts run the same tests on the real one, and only
that counts. It lets them run at all where there is no GPU, so that mistakes of ours show early. To
be worth running it computes what the real one computes, in float32 on operands rounded to FP8:
per-tensor scales see pad rows, blocks of 128 rows share one, delayed scales come from an amax
history that one all-reduce keeps equal, NaN poisons. Names, attributes, checks and collectives are
those of the version that the environment variable FAKE_TE_VERSION names, 2.20.2 by default.
"""

import os

__version__ = os.environ.get("FAKE_TE_VERSION", "2.20.2")
VERSION = tuple(int(part) for part in __version__.split(".")[:3])

# What changed between 2.12.0 and 2.20.2, at the version that padded_sp puts it.
MODERN = VERSION >= (2, 14, 0)

# As in the real one: whoever imports this finds all of it. Last, for it reads what is above.
from transformer_engine import common, pytorch  # noqa: E402

__all__ = ["common", "pytorch"]
