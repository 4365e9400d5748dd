"""One pack of the demo's text, laid out as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from padded_sp.alignment import AlignPolicy
from padded_sp.demo.text import PAD
from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import pad, roll

Pack = list[list[int]]


@dataclass(frozen=True)
class Batch:
    """One pack, laid out.

    Attributes:
        ids: int64 [T], pads hold the padding token.
        labels: int64 [T], the next real token of the same sequence; -100 where there is none.
    """

    ids: Tensor
    labels: Tensor
    meta: PaddedSeqMeta

    @classmethod
    def of(cls, pack: Pack, policy: AlignPolicy, device: torch.device) -> Batch:
        """The pack in the layout that ``policy`` plans."""
        meta = PaddedSeqMeta.from_seq_lens([len(s) for s in pack], policy, device=device)
        tokens = torch.tensor([token for sequence in pack for token in sequence], device=device)
        ids = pad(tokens, meta, fill=PAD)
        return cls(ids, roll(ids, meta), meta)
