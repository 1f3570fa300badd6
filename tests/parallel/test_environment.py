"""The GPU of a rank, and what is said where there is none."""

import pytest

from megatron_dsv41.parallel.environment import SHARE_GPUS, missing_gpus, rank_gpu


@pytest.fixture(params=[None, "0", "1"])
def shared(request, monkeypatch):
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    if request.param is not None:
        monkeypatch.setenv(SHARE_GPUS, request.param)
    return request.param == "1"


def test_ranks_have_gpus_of_their_own_where_there_are_enough(shared):
    assert [rank_gpu(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [missing_gpus(ranks, 4) for ranks in (1, 3, 4)] == ["", "", ""]


def test_more_ranks_than_gpus_share_them_where_nccl_lets_them(shared):
    if shared:
        assert [rank_gpu(rank, 2) for rank in range(5)] == [0, 1, 0, 1, 0]
        assert missing_gpus(5, 2) == ""
    else:
        with pytest.raises(ValueError, match=rf"local rank 2 needs 3 GPUs, this machine has 2;.*{SHARE_GPUS}=1.*2\.30"):
            rank_gpu(2, 2)
        assert missing_gpus(5, 2).startswith("needs 5 GPUs, this machine has 2; ")


def test_no_gpu_cannot_be_shared(shared):
    assert missing_gpus(1, 0) == "needs 1 GPU, this machine has 0"
    with pytest.raises(ValueError, match="local rank 0 needs 1 GPU, this machine has 0$"):
        rank_gpu(0, 0)
