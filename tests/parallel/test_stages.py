"""Cuts of the layers into stages."""

import pytest

from megatron_dsv41.parallel.stages import even_stages, layout_string, parse_layout


def test_even_cuts():
    assert [len(s) for s in even_stages(12, 5)] == [2, 2, 2, 3, 3]
    assert even_stages(8, 2) == [range(0, 4), range(4, 8)]
    assert [len(s) for s in even_stages(38, 4, embedding=True, head=True)] == [9, 10, 10, 9]
    with pytest.raises(ValueError, match="3 layers cannot fill 4 pipeline stages"):
        even_stages(3, 4)


def test_layouts():
    assert parse_layout("Et*3|(tt|)*2tL", 8, 4) == [range(0, 3), range(3, 5), range(5, 7), range(7, 8)]
    assert parse_layout("E|t|tL", 2, 3) == [range(0, 0), range(0, 1), range(1, 2)]
    for stages in (even_stages(8, 3), even_stages(8, 1)):
        assert parse_layout(layout_string(stages), 8, len(stages)) == stages


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|tt", "cannot be read"),
        ("Ettx|ttL", "cannot be read"),
        ("Ett|ttL", "has 4 layers, the model has 5"),
        ("Ett|tt|tL", "has 3 stages, parallel.pp x parallel.vpp is 2"),
    ],
)
def test_wrong_layouts(layout, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(layout, 5, 2)
