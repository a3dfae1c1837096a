"""What ``thalweg doctor`` starts on two ranks: one sum over gloo, which exits 3 when it comes out wrong."""

import datetime
import sys


def main() -> int:
    """Join the process group, sum one number over the ranks; returns the exit code."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    correct = total.item() == sum(range(1, dist.get_world_size() + 1))
    dist.destroy_process_group()
    return 0 if correct else 3


if __name__ == "__main__":
    sys.exit(main())
