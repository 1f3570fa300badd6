"""Head and cross-entropy: the definition (SPEC 6). Logits are fp32 whatever the dtype of hidden state and weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


@dataclasses.dataclass(frozen=True)
class VocabularyPart:
    """Which rows of the vocabulary a weight holds, and how values of all parts are put together.

    first: id of the weight's first row. maximum, total: elementwise over the parts; `total` hands its gradient on
    unchanged, because every part computes the same loss. The whole vocabulary needs neither.
    """

    first: int = 0
    maximum: Callable[[Tensor], Tensor] = lambda x: x
    total: Callable[[Tensor], Tensor] = lambda x: x


WHOLE = VocabularyPart()


def losses(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, part: VocabularyPart = WHOLE) -> Tensor:
    """-log softmax(x W^T)[label] of every token, fp32 [T].

    x [T, d]; weight [V, d], the part's rows; labels int64 [T], ids of the whole vocabulary.
    """
    logits_TV = F.linear(wide(x_TD), wide(weight_VD))
    top_T = part.maximum(logits_TV.detach().amax(-1))
    sum_T = part.total((logits_TV - top_T[:, None]).exp().sum(-1))
    local_T = labels_T - part.first
    inside_T = (local_T >= 0) & (local_T < weight_VD.shape[0])
    own_T = logits_TV.gather(1, local_T.where(inside_T, 0)[:, None])[:, 0]
    return top_T + sum_T.log() - part.total(torch.where(inside_T, own_T, 0.0))
