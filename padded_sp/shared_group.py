"""``SharesGroup``: a module with a process group, of which there is only one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

from torch import nn

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


class SharesGroup(nn.Module):
    """``copy.deepcopy`` shares ``tp_group``; pickle leaves it behind, since no other process could
    use it."""

    tp_group: ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo |= {id(self): twin, id(self.tp_group): self.tp_group}
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tp_group": None}
