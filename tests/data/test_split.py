import numpy as np
import pytest

from megatron_dsv41.data.split import split_count, split_share

DOCUMENTS = [np.array([i]) for i in range(1000)]


def parts(split) -> dict[str, list[int]]:
    found = {"train": [], "validation": []}
    for part, ids in split:
        found[part].append(int(ids[0]))
    return found


def test_share():
    found = parts(split_share(DOCUMENTS, 0.1, seed=1))
    assert 70 < len(found["validation"]) < 130
    assert sorted(found["train"] + found["validation"]) == list(range(1000))
    assert found["train"] == sorted(found["train"]) and found["validation"] == sorted(found["validation"])
    assert found == parts(split_share(DOCUMENTS, 0.1, seed=1)) != parts(split_share(DOCUMENTS, 0.1, seed=2))
    # A document's part does not depend on what follows it: more data keeps the old split.
    assert parts(split_share(DOCUMENTS[:500], 0.1, seed=1))["validation"] == [i for i in found["validation"] if i < 500]


def test_no_share_is_all_train():
    assert parts(split_share(DOCUMENTS, 0.0, seed=1)) == {"train": list(range(1000)), "validation": []}


@pytest.mark.parametrize("count", [1, 30, 999])
def test_count(count):
    found = parts(split_count(DOCUMENTS, count, seed=1))
    assert len(found["validation"]) == count and found["validation"] == sorted(found["validation"])
    assert sorted(found["train"] + found["validation"]) == list(range(1000))
    assert found == parts(split_count(DOCUMENTS, count, seed=1))


def test_count_is_drawn_evenly():
    validation = np.array(parts(split_count(DOCUMENTS, 200, seed=1))["validation"])
    assert 60 < (validation < 500).sum() < 140


def test_count_of_everything_leaves_no_training_document():
    assert parts(split_count(DOCUMENTS, 2000, seed=1))["train"] == []
