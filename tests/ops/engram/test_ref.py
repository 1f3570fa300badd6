"""Engram constants, hashing and gating."""

import pytest
import torch

from megatron_dsv41.modules.engram import EngramHash, column_primes, layer_multipliers
from megatron_dsv41.ops.documents import documents_from_ids, documents_from_lengths, join_documents
from megatron_dsv41.ops.engram.ref import gate, hash_rows
from megatron_dsv41.presets import PRESETS, flash
from megatron_dsv41.testing.tiny import identity_map, tiny_config

PRIMES = {
    1: "16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183 16000189 16000207 16000211 16000253 "
    "16000277 16000289 16000307 16000321 16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463",
    14: "16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627 16000667 16000669 16000693 16000697 "
    "16000711 16000729 16000759 16000769 16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889",
}
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
ROWS = {
    1: {0: 10250667, 7: 124972355, 8: 130904169, 15: 248375762, 16: 266647502, 23: 381142068},
    14: {0: 13402985, 7: 120176944, 8: 128818944, 15: 250160180, 16: 260141385, 23: 370522085},
}


@pytest.mark.parametrize("layer", [1, 14])
def test_released_constants(layer):
    config = flash()
    assert list(column_primes(config)[layer]) == [int(p) for p in PRIMES[layer].split()]
    assert sum(column_primes(config)[layer]) == config.engram_rows(layer)
    assert layer_multipliers(config, layer) == MULTIPLIERS[layer]


@pytest.mark.parametrize("preset", ["flash", "proxy", "tiny"])
def test_preset_tables_hold_exactly_their_primes(preset):
    config = PRESETS[preset]()
    assert tuple(sum(primes) for primes in column_primes(config).values()) == config.engram_num_embeddings


@pytest.mark.parametrize("layer", [1, 14])
def test_released_rows(layer):
    config = flash()
    rows = hash_rows(
        torch.tensor([40, 30, 20, 10]),
        2,
        documents_from_lengths([[4]], 4),
        MULTIPLIERS[layer],
        column_primes(config)[layer],
        config.engram_n_heads,
    )
    assert rows.shape == (4, 24) and {c: rows[3, c].item() for c in ROWS[layer]} == ROWS[layer]


def brute_rows(ids, starts, barrier, pad, multipliers, primes, heads):
    """The definition token by token, in Python integers."""
    result = []
    for t in range(len(ids)):
        classes = []
        for back in range(len(multipliers)):
            dead = any(barrier[u] for u in range(max(t - back, 0), t + 1))
            classes.append(pad if t - back < starts[t] or dead else ids[t - back])
        running, offset, columns = classes[0] * multipliers[0], 0, []
        for order in range(2, len(multipliers) + 1):
            running ^= classes[order - 1] * multipliers[order - 1]
            for prime in primes[(order - 2) * heads : (order - 1) * heads]:
                columns.append(running % prime + offset)
                offset += prime
        result.append(columns)
    return result


@pytest.mark.parametrize("lengths", [[1], [2], [3, 1, 4], [1, 1, 1, 5], [9]])
def test_look_back_stops_at_documents_and_stays_stopped_behind_barriers(lengths):
    torch.manual_seed(sum(lengths))
    config, total = flash(), sum(lengths)
    ids = torch.randint(0, 99092, (total,))
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    for _ in range(4):
        image = torch.rand(1, total) < 0.25
        alive = torch.rand(1, total) > 0.2
        documents = documents_from_ids(document_ids, alive, image)
        args = (MULTIPLIERS[1], column_primes(config)[1], 8)
        rows = hash_rows(ids, 7, documents, *args)
        barrier = (~documents.alive_T | documents.image_T).tolist()
        assert rows.tolist() == brute_rows(ids.tolist(), documents.start_T.tolist(), barrier, 7, *args)


def test_rows_stay_in_their_column_and_in_int64():
    config = flash()
    ids = torch.full((64,), 99091)
    rows = hash_rows(ids, 99091, documents_from_lengths([[64]], 64), MULTIPLIERS[14], column_primes(config)[14], 8)
    offset = 0
    for column, prime in enumerate(column_primes(config)[14]):
        assert ((rows[:, column] >= offset) & (rows[:, column] < offset + prime)).all()
        offset += prime


