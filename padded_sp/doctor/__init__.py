"""What this machine has, what is known to go wrong on it, and whether its numbers are right.

Text and figures; ``python -m padded_sp doctor`` prints them.
"""

from padded_sp.doctor.checks import checks
from padded_sp.doctor.machine import attention, linears, machine, recipes
from padded_sp.doctor.traps import Trap, traps

__all__ = ["Trap", "attention", "checks", "linears", "machine", "recipes", "traps"]
