"""Parts: the bits of two steps, without the tensors between them."""

import torch

from megatron_dsv41.ops.numerics import parts
from megatron_dsv41.testing.operators import Operators

HOSTILE = [torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 3.3e38, -3.4e38, 1e-40, 1.00390625, 1.01171875]


def values(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, generator=generator) * torch.randn(500, generator=generator).mul(9).exp()
    return torch.cat([x, torch.tensor(HOSTILE), torch.tensor(HOSTILE[::-1])]).to(dtype)


def test_parts_have_the_bits_of_a_difference_and_a_cast():
    x = values(0, torch.float32)
    with Operators() as operators:
        high, low = parts(x, torch.bfloat16)
    assert torch.float32 not in [row.dtype for row in operators.made]
    torch.testing.assert_close(low, (x - high).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert parts(x, torch.float32)[0] is x
