"""Classes that Megatron-Core names when it is imported; the double has no fused operations."""

from torch import nn


class FusibleOperation(nn.Module):
    """Base of all operations."""


class Sequential(nn.Module):
    """Operations one after another."""
