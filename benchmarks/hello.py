"""What the ranks of bench_launch do. ``torchrun`` runs this file as it is, so it imports nothing but PyTorch."""

import torch
import torch.distributed as dist


def total() -> int:
    """How many ranks there are, by asking all of them."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    total()
    dist.destroy_process_group()
