"""CSA2 reference ops against definitions written as loops."""

import math

import pytest
import torch

from megatron_dsv41.ops.csa2.ref import (
    dense_teacher,
    in_candidates,
    index_divergence,
    index_scores,
    pool,
    select,
    sparse_attend,
    visible_entries,
)
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.ops.rope.ref import cos_sin, plain_frequencies, rotate

F64 = torch.float64


def attend_inputs(lengths, ratio=1, heads=3, dim=8, topk=4, window=3, dtype=F64, seed=0):
    torch.manual_seed(seed)
    total = sum(lengths)
    documents = documents_from_lengths([lengths], total)
    entries = documents.entries(ratio)
    topk_TK = torch.full((total, topk), -1, dtype=torch.int32)
    for t in range(total):
        visible = torch.randperm(int(entries.num_visible_T[t]))[:topk].sort().values + entries.first_T[t]
        topk_TK[t, : len(visible)] = visible
    q = torch.randn(total, heads, dim, dtype=dtype, requires_grad=True)
    kv = torch.randn(total, dim, dtype=dtype, requires_grad=True)
    compressed = torch.randn(max(total // ratio, 0), dim, dtype=dtype, requires_grad=True)
    sink = torch.randn(heads, dtype=dtype, requires_grad=True)
    return q, kv, compressed, topk_TK, sink, documents.window_start(window), documents


def attend_by_loops(q, kv, compressed, topk, sink, window_start, scale):
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        rows = [kv[j] for j in range(int(window_start[t]), t + 1)] + [compressed[j] for j in topk[t].tolist() if j >= 0]
        for h in range(q.shape[1]):
            weights = [math.exp(float(q[t, h] @ row) * scale) for row in rows]
            total = sum(weights) + math.exp(float(sink[h]))
            out[t, h] = sum(w * row for w, row in zip(weights, rows, strict=True)) / total
    return out


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [2], [7], [3, 1, 6], [1, 1, 9]])
def test_joint_attention_equals_loops(lengths, ratio):
    q, kv, compressed, topk, sink, start, _ = attend_inputs(lengths, ratio)
    with torch.no_grad():
        out = sparse_attend(q, kv, compressed, topk, sink, start, 0, 0.3, window=3)
        torch.testing.assert_close(out, attend_by_loops(q, kv, compressed, topk, sink, start, 0.3))


def test_window_alone():
    q, kv, _, _, sink, start, _ = attend_inputs([9])
    with torch.no_grad():
        out = sparse_attend(q, kv, None, None, sink, start, 0, 0.3, window=3)
        none = torch.full((9, 1), -1)
        torch.testing.assert_close(out, attend_by_loops(q, kv, kv, none, sink, start, 0.3))


def test_halo_shifts_the_window():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([9])
    whole = sparse_attend(q, kv, compressed, topk, sink, start, 0, 0.3, window=3)
    part = sparse_attend(q[4:], kv[2:], compressed, topk[4:], sink, start[4:] - 2, 2, 0.3, window=3)
    torch.testing.assert_close(part, whole[4:])


def test_turned_first():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([9])
    turn = cos_sin(torch.arange(9), plain_frequencies(4, 100.0))
    call = lambda q, **turn: sparse_attend(q, kv, compressed, topk, sink, start, 0, 0.3, window=3, **turn)  # noqa: E731
    assert torch.equal(call(q, turn=turn), call(rotate(q, *turn)))


def test_overlap_of_window_and_selection_counts_twice():
    q, kv, _, _, sink, _, _ = attend_inputs([1])
    topk = torch.zeros(1, 1, dtype=torch.int32)
    out = sparse_attend(q, kv, kv, topk, sink, torch.zeros(1, dtype=torch.int64), 0, 1.0, window=1)
    w = 2 * (q[0] @ kv[0]).exp()
    torch.testing.assert_close(out[0], (w / (w + sink.exp()))[:, None] * kv[0])


def test_sink_is_not_scaled_and_has_no_value():
    q, kv, *_ = attend_inputs([1], heads=1)
    start = torch.zeros(1, dtype=torch.int64)
    sink = torch.tensor([1.25], dtype=F64)
    for scale in (1.0, 0.25):
        out = sparse_attend(q, kv, None, None, sink, start, 0, scale, window=1)
        p = (float(q[0, 0] @ kv[0]) * scale - 1.25).__neg__()
        torch.testing.assert_close(out[0, 0], kv[0] / (1 + math.exp(p)))


