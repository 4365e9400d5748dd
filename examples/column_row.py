import torch
import torch.distributed as dist

from padded_sp import AlignPolicy, ColumnParallelLinear, PaddedSeqMeta, RowParallelLinear, pad


def step(rank, ranks, group):
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    policy = AlignPolicy("fp8_current", tp_size=ranks)
    meta = PaddedSeqMeta.from_seq_lens([100, 150, 120, 133], policy, device=device)
    up = ColumnParallelLinear(256, 1024, tp_group=group, device=device)
    down = RowParallelLinear(1024, 256, tp_group=group, device=device)

    # Whatever pad rows hold, it reaches nothing.
    x = pad(torch.ones(meta.num_tokens, 256, device=device), meta, fill=float("nan"))
    y_shard = down(up(meta.shard(x, rank), meta).relu(), meta)
    y_shard.square().mean().backward()
    finite = bool(y_shard.isfinite().all() & up.weight.grad.isfinite().all())
    if rank == 0:
        print(f"{meta.num_tokens} tokens, {len(y_shard)} of {meta.num_rows} rows here, {finite=}")


dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
step(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
dist.destroy_process_group()  # no layer holds the group any more, so its threads end here
