"""Differentiable pairs between the layouts of sequence and tensor parallelism.

Layouts, over the R ranks of one tensor-parallel group, are named as DTensor names them: Replicate
(all ranks hold the same tensor), Shard(d) (each holds its R-th of dim d), Partial (each holds a
term of a sum). The backward of each mapping is the forward of its partner, so that gradients of
gradients work too:

    gather_from_sequence_parallel_region    <->  reduce_scatter_to_sequence_parallel_region
    scatter_to_sequence_parallel_region     <->  gather..., tensor_parallel_output_grad=False
    copy_to_tensor_model_parallel_region    <->  reduce_from_tensor_model_parallel_region
    scatter_to_tensor_model_parallel_region <->  gather_from_tensor_model_parallel_region
    all_to_all_sp2hp                        <->  all_to_all_hp2sp

Mappings move values unchanged, pads included; keeping pads inert is the layers' part. The names are
Megatron-LM's. A group of None or of one rank communicates nothing and returns its input.
"""

from __future__ import annotations

import torch

from padded_sp import mapping_ops as ops
from padded_sp.boundaries import check_shards
from padded_sp.collectives import ProcessGroup, group_name, group_rank, group_size
from padded_sp.context import resolve_meta
from padded_sp.mapping_ops import Ranks
from padded_sp.meta import PaddedSeqMeta


def gather_from_sequence_parallel_region(
    x_shard: torch.Tensor,
    meta: PaddedSeqMeta | None,
    tp_group: ProcessGroup | None,
    tensor_parallel_output_grad: bool = True,
) -> torch.Tensor:
    """Shard(0) -> Replicate: every rank's rows, in rank order.

    Over R ranks, T = meta.num_rows:
        x_shard  [T / R, ...]   this rank's rows, any dtype
        x_full   [T, ...]
        forward    x_full       = all_gather(x_shard)
        backward   grad_x_shard = reduce_scatter(grad_x_full)
    Communicates T * prod(rest) * itemsize bytes each way.

    Args:
        meta: of the batch; None takes that of the surrounding ``seq_meta``.
        tensor_parallel_output_grad: what follows is tensor parallel, so that grad_x_full is Partial
            and is summed. False: each rank computes the same on x_full, grad_x_full is Replicate,
            and backward takes this rank's rows of it without communication.

    Raises:
        ValueError: x_shard has not meta.num_rows / R rows, or these do not divide; nothing has been
            communicated. No meta given and none surrounding.
        RuntimeError: another rank did not join (`collectives.all_gather_rows`).
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    ranks = _ranks(tp_group)
    resolve_meta(meta).check_rows(x_shard, "x_shard", ranks.size)
    return ops.gather(x_shard, tensor_parallel_output_grad, *ranks) if ranks.size > 1 else x_shard


def reduce_scatter_to_sequence_parallel_region(
    x_partial: torch.Tensor, meta: PaddedSeqMeta | None, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Partial -> Shard(0): this rank's rows of the sum over ranks.

    Over R ranks, T = meta.num_rows:
        x_partial  [T, ...]       this rank's term; float64, float32, float16 or bfloat16
        x_shard    [T / R, ...]
        forward    x_shard        = reduce_scatter(x_partial)
        backward   grad_x_partial = all_gather(grad_x_shard)
    Communicates T * prod(rest) * itemsize bytes each way.

    Raises:
        ValueError: x_partial has not meta.num_rows rows, these do not divide by R, or its dtype
            cannot be summed; nothing has been communicated. No meta given and none surrounding.
        RuntimeError: another rank did not join (`collectives.reduce_scatter_rows`).
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    ranks = _ranks(tp_group)
    _check_full(x_partial, "x_partial", meta, ranks.size)
    return ops.reduce_scatter(x_partial, *ranks) if ranks.size > 1 else x_partial


def scatter_to_sequence_parallel_region(
    x_full: torch.Tensor, meta: PaddedSeqMeta | None, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Replicate -> Shard(0): this rank's rows, copied.

    Over R ranks, T = meta.num_rows:
        x_full   [T, ...]       the same on every rank, any dtype
        x_shard  [T / R, ...]
        forward    x_shard     = x_full[rank * T / R : (rank + 1) * T / R]
        backward   grad_x_full = all_gather(grad_x_shard)
    Communicates nothing forward, T * prod(rest) * itemsize bytes backward.

    Raises:
        ValueError: x_full has not meta.num_rows rows, or these do not divide by R; nothing has been
            communicated. No meta given and none surrounding.
        RuntimeError: another rank did not join (`collectives.all_gather_rows`).
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    ranks = _ranks(tp_group)
    _check_full(x_full, "x_full", meta, ranks.size)
    return ops.scatter(x_full, *ranks) if ranks.size > 1 else x_full


def copy_to_tensor_model_parallel_region(
    x: torch.Tensor, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Replicate -> Replicate, whose gradient is Partial: the f of Megatron-LM.

        x  [...]   the same on every rank; float64, float32, float16 or bfloat16
        forward    y      = x
        backward   grad_x = all_reduce(grad_y)
    Communicates nothing forward, x.nbytes bytes backward. y shares the memory of x; autograd
    refuses to write it in place.

    Raises:
        RuntimeError: another rank did not join (`collectives.all_reduce`).
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    ranks = _ranks(tp_group)
    return ops.copy(x, *ranks) if ranks.size > 1 else x


def reduce_from_tensor_model_parallel_region(
    x_partial: torch.Tensor, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Partial -> Replicate: the sum over ranks, the g of Megatron-LM.

        x_partial  [...]   this rank's term; float64, float32, float16 or bfloat16
        forward    y              = all_reduce(x_partial)
        backward   grad_x_partial = grad_y
    Communicates x_partial.nbytes bytes forward, nothing backward.

    Raises:
        ValueError: the dtype cannot be summed; nothing has been communicated.
        RuntimeError: another rank did not join (`collectives.all_reduce`).
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    ranks = _ranks(tp_group)
    return ops.reduce(x_partial, *ranks) if ranks.size > 1 else x_partial


def scatter_to_tensor_model_parallel_region(
    x_full: torch.Tensor, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Replicate -> Shard(-1): this rank's columns, copied.

    Over R ranks:
        x_full   [..., H]       the same on every rank, any dtype
        x_shard  [..., H / R]
        forward    x_shard     = x_full[..., rank * H / R : (rank + 1) * H / R]
        backward   grad_x_full = all_gather(grad_x_shard) along the last dim
    Communicates nothing forward, x_full.nbytes bytes backward.

    Raises:
        ValueError: H does not divide by R; nothing has been communicated.
        RuntimeError: another rank did not join (`collectives.all_gather_rows`).
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    ranks = _ranks(tp_group)
    _check_columns(x_full, "x_full", ranks.size)
    return ops.scatter_columns(x_full, *ranks) if ranks.size > 1 else x_full


def gather_from_tensor_model_parallel_region(
    x_shard: torch.Tensor, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Shard(-1) -> Replicate: every rank's columns, in rank order.

    Over R ranks:
        x_shard  [..., H / R]   this rank's columns, any dtype
        x_full   [..., H]
        forward    x_full       = all_gather(x_shard) along the last dim
        backward   grad_x_shard = grad_x_full[..., rank * H / R : (rank + 1) * H / R]
    Communicates x_full.nbytes bytes forward, nothing backward: grad_x_full is Replicate.

    Raises:
        ValueError: x_shard has no dim to gather along; nothing has been communicated.
        RuntimeError: another rank did not join (`collectives.all_gather_rows`).
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    ranks = _ranks(tp_group)
    _check_columns(x_shard, "x_shard", 1)
    return ops.gather_columns(x_shard, *ranks) if ranks.size > 1 else x_shard


def all_to_all_sp2hp(
    x_shard: torch.Tensor, meta: PaddedSeqMeta | None, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Shard(0) -> Shard(-1): all rows of this rank's columns, for rows of all columns.

    Over R ranks, T = meta.num_rows:
        x_shard    [T / R, ..., H]   this rank's rows, any dtype
        x_columns  [T, ..., H / R]
        forward    x_columns    = all_to_all(x_shard)
        backward   grad_x_shard = all_to_all(grad_x_columns), the inverse
    Communicates x_shard.nbytes bytes each way.

    Raises:
        ValueError: x_shard has not meta.num_rows / R rows, or H does not divide by R; nothing has
            been communicated. No meta given and none surrounding.
        RuntimeError: another rank did not join (`collectives.all_to_all_rows`).
    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
    """
    ranks = _ranks(tp_group)
    resolve_meta(meta).check_rows(x_shard, "x_shard", ranks.size)
    _check_matrix(x_shard, "x_shard")
    _check_columns(x_shard, "x_shard", ranks.size)
    return ops.rows_to_columns(x_shard, *ranks) if ranks.size > 1 else x_shard


