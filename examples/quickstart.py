"""Twenty steps of a tiny V4.1 in one process on the CPU: the model without any framework, in under a minute.

    python examples/quickstart.py

Learns to copy: the second half of every sequence repeats the first, so the loss of the second half can fall only if
attention, selection and Engram carry information across the sequence.
"""

from __future__ import annotations

import torch

from megatron_dsv41 import Phase, Transformer, plan_layers, presets
from megatron_dsv41.modules.transformer import next_token_loss

STEPS, ROWS, HALF = 20, 4, 32


def main() -> None:
    """Build, train, print."""
    torch.manual_seed(0)
    config = presets.tiny()
    for plan in plan_layers(config):
        print(
            f"layer {plan.layer}: {plan.kind.value:<8} ratio {plan.ratio}  engram {'yes' if plan.has_engram else 'no'}"
        )
    token_map = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = Transformer(config, token_map, phase=Phase(index_loss="sparse"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(1, STEPS + 1):
        ids_BS = copies(config.vocab_size // 32)
        output = model(ids_BS[:, :-1])
        loss = next_token_loss(output.logits, ids_BS[:, 1:], torch.ones_like(ids_BS[:, 1:], dtype=torch.float32))
        optimizer.zero_grad()
        (loss + output.aux.balance_loss.sum() + output.aux.index_loss.sum()).backward()
        optimizer.step()
        print(f"step {step:>2}  loss {loss.item():.3f}")


def copies(symbols: int) -> torch.Tensor:
    """Rows whose second half repeats the first, int64 [ROWS, 2 * HALF]."""
    half = torch.randint(4, symbols, (ROWS, HALF))
    return torch.cat([half, half], dim=1)


if __name__ == "__main__":
    main()
