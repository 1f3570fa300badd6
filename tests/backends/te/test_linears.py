"""Linears of Transformer Engine in place of plain ones: roles and names on a CPU, values and gradients on a GPU."""

import sys

import pytest
import torch
from torch import nn

from megatron_dsv41.backends.te import machine
from megatron_dsv41.modules.primitives import Linear, TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.precision import Machine, Precision, linear_roles
from megatron_dsv41.presets import tiny
from megatron_dsv41.testing import stand_in_te
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.tiny import identity_map, tiny_config

GPU = [pytest.mark.gpu, pytest.mark.te]
# Relative error of a product of Gaussian operands by recipe: E4M3 rounds an operand by 2.6%, E5M2 (gradients under
# delayed and current) by 5.3%; a product adds the squares of its two operands'.
FORWARD = {"delayed": 0.045, "current": 0.045, "block": 0.045}
BACKWARD = {"delayed": 0.075, "current": 0.075, "block": 0.045}


@pytest.fixture
def without_a_gpu():
    """Plain products in the name of Transformer Engine."""
    with stand_in_te.installed():
        yield


def model_of(config, precision, ops=None):
    """Weights depend on the seed alone."""
    torch.manual_seed(0)
    substitute, ops = machine.low_precision(config, precision), ops or Ops()
    primitives = TorchPrimitives(config, ops, substitute=substitute)
    return Transformer(config, identity_map(config), ops=ops, primitives=primitives)


@pytest.mark.parametrize("recipe", ["block", "delayed"])
def test_roles_names_and_context(without_a_gpu, recipe):
    config = tiny_config()
    plain, low = model_of(config, Precision()), model_of(config, Precision(fp8=recipe, roles=("attn.wq_*", "ffn.*")))
    replaced = {name for name, module in low.named_modules() if isinstance(module, stand_in_te.Linear)}
    expected = ("attn.wq_a", "attn.wq_b", "ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3")
    assert replaced == {f"layers.{layer}.{role}" for layer in range(8) for role in expected}
    assert list(low.state_dict()) == list(plain.state_dict())
    low.load_state_dict(plain.state_dict())
    ids = torch.randint(4, 90, (1, 16))
    torch.testing.assert_close(low(ids).logits, plain(ids).logits, rtol=0, atol=0)
    # Every linear enters the context itself, so that a recomputation does; delayed scaling also has one around all.
    assert stand_in_te.Autocast.entered == len(replaced) + (recipe == "delayed") and stand_in_te.Autocast.depth == 0


def test_what_is_off_is_not_looked_for(monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(None, False))
    assert machine.low_precision(tiny_config(), Precision()) is None
    with pytest.raises(ValueError, match="needs a CUDA device"):
        machine.low_precision(tiny_config(), Precision(fp8="block"))


@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=GPU) for recipe in FORWARD])
def test_products_on_a_gpu(recipe):
    torch.manual_seed(0)
    config = tiny()
    plain = Linear(1280, 2304, torch.bfloat16, 0.02, Ops()).cuda()
    substitute = machine.low_precision(config, Precision(fp8=recipe))
    assert substitute is not None
    low = substitute("attn.wq_a", plain)
    assert substitute("attn.indexer.wq_b", plain) is plain and low.weight is plain.weight
    assert list(low.state_dict()) == ["weight"]
    x = torch.randn(4096, 1, 1280, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4096, 1, 2304, device="cuda", dtype=torch.bfloat16)
    weight = plain.weight
    exact = x.double() @ weight.double().T
    exact = [exact, *torch.autograd.grad(exact, [x, weight], grad.double())]
    for _ in range(2):  # delayed scaling knows no scales in its first step
        with substitute.forward_pass():
            y = low(x)
        found = [y, *torch.autograd.grad(y, [x, weight], grad)]
    errors = [relative_error(got, want) for got, want in zip(found, exact, strict=True)]
    assert 0.005 < errors[0] < FORWARD[recipe], errors  # below, nothing was rounded
    assert max(errors[1:]) < BACKWARD[recipe], errors


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=GPU) for name in ("mxfp8", "nvfp4")])
def test_what_this_gpu_cannot_is_refused(recipe):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU can")
    precision = Precision(fp4="nvfp4") if recipe == "nvfp4" else Precision(fp8=recipe)
    with pytest.raises(ValueError, match=f"{recipe} needs compute capability 10.0"):
        machine.low_precision(tiny(), precision)


@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=GPU) for recipe in FORWARD])
def test_a_model_learns_as_in_bf16(recipe):
    config = tiny().with_overrides({"dtype": "bfloat16"})
    ids = torch.randint(4, 90, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()

    def losses(precision, noise=0.0):
        model = model_of(config, precision, Ops({"*": "triton, grouped", "csa2": "ref"})).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * (torch.rand_like(parameter, dtype=torch.float32) - 0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        found = []
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found).cpu()

    bf16, low = losses(Precision()), losses(Precision(fp8=recipe))
    assert bf16[-1] < 0.7 * bf16[0]
    # Routing and selection turn roundings into jumps: curves are held against what one rounding of the weights does.
    band = (bf16 - losses(Precision(), noise=2.0**-8)).abs().mean()
    assert 0 < (bf16 - low).abs().mean() < 3 * band, (bf16[::5], low[::5], band)


def test_what_the_package_refuses_is_said(without_a_gpu, monkeypatch):
    def refuse(recipe):
        raise AssertionError("CUDA 12.9 is needed")

    monkeypatch.setattr("transformer_engine.pytorch.quantization.check_recipe_support", refuse)
    with pytest.raises(ValueError, match="fp8=block: Transformer Engine refuses: CUDA 12.9 is needed; set precision.f"):
        machine.low_precision(tiny_config(), Precision(fp8="block"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", None)
    with pytest.raises(ValueError, match="the installed transformer-engine cannot be imported .*: install one that is"):
        machine.low_precision(tiny_config(), Precision(fp8="block"))


def test_every_role_is_replaced(without_a_gpu):
    low = model_of(tiny_config(), Precision(fp8="block"))
    replaced = {name.split(".", 2)[2] for name, part in low.named_modules() if isinstance(part, stand_in_te.Linear)}
    assert replaced == set(linear_roles(tiny_config()))
