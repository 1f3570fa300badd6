"""The switches of one phase of training: what the same model computes differently from phase to phase."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Behaviour of the forward pass that is not architecture. The defaults are the released inference function."""

    window_kv_fp8: bool = True  # fake-quantize window KV, SPEC 10.1
    main_kv_fp4: bool = True  # fake-quantize compressed KV, SPEC 10.3
    index_mxfp4: bool = True  # fake-quantize index queries and keys, SPEC 10.2
    quantized_weights: bool = False  # compute with weights as a quantized checkpoint holds them, SPEC 10
    hsi: bool = True  # Reindex layers select inside the candidate pool, SPEC 8.6
    yarn: bool = True  # frequency scaling in compressed layers, SPEC 8.2
    index_loss: Literal["off", "dense", "sparse"] = "off"  # indexer objective, SPEC 9
    index_loss_weight: float = 1.0
    index_loss_ramp: int = 0  # steps from the phase's start over which the weight rises linearly to its value
    replay: float = 0.0  # share of documents with a decoder replay, SPEC 16
    balance_loss_weight: float = 1e-4  # sequence-wise balance loss, SPEC 11.2
    router_bias_speed: float = 1e-3  # aux-free bias step per optimizer step, SPEC 11.2

    def __post_init__(self) -> None:
        if self.index_loss not in ("off", "dense", "sparse"):
            raise ValueError(f"phase.index_loss must be off, dense or sparse, got {self.index_loss!r}")
        for key in ("index_loss_weight", "index_loss_ramp", "replay", "balance_loss_weight", "router_bias_speed"):
            if getattr(self, key) < 0:
                raise ValueError(f"phase.{key} must not be negative, got {getattr(self, key)}")

        if self.replay > 1:
            raise ValueError(f"phase.replay is a share of documents, at most 1, got {self.replay}")

    def index_scale(self, step: int) -> float:
        """Factor of `index_loss_weight` in the phase's step number `step`, counted from 1."""
        return min(1.0, step / self.index_loss_ramp) if self.index_loss_ramp else 1.0
