"""The harness itself: results in rank order, failures and hangs reported with their rank."""

import time

import pytest
import torch

from megatron_dsv41.testing.distributed import run_ranks


def sum_of_ranks(scale: int) -> float:
    total = torch.tensor([float(torch.distributed.get_rank() * scale)])
    torch.distributed.all_reduce(total)
    return total.item()


def own_rank() -> int:
    return torch.distributed.get_rank()


def second_rank_fails() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("this rank is broken")
    torch.distributed.barrier()


def sleeps() -> None:
    time.sleep(60)


def test_ranks_share_a_group_and_return_in_order():
    assert run_ranks(sum_of_ranks, 2, 3) == [3.0, 3.0]
    assert run_ranks(own_rank, 3) == [0, 1, 2]


def test_first_failure_ends_the_run():
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="(?s)rank 1 failed.*this rank is broken"):
        run_ranks(second_rank_fails, 2)
    assert time.monotonic() - begin < 30


def test_a_hang_ends_at_the_timeout():
    with pytest.raises(AssertionError, match=r"ranks \[0\] did not finish in 2 s"):
        run_ranks(sleeps, 1, timeout=2)
