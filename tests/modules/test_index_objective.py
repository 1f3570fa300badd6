"""The indexers' objective against a dense fp64 implementation written from the formulas (SPEC 8, 9)."""

import pytest
import torch

from megatron_dsv41.modules.attention import layer_frequencies
from megatron_dsv41.ops.rope.ref import cos_sin, rotate
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.tiny import tiny_config, tiny_model

EXACT = {"window_kv_fp8": False, "main_kv_fp4": False, "index_mxfp4": False, "balance_loss_weight": 0.0}
SOURCES = {2: 2, 4: 4, 6: 4}  # selecting layer -> owner of its keys


def captured(model, ids):
    """Per layer the input of its attention site [T, d], and the state that leaves it, of one forward pass."""
    inputs, states = {}, {}

    def hook(layer):
        def keep(module, args, output):
            inputs[layer], states[layer] = args[0][:, 0].detach().double(), output[1]

        return keep

    hooks = [block.attn.register_forward_hook(hook(layer)) for layer, block in enumerate(model.layers)]
    output = model(ids)
    for handle in hooks:
        handle.remove()
    return output, inputs, states


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight


def turned(x, positions, frequencies):
    return rotate(x, *cos_sin(positions, frequencies.double()))


def latents(x, compressor, weights, name):
    p = x @ weights[f"{name}.wkv.weight"].T
    if compressor.ratio == 2:
        g = x @ weights[f"{name}.wgate.weight"].T
        p, g = (t[: len(t) // 2 * 2].unflatten(0, (-1, 2)) for t in (p, g))
        p = (g.softmax(1) * p).sum(1)
    return normed(p, weights[f"{name}.norm.weight"])


def dense_objective(model, weights, inputs, states, layer):
    """Mean KL over the tokens of one document, by loops over queries; differentiable in `weights`."""
    config, phase = model.config, model.layers[layer].attn.phase
    attn, owner = model.layers[layer].attn, SOURCES[layer]
    ratio, here = attn.plan.ratio, torch.arange(len(inputs[layer]))
    table = layer_frequencies(config, ratio, phase.yarn)
    w = {
        k.removeprefix(f"layers.{layer}.attn."): v for k, v in weights.items() if k.startswith(f"layers.{layer}.attn.")
    }
    own = {k.removeprefix(f"layers.{owner}.attn."): v for k, v in weights.items() if f"layers.{owner}.attn." in k}
    x = inputs[layer]
    q_latent = normed(x @ w["wq_a.weight"].T, w["q_norm.weight"]).detach()
    q = turned((q_latent @ w["wq_b.weight"].T).unflatten(-1, (-1, config.head_dim)), here, table).detach()
    window = turned(normed(x @ w["wkv.weight"].T, w["kv_norm.weight"]), here, table).detach()
    entry = latents(inputs[owner], model.layers[owner].attn.compressor, own, "compressor").detach()
    at = torch.arange(len(entry)) * ratio
    kv = turned(entry, at, table)
    keys = turned(normed(entry @ own["indexer.wk.weight"].T, own["indexer.k_norm.weight"]), at, table)
    index_q = (q_latent @ w["indexer.wq_b.weight"].T).unflatten(-1, (-1, config.index_head_dim))
    index_q = turned(index_q, here, table)
    head = x @ w["indexer.weights_proj.weight"].T * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
    total = torch.zeros((), dtype=torch.float64)
    for t in here.tolist():
        allowed = list(range((t + 1) // ratio))
        if layer == 6 and phase.hsi:
            blocks = set(states[4].candidates[t].tolist())
            allowed = [j for j in allowed if j // config.candidate_block_size in blocks]
        if phase.index_loss == "sparse":
            allowed = [j for j in states[layer].topk_indices[t].tolist() if j >= 0]
        if not allowed:
            continue
        near = window[max(0, t - config.sliding_window + 1) : t + 1]
        logits = torch.cat([q[t] @ kv[allowed].T, q[t] @ near.T], dim=1) * config.head_dim**-0.5
        p = torch.cat([logits, w["attn_sink"].detach()[:, None]], dim=1).softmax(1)[:, : len(allowed)].sum(0)
        target = p / p.sum()
        scores = (head[t][:, None] * (index_q[t] @ keys[allowed].T).relu()).sum(0)
        total = total + (target * (target.clamp_min(1e-10).log() - scores.log_softmax(0))).sum()
    return total / len(here)


@pytest.mark.parametrize("objective", ["dense", "sparse"])
@pytest.mark.parametrize("hsi", [False, True])
def test_gradients_equal_a_dense_fp64_implementation(objective, hsi):
    phase = Phase(index_loss=objective, index_loss_weight=0.5, hsi=hsi, **EXACT)
    model = tiny_model(tiny_config(candidate_topk_blocks=2), phase=phase)
    ids = torch.randint(0, 90, (1, 15), generator=torch.Generator().manual_seed(3))
    output, inputs, states = captured(model, ids)
    output.aux.index_loss.sum().backward()

    weights = {name: p.detach().double().requires_grad_("indexer" in name) for name, p in model.named_parameters()}
    losses = {layer: 0.5 * dense_objective(model, weights, inputs, states, layer) for layer in SOURCES}
    for layer, loss in losses.items():
        torch.testing.assert_close(output.aux.index_loss[layer].double(), loss, rtol=1e-4, atol=1e-7)
    sum(losses.values()).backward()
    seen = 0
    for name, parameter in model.named_parameters():
        if "indexer" in name:
            seen += 1
            scale = weights[name].grad.abs().max()
            assert scale > 0, name
            torch.testing.assert_close(parameter.grad.double(), weights[name].grad, rtol=1e-3, atol=float(scale) * 1e-4)
        else:
            assert parameter.grad is None, name
    assert seen == 4 + 4 + 2

    # Reindex layer 6 teaches the keys of their owner, layer 4.
    (through,) = torch.autograd.grad(
        dense_objective(model, weights, inputs, states, 6), weights["layers.4.attn.indexer.wk.weight"]
    )
    assert through.abs().sum() > 0


def test_pool_of_everything_changes_no_bit():
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(5))
    results = []
    for hsi in (True, False):
        config = tiny_config(candidate_topk_blocks=24)
        model = tiny_model(config, phase=Phase(index_loss="sparse", hsi=hsi))
        output = model(ids)
        (output.logits.square().mean() + output.aux.loss.sum()).backward()
        results.append((output.logits, output.aux.index_loss, [p.grad for p in model.parameters()]))
    on, off = results
    assert torch.equal(on[0], off[0]) and torch.equal(on[1], off[1])
    assert all(torch.equal(a, b) for a, b in zip(on[2], off[2], strict=True) if a is not None)


def test_weight_scales_the_gradient_and_nothing_else():
    gradients = []
    for weight in (1.0, 4.0):
        model = tiny_model(tiny_config(), phase=Phase(index_loss="sparse", index_loss_weight=weight))
        model(torch.arange(20)[None]).aux.index_loss.sum().backward()
        gradients.append(model.layers[4].attn.indexer.wk.weight.grad)
    torch.testing.assert_close(gradients[0] * 4, gradients[1])
