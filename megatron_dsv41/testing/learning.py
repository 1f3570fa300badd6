"""Loss curves of a small model on one device, to compare kernels and precisions over some hundred steps."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.modules.transformer import Transformer, next_token_loss

LENGTH = 256
WARMUP = 20  # steps until the learning rate is reached


def loss_curve(model: Transformer, steps: int, *, rows: int = 8, lr: float = 1e-3) -> list[float]:
    """Loss before every update: AdamW on fp32 copies of the weights, tokens from `progressions`."""
    vocabulary, device = model.config.vocab_size, next(model.parameters()).device
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        ids_BS = progressions(step, vocabulary, rows).to(device)
        output = model(ids_BS)
        weight_BS = torch.ones_like(ids_BS).index_fill(1, torch.tensor([LENGTH - 1], device=device), 0)
        loss = next_token_loss(output.logits, ids_BS.roll(-1, 1), weight_BS)
        (loss + output.aux.loss.sum()).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def progressions(step: int, vocabulary: int, rows: int) -> Tensor:
    """Tokens int64 [rows, LENGTH]: runs of arithmetic progressions of random length, start and stride, so that there is
    something to learn for long. Ids from 4 on; the same on every machine."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.rand(rows, LENGTH, generator=generator) < 1 / 24
    starts[:, 0] = True
    run = starts.cumsum(1) - 1
    first = torch.randint(4, vocabulary, (rows, LENGTH), generator=generator).gather(1, run)
    stride = torch.randint(1, 17, (rows, LENGTH), generator=generator).gather(1, run)
    begin = torch.where(starts, torch.arange(LENGTH), 0).cummax(1).values
    return (first + stride * (torch.arange(LENGTH) - begin) - 4) % (vocabulary - 4) + 4
