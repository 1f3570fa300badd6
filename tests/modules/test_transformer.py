"""The whole model in one process: causality, packing, gradients, lifetimes."""

import dataclasses

import pytest
import torch

from megatron_dsv41.layer_plan import STATE_FIELDS, live_at, plan_layers
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer, next_token_loss
from megatron_dsv41.ops.documents import documents_from_ids, documents_from_lengths
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.tiny import identity_map, tiny_config, tiny_model, without_rounding


class Recorder:
    """Selections, candidates and hashes of every layer of one forward pass."""

    def __init__(self, model):
        self.seen = {}
        self.hooks = [
            block.attn.register_forward_hook(self._attention(layer)) for layer, block in enumerate(model.layers)
        ]

    def _attention(self, layer):
        def hook(module, args, output):
            state, batch = output[1], args[2]
            self.seen[layer] = (state.topk_indices, state.candidates, batch.engram_rows.get(layer))

        return hook

    def close(self):
        for hook in self.hooks:
            hook.remove()


def run(model, ids, documents=None):
    recorder = Recorder(model)
    with torch.no_grad():
        output = model(ids, documents)
    recorder.close()
    return output.logits, recorder.seen


def random_ids(config, rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size - 1, (rows, length), generator=generator)


def assert_prefix_unchanged(model, ids, changed_at, documents=None, exact=False):
    other = ids.clone()
    other[0, changed_at] = (other[0, changed_at] + 7) % (model.config.vocab_size - 1)
    (a, seen_a), (b, seen_b) = run(model, ids, documents), run(model, other, documents)
    if exact:
        assert torch.equal(a[:, :changed_at], b[:, :changed_at])
    else:
        assert_same(a[:, :changed_at], b[:, :changed_at])
    for layer, (x, y) in {k: (seen_a[k], seen_b[k]) for k in seen_a}.items():
        for what, mine, theirs in zip(("topk", "candidates", "rows"), x, y, strict=True):
            if mine is not None:
                assert torch.equal(mine[:changed_at], theirs[:changed_at]), (layer, what)


MODEL = tiny_model(tiny_config())
# A product rounds differently with other rows beside it: by 1e-16 in fp64, by 1e-7 in fp32. The latter is enough to
# cross, in one sequence of a hundred and on one processor but not another, a boundary of the fake quantization.
EXACT = tiny_model(tiny_config()).double()
SMOOTH = tiny_model(tiny_config(), phase=without_rounding())


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 if expected.dtype == torch.float32 else 1e-12)


def dense_model(config):
    """MODEL's weights; every expert evaluates every token, so no token's rounding depends on its neighbours."""
    dense = Transformer(config, identity_map(config), primitives=TorchPrimitives(config, Ops(), dense_experts=True))
    dense.load_state_dict(MODEL.state_dict())
    return dense


