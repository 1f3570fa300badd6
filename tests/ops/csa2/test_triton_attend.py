"""GPU providers of csa2.sparse_attend against the definition in float64: forward, backward, hostile values.

Runs on a CUDA device, or with TRITON_INTERPRET=1 on the CPU (Triton's kernels only).
"""

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dsv41.ops import registry
from megatron_dsv41.ops.csa2 import ref
from megatron_dsv41.ops.csa2.attend import Problem, SparseAttention
from megatron_dsv41.ops.csa2.triton_attend import output_dots
from megatron_dsv41.ops.rope import ref as rope
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
PROVIDERS = ["triton"]
if not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    PROVIDERS.append("hopper")
if not INTERPRETED and importlib.util.find_spec("flash_mla"):
    PROVIDERS.append("flash_mla")
if "hopper" in PROVIDERS and importlib.util.find_spec("cudnn") and importlib.util.find_spec("cutlass"):
    PROVIDERS.append("cudnn")
VARYING = ("flash_mla", "cudnn")  # providers whose latents' gradients vary in their last bits
SMALL = dict(heads=8, dim=64, window=8, topk=16)
RELEASED = dict(heads=64, dim=512, window=128, topk=512)


def case(
    tokens, *, heads, dim, window, topk, entries: int | None = None, offset=0, size: float = 1.0, documents=1, seed=0
) -> dict[str, Any]:
    """Inputs of one call, bf16, with -1 slots, duplicates of the window and rows without entries."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    entries = max(tokens, 1) if entries is None else entries
    here = torch.arange(tokens)
    starts = torch.linspace(0, tokens, documents + 1).long()[:-1]
    document_start = starts[torch.searchsorted(starts, here, right=True) - 1]
    window_start = torch.maximum(document_start, here - (window - 1)) + offset
    window_start = torch.where(document_start == 0, (here + offset - (window - 1)).clamp_min(0), window_start)
    order = torch.rand(tokens, entries, generator=generator).argsort(-1)[:, :topk]
    number = torch.randint(0, topk + 1, (tokens,), generator=generator)
    chosen = torch.full((tokens, topk), entries)
    chosen[:, : order.shape[1]] = order
    chosen[torch.arange(topk) >= number[:, None]] = entries
    chosen = chosen.sort(-1).values
    topk_ids = torch.where(chosen == entries, -1, chosen).to(torch.int32)
    bf16 = lambda x: x.to(torch.bfloat16).to(DEVICE)  # noqa: E731
    return dict(
        q_THD=bf16(normal(tokens, heads, dim) * size),
        window_kv_JD=bf16(normal(tokens + offset, dim)),
        compressed_kv_CD=bf16(normal(entries, dim)),
        topk_TK=topk_ids.to(DEVICE),
        sink_H=normal(heads).to(DEVICE),
        window_start_T=window_start.to(DEVICE),
        window_offset=offset,
        scale=dim**-0.5,
        window=window,
    )


LEAVES = ("q_THD", "window_kv_JD", "compressed_kv_CD", "sink_H")


def run(function, inputs, grad_out, dtype=None, **options):
    """Output and the gradient of every leaf, in float64."""
    inputs = dict(inputs)
    for name in LEAVES:
        if inputs[name] is not None:
            value = inputs[name] if dtype is None else inputs[name].to(dtype)
            inputs[name] = value.detach().clone().requires_grad_()
    out = function(**inputs, **options)
    out.backward(grad_out.to(out.dtype))
    leaves = [inputs[name].grad for name in LEAVES if inputs[name] is not None]
    return [x.detach().double() for x in (out, *leaves)]


def error(x, reference):
    return ((x - reference).norm() / reference.norm().clamp_min(1e-6)).item()


def compare(provider, inputs, **options):
    """Every result within 1.5 times the bf16 definition's own distance from the definition in float64."""
    if provider == "flash_mla" and inputs["q_THD"].shape[1] != 64:
        pytest.skip("FlashMLA takes 64 heads")
    grad_out = torch.randn(inputs["q_THD"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE).bfloat16()
    exact = run(ref.sparse_attend, inputs, grad_out, torch.float64)
    plain = run(ref.sparse_attend, inputs, grad_out)
    ours = run(registry.load("csa2.sparse_attend", provider), inputs, grad_out, **options)
    for name, mine, theirs, truth in zip(("out", *LEAVES), ours, plain, exact, strict=False):
        assert mine.isfinite().all(), name
        assert error(mine, truth) <= 1.5 * error(theirs, truth) + 2e-3, (name, error(mine, truth), error(theirs, truth))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tokens", [1, 3, 127] if INTERPRETED else [1, 127, 1001])
def test_odd_token_counts(provider, tokens):
    sizes = SMALL if INTERPRETED else dict(RELEASED, topk=64)
    compare(provider, case(tokens, **sizes))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("heads", [8, 16, 24, 64])
def test_head_counts_that_tensor_parallelism_leaves(provider, heads):
    sizes = dict(SMALL if INTERPRETED else RELEASED, heads=heads, topk=40)
    compare(provider, case(9 if INTERPRETED else 150, **sizes, seed=heads))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_packed_documents_and_halo(provider):
    sizes = SMALL if INTERPRETED else dict(RELEASED, topk=96)
    tokens = 30 if INTERPRETED else 400
    compare(provider, case(tokens, **sizes, documents=4))
    compare(provider, case(tokens, **sizes, documents=3, offset=sizes["window"] - 1))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_window_only(provider):
    sizes = SMALL if INTERPRETED else RELEASED
    inputs = case(20 if INTERPRETED else 300, **sizes) | dict(compressed_kv_CD=None, topk_TK=None)
    compare(provider, inputs)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_released_size(provider):
    if INTERPRETED:
        pytest.skip("too slow to interpret")
    compare(provider, case(640, **RELEASED))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_hostile_values(provider):
    """Logits of +-1e4, no entries at all, every entry equal, entries that repeat the window, no slot at all."""
    sizes = SMALL if INTERPRETED else dict(RELEASED, topk=64)
    tokens = 12 if INTERPRETED else 200
    inputs = case(tokens, **sizes)
    compare(provider, inputs | dict(topk_TK=torch.full_like(inputs["topk_TK"], -1)))
    compare(provider, inputs | dict(topk_TK=torch.zeros_like(inputs["topk_TK"])))
    compare(provider, inputs | dict(compressed_kv_CD=inputs["window_kv_JD"].clone()))
    empty = inputs | dict(
        topk_TK=torch.full_like(inputs["topk_TK"], -1), window_start_T=torch.arange(1, tokens + 1, device=DEVICE)
    )
    for result in run(registry.load("csa2.sparse_attend", provider), empty, torch.ones_like(inputs["q_THD"])):
        assert not result.any()
    function = registry.load("csa2.sparse_attend", provider)
    for size in (1e4, -1e4):
        large = inputs | dict(q_THD=inputs["q_THD"] * size)
        out, *grads = run(function, large, torch.ones_like(inputs["q_THD"]))
        assert error(out, registry.load("csa2.sparse_attend", "ref")(**large).double()) < 2e-2
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_teacher_is_the_head_summed_probability(provider):
    inputs = case(11 if INTERPRETED else 300, **(SMALL if INTERPRETED else RELEASED))
    _, truth = ref.sparse_attend(**inputs, teacher=True)
    _, mine = registry.load("csa2.sparse_attend", provider)(**inputs, teacher=True)
    assert mine.dtype == torch.float32 and not mine.requires_grad
    torch.testing.assert_close(mine, truth, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_wide_latent_gets_a_wide_gradient(provider):
    inputs = case(9 if INTERPRETED else 200, **(SMALL if INTERPRETED else RELEASED))
    inputs["compressed_kv_CD"] = inputs["compressed_kv_CD"].float().requires_grad_()
    registry.load("csa2.sparse_attend", provider)(**inputs).float().sum().backward()
    assert inputs["compressed_kv_CD"].grad.dtype == torch.float32


@pytest.mark.parametrize("provider", [provider for provider in PROVIDERS if provider not in VARYING])
def test_deterministic_gradients_repeat_bitwise(provider):
    inputs = case(13 if INTERPRETED else 500, **(SMALL if INTERPRETED else RELEASED))
    grad_out = torch.randn(inputs["q_THD"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE).bfloat16()
    function = registry.load("csa2.sparse_attend", provider)
    compare(provider, inputs, deterministic=True)
    first = run(function, inputs, grad_out, deterministic=True)
    for _ in range(2 if INTERPRETED else 20):
        again = run(function, inputs, grad_out, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif("cudnn" not in PROVIDERS, reason="needs SM90 and cuDNN-frontend")
def test_cudnn_refuses_what_its_kernel_does_not_do(monkeypatch):
    function = registry.load("csa2.sparse_attend", "cudnn")
    with pytest.raises(ValueError, match="'cudnn' has no deterministic gradients"):
        function(**case(4, **RELEASED), deterministic=True)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match="'cudnn' has no deterministic gradients"):
        function(**case(4, **RELEASED))
    with pytest.raises(ValueError, match="2 to 64 heads, got 1"):
        function(**case(4, **dict(RELEASED, heads=1)))


@pytest.mark.parametrize("tokens, heads, dim", [(1, 1, 16), (5, 7, 64), (33, 8, 512)])
def test_output_dots_are_sums_over_channels(tokens, heads, dim):
    generator = torch.Generator().manual_seed(tokens)
    out, grad_out = (torch.randn(tokens, heads, dim, generator=generator).to(DEVICE).bfloat16() for _ in range(2))
    truth = (out.double() * grad_out.double()).sum(-1)
    torch.testing.assert_close(output_dots(out, grad_out).double(), truth, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif("hopper" not in PROVIDERS, reason="needs SM90")
def test_deterministic_gradients_of_several_launches(monkeypatch):
    monkeypatch.setattr("megatron_dsv41.ops.csa2.hopper_attend.TOKENS_AT_ONCE", 128)
    compare("hopper", case(300, **dict(RELEASED, topk=96), documents=2, offset=127), deterministic=True)


def turned(function):
    """`function` over queries that are nobody else's, given away to be turned by the angles of far positions."""

    def call(q_THD, **inputs):
        position = 37 * torch.arange(q_THD.shape[0], device=q_THD.device)
        turn = rope.cos_sin(position, rope.plain_frequencies(q_THD.shape[2] // 4, 10000.0))
        return function(q_THD * 1, turn=turn, **inputs)

    return call


def turned_before(function):
    """The same with queries that rope.rotate has turned into a copy, and turns back the gradient of."""

    def call(q_THD, turn, **inputs):
        return function(registry.load("rope.rotate", "triton")(q_THD, *turn), **inputs)

    return call


@pytest.mark.parametrize("provider", PROVIDERS)
def test_queries_given_away_have_the_bits_of_queries_turned_before(provider):
    sizes = SMALL if INTERPRETED else dict(RELEASED, topk=96)
    inputs = case(13 if INTERPRETED else 200, **sizes)
    grad_out = torch.randn(inputs["q_THD"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE).bfloat16()
    function = registry.load("csa2.sparse_attend", provider)
    options = {} if provider in VARYING else dict(deterministic=True)
    given = run(turned(function), inputs, grad_out, **options)
    before = run(turned(turned_before(function)), inputs, grad_out, **options)
    assert all(torch.equal(a, b) for a, b in zip(given[:2], before[:2], strict=True))
    assert provider in VARYING or all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


class Exact:
    """The definition in the place of kernels, for what the node around them adds. No gradient of the sink."""

    @staticmethod
    def out(problem, q, window_kv, keys, topk, sink, start):
        where = (start, problem.window_offset, problem.scale)
        return ref.sparse_attend(q, window_kv, keys, topk, sink, *where, window=problem.window)

    @classmethod
    def forward(cls, problem, *tensors):
        cls.sink = tensors[4]
        return cls.out(problem, *tensors), torch.zeros(tensors[0].shape[:2], device=DEVICE)

    @classmethod
    def backward(cls, problem, q, window_kv, keys, topk, start, out, lse, grad_out):
        leaves = [x.detach().clone().requires_grad_() for x in (q, window_kv, keys)]
        with torch.enable_grad():
            out = cls.out(problem, *leaves, topk, cls.sink, start)
        return *torch.autograd.grad(out, leaves, grad_out), lse


@pytest.mark.parametrize("offset", [0, 7])
def test_the_node_turns_queries_and_their_gradient(offset):
    inputs = case(13, **SMALL, offset=offset)
    inputs |= {name: inputs[name].float() for name in LEAVES}
    grad_out = torch.randn(inputs["q_THD"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)

    def function(
        q, window_kv_JD, compressed_kv_CD, topk_TK, sink_H, window_start_T, window_offset, scale, *, window, turn
    ):
        problem = Problem(*q.shape, window, topk_TK.shape[1], window_offset, scale, False)
        latents = (window_kv_JD, compressed_kv_CD)
        kernels = (Exact.forward, Exact.backward)
        return SparseAttention.apply(kernels, problem, q, *latents, topk_TK, sink_H, window_start_T, *turn)[0]

    found = run(turned(function), inputs, grad_out)
    truth = run(turned(ref.sparse_attend), inputs, grad_out, torch.float64)
    assert all(error(a, b) < 1e-5 for a, b in zip(found[:4], truth[:4], strict=True))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_queries_given_away_are_made_again(provider):
    """Recomputation overwrites queries that it made itself; a second backward finds what the first one found."""
    inputs = case(9 if INTERPRETED else 150, **(SMALL if INTERPRETED else dict(RELEASED, topk=40)))
    function = registry.load("csa2.sparse_attend", provider)
    leaf = inputs.pop("q_THD").requires_grad_()
    kept = leaf.detach().clone()

    def site(q):
        return turned(function)(q, **inputs)

    (plain,) = torch.autograd.grad(site(leaf).float().sum(), leaf)
    out = checkpoint(site, leaf, use_reentrant=False).float().sum()
    for _ in range(2):
        (again,) = torch.autograd.grad(out, leaf, retain_graph=True)
        assert torch.equal(again, plain)
    assert torch.equal(leaf.detach(), kept)


class Doubled(torch.autograd.Function):
    """A node that hands out a view of what it made, as Transformer Engine's linear does."""

    @staticmethod
    def forward(ctx, x):
        return (x * 2).view(x.shape)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


@pytest.mark.parametrize("make", [lambda x: x * 2, Doubled.apply], ids=["operator", "node"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_heads_of_a_projection_can_be_given_away(provider, make):
    """They are a view: its gradient goes back through it as it is, not through a zeroed copy of its base."""
    inputs = case(9 if INTERPRETED else 150, **(SMALL if INTERPRETED else dict(RELEASED, topk=40)))
    function = registry.load("csa2.sparse_attend", provider)
    leaf = inputs.pop("q_THD").flatten(1).requires_grad_()
    turn = rope.cos_sin(37 * torch.arange(len(leaf), device=DEVICE), rope.plain_frequencies(8, 10000.0))

    def site(x):
        heads = make(x).unflatten(1, (len(inputs["sink_H"]), -1))
        return function(heads, turn=turn, **inputs)

    out = site(leaf)
    assert [type(node).__name__ for node, _ in out.grad_fn.next_functions if node][0].startswith("View")
    (found,) = torch.autograd.grad(out.float().sum(), leaf)
    copied = (leaf * 2).unflatten(1, (len(inputs["sink_H"]), -1)).clone()
    (wanted,) = torch.autograd.grad(function(copied, turn=turn, **inputs).float().sum(), leaf)
    assert torch.equal(found, wanted)
    again = checkpoint(site, leaf, use_reentrant=False).float().sum()
    assert torch.equal(torch.autograd.grad(again, leaf)[0], wanted)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_leaf_cannot_be_given_away(provider):
    inputs = case(9, **(SMALL if INTERPRETED else RELEASED))
    inputs["q_THD"].requires_grad_()
    with pytest.raises(ValueError, match="csa2.sparse_attend with turn: x is a leaf"):
        registry.load("csa2.sparse_attend", provider)(**inputs, turn=(torch.ones(9, 4), torch.zeros(9, 4)))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_a_provider_does_not_take_is_an_error(provider):
    inputs = case(4, **(SMALL if INTERPRETED else RELEASED))
    function = registry.load("csa2.sparse_attend", provider)
    with pytest.raises(ValueError, match="bfloat16"):
        function(**inputs | dict(q_THD=inputs["q_THD"].float()))
    with pytest.raises(ValueError, match="channels"):
        function(**inputs | dict(q_THD=inputs["q_THD"][..., :48]))
