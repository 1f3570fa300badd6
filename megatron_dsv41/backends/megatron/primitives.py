"""The model's parts by role, for Megatron: which weight is split over which group, and how it enters the optimizer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.modules.primitives import TorchPrimitives


class MegatronPrimitives(TorchPrimitives):
    """Data-parallel parts: whole weights on every rank, in the dtypes that the definition asks for."""

    def token_losses(self, logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
        """Cross-entropy of every position, fp32 [b, s]."""
        labels_SB = labels_BS.transpose(0, 1)
        losses = F.cross_entropy(logits_SBV.flatten(0, 1), labels_SB.flatten(), reduction="none")
        return losses.view(labels_SB.shape).transpose(0, 1)