@pytest.mark.parametrize("length", range(2, 41))
def test_later_tokens_do_not_reach_earlier_outputs(length):
    ids = random_ids(MODEL.config, 1, length, length)
    assert_prefix_unchanged(EXACT, ids, changed_at=length - 1)
    assert_prefix_unchanged(SMOOTH, ids, changed_at=length // 2)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 2], [2, 3, 1], [9, 7, 5], [1, 13, 4], [20, 20]])
def test_causality_in_packed_documents(lengths):
    total = sum(lengths)
    documents = documents_from_lengths([lengths], total)
    ids = random_ids(MODEL.config, 1, total)
    for changed_at in {total - 1, lengths[0], total // 2}:
        assert_prefix_unchanged(EXACT, ids, changed_at, documents)
        assert_prefix_unchanged(SMOOTH, ids, changed_at, documents)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
def test_causality_is_bitwise_with_dense_experts(length):
    model = dense_model(tiny_config())
    ids = random_ids(model.config, 1, length + 1)
    assert_prefix_unchanged(model, ids, changed_at=length, exact=True)


def test_dense_and_routed_experts_agree():
    config = tiny_config()
    dense = dense_model(config).double()
    ids = random_ids(config, 2, 11)
    assert_same(run(dense, ids)[0], run(EXACT, ids)[0])


@pytest.mark.parametrize("model", [EXACT, SMOOTH], ids=["fp64", "fp32-smooth"])
@pytest.mark.parametrize("length", range(1, 10))
def test_short_and_odd_documents_packed_equal_alone(length, model):
    lengths = [length, 3, 2 * length + 1]
    total = sum(lengths)
    ids = random_ids(MODEL.config, 1, total, length)
    packed, _ = run(model, ids, documents_from_lengths([lengths], total))
    begin = 0
    for size in lengths:
        alone, _ = run(model, ids[:, begin : begin + size])
        assert_same(packed[:, begin : begin + size], alone)
        begin += size


def test_rows_of_a_batch_do_not_meet():
    ids = random_ids(MODEL.config, 3, 12)
    together, _ = run(EXACT, ids)
    for row in range(3):
        assert_same(together[row : row + 1], run(EXACT, ids[row : row + 1])[0])


def test_padding_changes_nothing_before_it():
    ids = random_ids(MODEL.config, 1, 9)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    documents = documents_from_lengths([[9]], 13)
    assert_same(run(EXACT, padded, documents)[0][:, :9], run(EXACT, ids)[0])


def test_left_padding_changes_nothing_after_it():
    ids = random_ids(MODEL.config, 1, 9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
    alive = torch.arange(12)[None] >= 3
    documents = documents_from_ids(torch.zeros(1, 12, dtype=torch.int64), alive, torch.zeros_like(alive))
    assert_same(run(EXACT, padded, documents)[0][:, 3:], run(EXACT, ids)[0])


def backward(model, ids, documents=None, aux=True):
    model.zero_grad(set_to_none=True)
    output = model(ids, documents)
    loss = next_token_loss(output.logits, ids.roll(-1, 1), torch.ones(ids.shape))
    (loss + (output.aux.balance_loss.sum() + output.aux.index_loss.sum() if aux else 0)).backward()
    return output


def test_every_parameter_but_the_indexer_gets_gradient():
    backward(MODEL, random_ids(MODEL.config, 2, 24))
    for name, parameter in MODEL.named_parameters():
        if "indexer" in name:
            assert parameter.grad is None and not parameter.requires_grad, name
        else:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
            if "_hc." in name:  # no mixing coefficient is computed in vain
                rows = parameter.grad.flatten(1).abs().sum(1) if parameter.dim() == 2 else parameter.grad.abs()
                first_pre = name.startswith("layers.0.attn_hc")
                assert (rows > 0).all() or first_pre, name


@pytest.mark.parametrize("objective", ["dense", "sparse"])
def test_index_loss_trains_the_indexer_and_nothing_else(objective):
    model = tiny_model(tiny_config(), phase=Phase(index_loss=objective, balance_loss_weight=0.0))
    model.zero_grad()
    output = model(random_ids(model.config, 2, 24))
    assert (output.aux.index_loss[[2, 4, 6]] > 0).all() and (output.aux.index_loss[[0, 1, 3, 5, 7]] == 0).all()
    output.aux.index_loss.sum().backward()
    for name, parameter in model.named_parameters():
        touched = parameter.grad is not None and parameter.grad.abs().sum() > 0
        assert touched == ("indexer" in name), name


def test_reindex_loss_reaches_the_owners_keys():
    model = tiny_model(tiny_config(), phase=Phase(index_loss="dense"))
    output = model(random_ids(model.config, 1, 24))
    output.aux.index_loss[6].backward()
    assert model.layers[4].attn.indexer.wk.weight.grad.abs().sum() > 0
    assert not model.layers[4].attn.indexer.wq_b.weight.grad.any()


def test_index_loss_does_not_change_the_output():
    ids = random_ids(MODEL.config, 1, 20)
    trained = tiny_model(tiny_config(), phase=Phase(index_loss="sparse"))
    assert torch.equal(run(trained, ids)[0], run(MODEL, ids)[0])


def test_state_holds_exactly_what_is_alive():
    config = tiny_config()
    plans, entering = plan_layers(config), {}
    hooks = [
        block.register_forward_pre_hook(lambda m, args, layer=layer: entering.__setitem__(layer, args[2]))
        for layer, block in enumerate(MODEL.layers)
    ]
    run(MODEL, random_ids(config, 1, 20))
    for hook in hooks:
        hook.remove()
    for layer, state in entering.items():
        filled = {name for name in STATE_FIELDS if getattr(state, name) is not None}
        assert filled == live_at(plans, layer), layer


def test_recompute_gives_the_same_bits():
    from torch.utils.checkpoint import checkpoint

    ids = random_ids(MODEL.config, 2, 20)
    backward(MODEL, ids)
    expected = {n: p.grad.clone() for n, p in MODEL.named_parameters() if p.grad is not None}
    originals = [block.forward for block in MODEL.layers]
    try:
        for block, forward in zip(MODEL.layers, originals, strict=True):
            block.forward = lambda *a, f=forward: checkpoint(f, *a, use_reentrant=False)
        backward(MODEL, ids)
    finally:
        for block in MODEL.layers:
            del block.forward
    for name, parameter in MODEL.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name]), name


def test_image_tokens_route_by_their_own_bias_and_close_engram():
    config = tiny_config()
    ids = random_ids(config, 1, 12)
    with_image = ids.clone()
    with_image[0, 4:7] = config.image_token_id
    model = tiny_model(config)
    _, seen = run(model, with_image)
    batch_rows = seen[1][2]
    _, plain = run(model, ids)
    assert torch.equal(batch_rows[:4], plain[1][2][:4])
    with torch.no_grad():
        output = model(with_image)
        load = output.aux.expert_load
        assert load[:, 0].sum(-1).tolist() == [9 * 2.0] * 8 and load[:, 1].sum(-1).tolist() == [3 * 2.0] * 8
        for block in model.layers:
            block.ffn.gate.bias_vl.copy_(torch.tensor([100.0, 50.0, 0, 0]))
        moved = model(with_image).aux.expert_load
    assert (moved[:, 1] == torch.tensor([3.0, 3.0, 0, 0])).all()


def test_engram_leaves_image_tokens_alone():
    config = tiny_config()
    model = tiny_model(config)
    ids = random_ids(config, 1, 12)
    ids[0, 4:7] = config.image_token_id
    engram = model.layers[1].engram
    written = {}
    hook = engram.register_forward_hook(lambda m, args, out: written.update(before=args[0], after=out))
    run(model, ids)
    hook.remove()
    changed = (written["before"] != written["after"]).flatten(1).any(1)
    assert changed.tolist() == [True] * 4 + [False] * 3 + [True] * 5


def test_bounded_replay_cuts_decoder_windows_only():
    config = tiny_config()
    model = tiny_model(config)
    ids = random_ids(config, 1, 20)
    here = torch.arange(20)
    boundary = torch.full((20,), 15)
    with torch.no_grad():
        plain, replayed = model(ids), model(ids, None, boundary)
    start = config.decoder_start
    for layer in range(start + 1):
        assert torch.equal(plain.streams[layer], replayed.streams[layer])
    before = here < 15
    assert torch.equal(plain.logits[:, before], replayed.logits[:, before])
    assert not torch.equal(plain.logits[:, 15:], replayed.logits[:, 15:])
    # From the boundary on, decoder windows hold replayed positions only: what the decoder computed before it is unread.
    with torch.no_grad():
        dead = documents_from_lengths([[20]], 20)
        noise = model(ids, dead, torch.zeros(20, dtype=torch.int64))
    assert torch.equal(noise.logits, plain.logits)


def test_replayed_suffix_ignores_decoder_states_before_the_boundary():
    config, boundary = tiny_config(), 12
    model = dense_model(config)  # so that a spoiled token's routing cannot move another token by a rounding
    ids = random_ids(config, 1, 18)
    spoiled = {}

    def spoil(module, args, output):
        streams, *rest = output
        streams = streams.clone()
        streams[:boundary] += 1.0  # what decoder layers would read from positions that a replay does not have
        spoiled["done"] = True
        return (streams, *rest)

    with torch.no_grad():
        clean = model(ids, None, torch.full((18,), boundary)).logits
        hook = model.layers[config.decoder_start].register_forward_hook(spoil)
        dirty = model(ids, None, torch.full((18,), boundary)).logits
        hook.remove()
    assert spoiled and torch.equal(clean[:, boundary:], dirty[:, boundary:])
    assert not torch.equal(clean[:, :boundary], dirty[:, :boundary])


def test_phase_switches_change_the_function():
    ids = random_ids(MODEL.config, 1, 30)
    base = run(MODEL, ids)[0]
    for switch in ("window_kv_fp8", "main_kv_fp4", "index_mxfp4", "hsi", "yarn"):
        other = tiny_model(tiny_config(), phase=dataclasses.replace(Phase(), **{switch: False}))
        assert not torch.equal(run(other, ids)[0], base), switch


def test_balance_loss_of_a_perfect_router_is_its_weight():
    from megatron_dsv41.modules.moe import Router

    config = tiny_config()
    router = Router(config, Phase(balance_loss_weight=0.5), TorchPrimitives(config, Ops()), Ops())
    scores = torch.ones(8, 4)
    chosen = torch.zeros(8, 4)
    chosen[0::2, :2] = 1
    chosen[1::2, 2:] = 1
    loss = router._balance_loss(scores, chosen, torch.ones(8, dtype=torch.bool), 2)
    torch.testing.assert_close(loss, torch.tensor(0.5))
    skewed = torch.zeros(8, 4)
    skewed[:, :2] = 1
    torch.testing.assert_close(
        router._balance_loss(skewed * 2 + 1e-9, skewed, torch.ones(8, dtype=torch.bool), 2), torch.tensor(1.0)
    )


def test_loss_is_a_mean_over_valid_positions():
    logits = torch.randn(2, 3, 5)
    labels = torch.randint(0, 5, (2, 3))
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(next_token_loss(logits, labels, weight), (each[0, 0] + each[0, 1] + each[1, 0]) / 3)
    assert next_token_loss(logits, labels, weight * 0) == 0


def test_bf16_model_runs_with_fp32_coefficients():
    model = tiny_model(tiny_config(dtype="bfloat16"))
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    for name, dtype in dtypes.items():
        wide = name.endswith(("attn_sink", "_hc.fn", "_hc.base", "_hc.scale"))
        assert dtype == (torch.float32 if wide else torch.bfloat16), name
    output = backward(model, random_ids(model.config, 2, 16))
    assert output.logits.dtype == torch.float32 and output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