def test_a_row_without_slots_is_zero_with_finite_gradients():
    q, kv, compressed, topk, sink, _, _ = attend_inputs([4])
    nothing = torch.full_like(topk, -1)
    start = torch.tensor([0, 2, 2, 3])  # query 1 sees rows 2..1: none
    out = sparse_attend(q, kv, compressed, nothing, sink, start, 0, 0.3, window=3)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, kv, sink))


def test_hostile_logits_stay_finite():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([6], dtype=torch.float32)
    with torch.no_grad():
        q.mul_(1e4)
        kv.mul_(1e2)
        sink.copy_(torch.tensor([1e4, -1e4, 0.0]))
    out = sparse_attend(q, kv, compressed, topk, sink, start, 0, 1.0, window=3)
    out.sum().backward()
    assert out.isfinite().all() and all(t.grad.isfinite().all() for t in (q, kv, compressed, sink))


def test_attention_gradcheck():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([3, 4], ratio=2, dim=4, heads=2)
    call = lambda *a: sparse_attend(a[0], a[1], a[2], topk, a[3], start, 0, 0.5, window=3)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, kv, compressed, sink))


def test_bf16_rounds_probabilities_and_keeps_the_denominator():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([5], dtype=torch.float32)
    low = [t.detach().bfloat16() for t in (q, kv, compressed)]
    out = sparse_attend(low[0], low[1], low[2].float(), topk, sink.detach(), start, 0, 0.3, window=3)
    exact = sparse_attend(*(t.double() for t in low), topk, sink.detach().double(), start, 0, 0.3, window=3)
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() < 0.02


def test_shared_kv_gradient_comes_in_its_own_dtype():
    q, kv, compressed, topk, sink, start, _ = attend_inputs([5], dtype=torch.float32)
    wide = compressed.detach().bfloat16().float().requires_grad_()
    sparse_attend(q.bfloat16(), kv.bfloat16(), wide, topk, sink, start, 0, 0.3, window=3).sum().backward()
    assert wide.grad is not None and wide.grad.dtype == torch.float32
    assert not torch.equal(wide.grad, wide.grad.bfloat16().float())  # never rounded on the way


@pytest.mark.parametrize("ratio", [1, 2])
def test_pool_is_a_softmax_per_channel(ratio):
    documents = documents_from_lengths([[5, 3, 1]], 9)
    entries = documents.entries(ratio)
    p, g = torch.randn(9, 4, dtype=F64), torch.randn(9, 4, dtype=F64)
    out = pool(p, g, entries)
    for c in range(int(entries.valid_C.sum())):
        first = int(entries.token_C[c])
        for channel in range(4):
            w = torch.softmax(g[first : first + ratio, channel], 0)
            torch.testing.assert_close(out[c, channel], (w * p[first : first + ratio, channel]).sum())