def all_to_all_hp2sp(
    x_columns: torch.Tensor, meta: PaddedSeqMeta | None, tp_group: ProcessGroup | None
) -> torch.Tensor:
    """Shard(-1) -> Shard(0): this rank's rows of all columns, for columns of all rows.

    Over R ranks, T = meta.num_rows:
        x_columns  [T, ..., H / R]   this rank's columns, any dtype
        x_shard    [T / R, ..., H]
        forward    x_shard        = all_to_all(x_columns)
        backward   grad_x_columns = all_to_all(grad_x_shard), the inverse
    Communicates x_columns.nbytes bytes each way.

    Raises:
        ValueError: x_columns has not meta.num_rows rows, or these do not divide by R; nothing has
            been communicated. No meta given and none surrounding.
        RuntimeError: another rank did not join (`collectives.all_to_all_rows`).
    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
    """
    ranks = _ranks(tp_group)
    _check_full(x_columns, "x_columns", meta, ranks.size)
    _check_matrix(x_columns, "x_columns")
    return ops.columns_to_rows(x_columns, *ranks) if ranks.size > 1 else x_columns


def _ranks(group: ProcessGroup | None) -> Ranks:
    return Ranks(group_name(group), group_size(group), group_rank(group))


def _check_full(x: torch.Tensor, name: str, meta: PaddedSeqMeta | None, size: int) -> None:
    meta = resolve_meta(meta)
    check_shards(meta.num_rows, size)
    meta.check_rows(x, name)


def _check_columns(x: torch.Tensor, name: str, size: int) -> None:
    columns = x.shape[-1] if x.dim() else 0
    if not x.dim() or columns % size:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} is split along its last dim over {size} ranks, so "
            f"that must divide by {size}; choose a number of features or heads that does"
        )


def _check_matrix(x: torch.Tensor, name: str) -> None:
    if x.dim() < 2:
        raise ValueError(f"{name} needs rows and columns, [rows, ..., H]; got {tuple(x.shape)}")
