"""Ranks of one host with a shared table: rank 0 makes it, the others read and write it in place,
and collectives order them."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import reduce_tensor

DEVICE = "openreg:0"
RANKS = 2


def run(rank, store):
    where = {"init_method": f"file://{store}", "device_id": torch.device(DEVICE)}
    dist.init_process_group("openreg", rank=rank, world_size=RANKS, **where)
    table = torch.zeros(RANKS, 4, device=DEVICE) if rank == 0 else None
    handles = [reduce_tensor(table) if rank == 0 else None]
    dist.broadcast_object_list(handles, device=torch.device("cpu"))
    if rank:
        rebuild, arguments = handles[0]
        table = rebuild(*arguments)
    table[rank] = rank + 1.0  # each rank's own row
    torch.openreg.synchronize()
    dist.barrier()
    print(f"rank {rank}: {table.sum(1).tolist()}", flush=True)
    assert table.sum(1).tolist() == [4.0, 8.0]
    dist.barrier()  # rank 0 keeps the table until all have read it
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store",), nprocs=RANKS)
