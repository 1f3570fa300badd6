"""The FFN site: how routed and shared parts come together."""

import torch

from megatron_dsv41.modules.moe import MoE
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import make_batch, one_document_per_row
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.operators import Operators
from megatron_dsv41.testing.tiny import tiny_config


def test_parts_add_in_fp32_without_an_fp32_sum():
    config = tiny_config(dtype="bfloat16", engram_layer_ids=(), engram_num_embeddings=())
    torch.manual_seed(0)
    site = MoE(config, Phase(), TorchPrimitives(config, Ops()), Ops())
    ids = torch.randint(0, 90, (1, 10))
    batch = make_batch(config, lambda ids, documents: {}, ids, one_document_per_row(config, ids))
    x = torch.randn(10, 1, config.hidden_size, dtype=torch.bfloat16)
    parts = {}
    for part in (site.experts, site.shared_experts):
        part.register_forward_hook(lambda module, args, output: parts.update({module: output}))
    with Operators() as operators, torch.no_grad():
        y, _ = site(x, batch)
    routed, shared = parts[site.experts], parts[site.shared_experts]
    assert routed.dtype == torch.float32 and torch.equal(y[:, 0], (routed + shared).bfloat16())
    wide_sums = [row for row in operators.made if row[:2] == ("add", torch.float32) and row.shape == routed.shape]
    assert len(wide_sums) == config.num_experts_per_tok - 1  # those of a token's experts
