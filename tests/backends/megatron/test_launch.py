"""Process groups come and go with a layout."""

import os

from megatron_dsv41.run_config import Parallel
from megatron_dsv41.testing.distributed import run_ranks


def threads_after_layouts(count):
    """On a rank: threads of this process after `count` layouts have come and gone."""
    from megatron_dsv41.backends.megatron import launch

    launch.prepare_process()
    for number in range(count):
        launch.create_groups(Parallel(**({"tp": 2} if number % 2 else {"pp": 2})))
        launch.destroy_groups()
    return len(os.listdir("/proc/self/task"))


def test_a_layout_leaves_no_threads():
    assert run_ranks(threads_after_layouts, 2, 1) == run_ranks(threads_after_layouts, 2, 4)
