import torch
import torch.distributed as dist

from padded_sp import AlignPolicy, ColumnParallelLinear, PaddedSeqMeta, RowParallelLinear, seq_meta

dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
gpus = torch.cuda.device_count()
device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")

policy = AlignPolicy("fp8_current", tp_size=ranks)
meta = PaddedSeqMeta.from_seq_lens([100, 150, 120, 133], policy, device=device)
up = ColumnParallelLinear(256, 1024, tp_group=group, device=device)
down = RowParallelLinear(1024, 256, tp_group=group, device=device)

x = torch.ones(meta.num_rows, 256, device=device)
x[meta.pad_rows] = float("nan")  # whatever pad rows hold, it reaches nothing
with seq_meta(meta, check=group):
    y_shard = down(up(meta.shard(x, rank)).relu())
y_shard.square().mean().backward()

finite = bool(y_shard.isfinite().all() & up.weight.grad.isfinite().all())
if rank == 0:
    print(f"{meta.num_tokens} tokens, {len(y_shard)} of {meta.num_rows} rows here, {finite=}")
dist.destroy_process_group()