def test_ids_outside_the_vocabulary_are_barriers_or_refused():
    """-1 and -100 of padding are barriers; a living token of that id gets row -1, never an index from the end."""
    config = tiny_config()
    hashing = EngramHash(config, identity_map(config))
    documents = documents_from_lengths([[6]], 9)  # the last three are dead
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 96, -1, -100])
    padded = torch.cat([ids[:6], torch.full((3,), config.engram_pad_token_id)])
    found, expected = hashing(ids, documents), hashing(padded, documents)
    assert all(torch.equal(found[layer], expected[layer]) for layer in config.engram_layer_ids)
    assert set(hashing(ids, documents, [3])) == {3}
    for stray in (-1, -100, 96):
        ids[2] = stray
        assert (hashing(ids, documents)[3] == -1).all(1).tolist() == [row == 2 for row in range(9)]


def test_micro_batches_hash_together_as_apart():
    config = tiny_config()
    hashing = EngramHash(config, identity_map(config))
    layouts = [documents_from_lengths([[6, 3]], 9), documents_from_lengths([[2], [9]], 9)]
    ids = [torch.randint(95, (layout.num_tokens,)) for layout in layouts]
    joined = hashing(torch.cat(ids), join_documents(layouts))
    apart = [hashing(*pair) for pair in zip(ids, layouts, strict=True)]
    assert all(torch.equal(joined[layer], torch.cat([part[layer] for part in apart])) for layer in joined)


def test_maps_that_do_not_fit_are_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match="token map covers 10 ids, the model's vocab_size is 96"):
        EngramHash(config, torch.arange(10))
    with pytest.raises(ValueError, match="token map reaches class 96"):
        EngramHash(config, torch.arange(97))
    with pytest.raises(ValueError, match="engram_num_embeddings of layer 1 is 100"):
        EngramHash(tiny_config(engram_num_embeddings=(100, 1020)), identity_map(config))


def test_digest_sees_every_constant():
    config = tiny_config()
    digests = {
        EngramHash(config, identity_map(config)).digest,
        EngramHash(config, identity_map(config).flip(0)).digest,
        EngramHash(tiny_config(engram_pad_token_id=3), identity_map(config)).digest,
        EngramHash(tiny_config(engram_compressed_vocab_size=97), identity_map(config)).digest,
    }
    assert len(digests) == 4


def test_layer_ids_seed_the_hash():
    # A truncated model keeps its ids: layer 3 of eight and layer 3 of four read the same rows.
    config = tiny_config()
    assert layer_multipliers(config, 3) == layer_multipliers(tiny_config(candidate_topk_blocks=2), 3)
    assert layer_multipliers(config, 1) != layer_multipliers(config, 3)


def gate_inputs(tokens=5, n=3, d=8, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(tokens, n, d), (tokens, n, d), (tokens, d), (n, d), (n, d)]
    return [torch.randn(*s, dtype=dtype, requires_grad=dtype is torch.float64) for s in shapes]


def test_gate_by_hand():
    x, key, value, q, k = (t.detach() for t in gate_inputs())
    open_gate = torch.tensor([True, True, False, True, True])
    out = gate(x, key, value, q, k, open_gate, 1e-20)
    for t in range(5):
        for i in range(3):
            rms = lambda v: v / (v.square().mean() + 1e-20).sqrt()  # noqa: E731
            dot = (rms(x[t, i]) * q[i] * k[i] * rms(key[t, i])).sum() * 8**-0.5
            g = torch.sigmoid(dot.sign() * max(dot.abs(), torch.tensor(1e-6)).sqrt()) * open_gate[t]
            torch.testing.assert_close(out[t, i], x[t, i] + g * value[t])


def test_gate_floor_keeps_the_sign():
    x, key = torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]]]), torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0 - 1e-7]]])
    out = gate(x, key, torch.ones(2, 2), torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, dtype=torch.bool), 1e-20)
    assert torch.allclose(out[0] - 1, torch.sigmoid(torch.tensor(1e-3)), atol=1e-6)  # +0 -> +1e-3
    assert torch.allclose(out[1] - 1, torch.sigmoid(torch.tensor(-1e-3)), atol=1e-6)  # tiny negative -> -1e-3


def test_gate_rms_is_per_stream():
    x, key, value, q, k = (t.detach() for t in gate_inputs())
    scaled = x * torch.tensor([1.0, 100.0, 1.0], dtype=torch.float64)[None, :, None]
    open_gate = torch.ones(5, dtype=torch.bool)
    a = gate(x, key, value, q, k, open_gate, 1e-20) - x
    b = gate(scaled, key, value, q, k, open_gate, 1e-20) - scaled
    torch.testing.assert_close(a, b)


def test_gate_gradcheck():
    open_gate = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda *a: gate(*a, open_gate, 1e-20), gate_inputs())
