"""Triton kernels of the indexer's loss: divergence over the selected slots and its gradients. One program per token."""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl


@triton.jit
def teacher_mass(slots_ptr, teacher_ptr, token, num_slots, SCAN: tl.constexpr):
    """Sum of the teacher over the slots in use, and one more than the last slot in use."""
    mass = tl.zeros([SCAN], tl.float32)
    last = tl.zeros([SCAN], tl.int32)
    for begin in range(0, num_slots, SCAN):
        place = begin + tl.arange(0, SCAN)
        slot = tl.load(slots_ptr + token * num_slots + place, mask=place < num_slots, other=-1)
        mass += tl.load(teacher_ptr + token * num_slots + place, mask=slot >= 0, other=0.0)
        last = tl.maximum(last, tl.where(slot >= 0, place + 1, 0))
    return tl.sum(mass, axis=0), tl.max(last, axis=0)


@triton.jit
def block_scores(
    q, weight, keys_ptr, slots_ptr, teacher_ptr, token, begin, num_slots, mass,
    D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of one block of slots: entry ids, use, keys [slots, D], dots [heads, slots], scores and target [slots]."""
    place = begin + tl.arange(0, BLOCK_S)
    slot = tl.load(slots_ptr + token * num_slots + place, mask=place < num_slots, other=-1).to(tl.int64)
    used = slot >= 0
    dim = tl.arange(0, D)
    keys = tl.load(keys_ptr + tl.where(used, slot, 0)[:, None] * D + dim[None, :], mask=used[:, None], other=0.0)
    # Products of bf16 are exact in the fp32 sum; fp32 operands stay fp32.
    dots = tl.dot(q, tl.trans(keys), input_precision="ieee")
    score = tl.sum(weight[:, None] * tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL), axis=0)
    teacher = tl.load(teacher_ptr + token * num_slots + place, mask=used, other=0.0)
    target = teacher / tl.maximum(mass, 1.1754943508222875e-38)
    return slot, used, keys, dots, score, target


@triton.jit
def divergence_forward(
    q_ptr, weight_ptr, keys_ptr, slots_ptr, teacher_ptr, divergence_ptr, lse_ptr, num_heads, num_slots,
    SCAN: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Divergence fp32 [T] and the log of the scores' softmax denominator, fp32 [T] (0 without slots). Grid: T."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, D)
    real = head < num_heads
    q = tl.load(q_ptr + (token * num_heads + head)[:, None] * D + dim[None, :], mask=real[:, None], other=0.0)
    weight = tl.load(weight_ptr + token * num_heads + head, mask=real, other=0.0).to(tl.float32)
    mass, end = teacher_mass(slots_ptr, teacher_ptr, token, num_slots, SCAN)
    top = mass * 0.0 - 3.0e38
    denominator, cross, share = mass * 0.0, mass * 0.0, mass * 0.0
    for begin in range(0, end, BLOCK_S):
        _, used, _, _, score, target = block_scores(
            q, weight, keys_ptr, slots_ptr, teacher_ptr, token, begin, num_slots, mass, D, BLOCK_S
        )
        new_top = tl.maximum(top, tl.max(tl.where(used, score, -3.0e38), axis=0))
        p = tl.where(used, tl.exp(score - new_top), 0.0)
        denominator = denominator * tl.exp(top - new_top) + tl.sum(p, axis=0)
        top = new_top
        cross += tl.sum(target * (tl.log(tl.maximum(target, 1e-10)) - tl.where(used, score, 0.0)), axis=0)
        share += tl.sum(target, axis=0)
    lse = tl.where(end > 0, top + tl.log(tl.where(end > 0, denominator, 1.0)), 0.0)
    tl.store(divergence_ptr + token, cross + share * lse)
    tl.store(lse_ptr + token, lse)


@triton.jit
def divergence_backward(
    q_ptr, weight_ptr, keys_ptr, slots_ptr, teacher_ptr, lse_ptr, grad_ptr,
    grad_q_ptr, grad_weight_ptr, grad_keys_ptr, num_heads, num_slots,
    SCAN: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Gradients of q and the head weights, and by fp32 atomics of the keys [C, D]. Grid: T."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, D)
    real = head < num_heads
    q_at = (token * num_heads + head)[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0)
    weight = tl.load(weight_ptr + token * num_heads + head, mask=real, other=0.0).to(tl.float32)
    lse, grad = tl.load(lse_ptr + token), tl.load(grad_ptr + token)
    mass, end = teacher_mass(slots_ptr, teacher_ptr, token, num_slots, SCAN)
    has_target = tl.where(mass > 0.0, 1.0, 0.0)
    grad_q = tl.zeros([BLOCK_H, D], tl.float32)
    grad_weight = tl.zeros([BLOCK_H], tl.float32)
    for begin in range(0, end, BLOCK_S):
        slot, used, keys, dots, score, target = block_scores(
            q, weight, keys_ptr, slots_ptr, teacher_ptr, token, begin, num_slots, mass, D, BLOCK_S
        )
        # d divergence / d score = softmax - target
        grad_score = tl.where(used, grad * (has_target * tl.exp(score - lse) - target), 0.0)
        grad_weight += tl.sum(grad_score[None, :] * tl.maximum(dots, 0.0), axis=1)
        grad_dots = tl.where(dots > 0.0, weight[:, None] * grad_score[None, :], 0.0).to(keys.dtype)
        grad_q = tl.dot(grad_dots, keys, grad_q, input_precision="ieee")
        grad_keys = tl.dot(tl.trans(grad_dots), q, input_precision="ieee")
        to = grad_keys_ptr + tl.where(used, slot, 0)[:, None] * D + dim[None, :]
        tl.atomic_add(to, grad_keys, mask=used[:, None], sem="relaxed")
    tl.store(grad_q_ptr + q_at, grad_q.to(grad_q_ptr.dtype.element_ty), mask=real[:, None])
    at = grad_weight_ptr + token * num_heads + head
    tl.store(at, grad_weight.to(grad_weight_ptr.dtype.element_ty), mask=real)