def test_pool_gradcheck():
    entries = documents_from_lengths([[3, 4]], 7).entries(2)
    p, g = (torch.randn(7, 3, dtype=F64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: pool(a, b, entries)[entries.valid_C], (p, g))


def select_inputs(lengths, ratio, ties=False, seed=0, heads=2, dim=4):
    torch.manual_seed(seed)
    total = sum(lengths)
    entries = documents_from_lengths([lengths], total).entries(ratio)
    q, w, k = torch.randn(total, heads, dim), torch.randn(total, heads), torch.randn(total // ratio, dim)
    if ties:  # small integers: many equal scores and a plateau at exactly zero
        q, w, k = q.round(), w.round(), k.round()
    return q, w, k, entries


def brute_select(scores, entries, topk, allowed=lambda t, c: True):
    rows = []
    for t in range(scores.shape[0]):
        first, count = int(entries.first_T[t]), int(entries.num_visible_T[t])
        seen = [c for c in range(first, first + count) if allowed(t, c)]
        best = sorted(sorted(seen, key=lambda c: (-float(scores[t, c]), c))[:topk])
        rows.append(best + [-1] * (min(topk, scores.shape[1]) - len(best)))
    return rows


def brute_blocks(scores, entries, size, number):
    rows, blocks = [], -(-scores.shape[1] // size)
    for t in range(scores.shape[0]):
        first, count = int(entries.first_T[t]), int(entries.num_visible_T[t])
        best = {}
        for local in range(count):
            best[local // size] = max(best.get(local // size, -math.inf), float(scores[t, first + local]))
        if count:
            best[(count - 1) // size] = math.inf
        keep = sorted(sorted(best, key=lambda b: (-best[b], b))[:number])
        rows.append(keep + [-1] * (min(number, blocks) - len(keep)))
    return rows


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [5], [8], [13], [40], [3, 1, 9], [7, 7, 7], [300]])
def test_selection_equals_brute_force(lengths, ratio, ties):
    q, w, k, entries = select_inputs(lengths, ratio, ties)
    topk, pool_ids = select(q, w, k, entries, 4, None, 3, 2)
    scores = index_scores(q, w, k)
    assert topk.tolist() == brute_select(scores, entries, 4)
    assert pool_ids is not None and pool_ids.tolist() == brute_blocks(scores, entries, 3, 2)
    restricted, none = select(q, w, k, entries, 4, pool_ids, 3)
    local = lambda t, c: (c - int(entries.first_T[t])) // 3 in pool_ids[t].tolist()  # noqa: E731
    assert none is None and restricted.tolist() == brute_select(scores, entries, 4, local)


def test_pool_that_holds_everything_changes_nothing():
    q, w, k, entries = select_inputs([17, 6], 1)
    topk, pool_ids = select(q, w, k, entries, 5, None, 4, 100)
    assert torch.equal(select(q, w, k, entries, 5, pool_ids, 4)[0], topk)


def test_future_positions_of_a_kept_block_stay_invisible():
    entries = documents_from_lengths([[8]], 8).entries(1)
    blocks = torch.zeros(8, 1, dtype=torch.int32)
    allowed = in_candidates(entries, blocks, 4) & visible_entries(entries)
    assert allowed[1].tolist() == [True, True] + [False] * 6


def test_scores_round_as_bf16_tensors():
    torch.manual_seed(0)
    q, w, k = torch.randn(3, 4, 8).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(5, 8).bfloat16()
    dots = (q.float() @ k.float().T).bfloat16()
    products = (w[:, :, None].float() * dots.float().relu()).bfloat16()
    assert torch.equal(index_scores(q, w, k), products.float().sum(1).bfloat16())


def test_sparse_teacher_is_the_attention_itself():
    q, kv, compressed, topk, sink, start, documents = attend_inputs([6], topk=6)
    _, teacher = sparse_attend(q, kv, compressed, topk, sink, start, 0, 0.3, window=3, teacher=True)
    dense = dense_teacher(
        q, kv, compressed, visible_entries(documents.entries(1)), sink, start, 0, 0.3, window=3
    )  # every visible entry is selected here, so both teachers agree
    for t in range(6):
        torch.testing.assert_close(teacher[t, : t + 1], dense[t, : t + 1])
    assert not teacher.requires_grad and (dense[0, 1:] == 0).all()


def test_divergence_by_hand_and_empty_rows():
    torch.manual_seed(0)
    q, w, k = torch.randn(2, 2, 4, dtype=F64), torch.randn(2, 2, dtype=F64), torch.randn(3, 4, dtype=F64)
    slots = torch.tensor([[0, 2, -1], [-1, -1, -1]])
    teacher = torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0]], dtype=F64)
    kl = index_divergence(q, w, k, slots, teacher)
    log_p = index_scores(q, w, k)[0, [0, 2]].log_softmax(0)
    target = torch.tensor([0.25, 0.75], dtype=F64)
    torch.testing.assert_close(kl[0], (target * (target.log() - log_p)).sum())
    assert kl[1] == 0


def test_divergence_gradcheck():
    torch.manual_seed(1)
    tensors = [torch.randn(*s, dtype=F64, requires_grad=True) for s in [(3, 2, 4), (3, 2), (4, 4)]]
    slots = torch.tensor([[0, 1, 3], [2, -1, -1], [-1, -1, -1]])
    teacher = torch.rand(3, 3, dtype=F64)
    assert torch.autograd.gradcheck(lambda *a: index_divergence(*a, slots, teacher), tensors)
