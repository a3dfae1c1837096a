"""deepspeed.comm in place of torch.distributed."""

import deepspeed
import deepspeed.comm as dist
import torch

deepspeed.init_distributed(dist_backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert dist.is_initialized() and dist.is_available()
mine = torch.full((4,), float(rank + 1))

total = mine.clone()
dist.all_reduce(total)
largest = mine.clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
from_last = mine.clone()
dist.broadcast(from_last, src=world - 1)
every = [torch.empty(4) for _ in range(world)]
dist.all_gather(every, mine)
flat = torch.empty(4 * world)
dist.all_gather_into_tensor(flat, mine)
part = torch.empty(4 // world)
dist.reduce_scatter_tensor(part, mine.clone())
swapped = torch.empty(4)
dist.all_to_all_single(swapped, mine)
work = dist.all_reduce(mine, async_op=True)
work.wait()
group = dist.new_group(list(range(world)))
again = torch.ones(1)
dist.all_reduce(again, group=group)
dist.barrier()
dist.log_summary()
report = {
    "values": [t.sum().item() for t in (total, largest, from_last, flat, part, swapped, mine, again, *every)],
    "local": dist.get_local_rank() == rank,
    "global": [dist.get_global_rank(group, r) for r in range(world)],
}
