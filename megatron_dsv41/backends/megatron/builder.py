"""Megatron's official seam for models: a ModelConfig that names its ModelBuilder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.utils import unwrap_model
from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks
from megatron.training.models.dist_utils import unimodal_build_distributed_models

from megatron_dsv41.backends.megatron.config import DSV41TransformerConfig
from megatron_dsv41.backends.megatron.engram import EngramExchange
from megatron_dsv41.backends.megatron.model import DSV41Model
from megatron_dsv41.backends.megatron.pipeline import Boundaries
from megatron_dsv41.backends.megatron.shadows import follow_owners


@dataclasses.dataclass(kw_only=True)
class DSV41ModelConfig(ModelConfig):
    """What the builder needs. The trainer reads Megatron's own fields off it, so those are passed through."""

    builder: ClassVar[str] = "megatron_dsv41.backends.megatron.builder.DSV41ModelBuilder"
    transformer: DSV41TransformerConfig
    token_map: torch.Tensor
    boundaries: Boundaries
    vocab_size: int
    engram: EngramExchange | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "transformer":
            raise AttributeError(name)
        return getattr(self.transformer, name)


class DSV41ModelBuilder(ModelBuilder[DSV41Model, DSV41ModelConfig]):
    """Builds the stages of this rank and wraps them in Megatron's DDP."""

    _model_config: DSV41ModelConfig

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> DSV41Model:
        """The stage of this pipeline rank and virtual stage. What the stage holds follows from the layout."""
        model = self._model_config
        stage = (vp_stage or 0) * pg_collection.pp.size() + pg_collection.pp.rank()
        built = DSV41Model(
            model.transformer, model.token_map, stage, model.boundaries, pg_collection, vp_stage=vp_stage
        )
        if model.engram is not None and not vp_stage:
            built.engram_tables = tuple(model.engram.owned.values())
        return built

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = True,
        mixed_precision_wrapper: Callable[[Any, MegatronModule], MegatronModule] | None = None,
        model_type: ModelType = ModelType.encoder_or_decoder,
    ) -> list[Any]:
        """All stages of this rank. No precision wrapper is used: the model is built in its dtypes, and Megatron's
        Float16Module would round the parameters that stay fp32 (mHC, sinks, router biases)."""
        stages = unimodal_build_distributed_models(
            self.build_model,
            self._model_config.transformer,
            pg_collection,
            ddp_config,
            overlap_param_gather_with_optimizer_step,
            use_megatron_fsdp,
            use_torch_fsdp2,
            wrap_with_ddp,
            data_parallel_random_init,
            None,
            compose_hooks(self._model_config.pre_wrap_hooks),
            model_type,
        )
        follow_owners([unwrap_model(stage) for stage in stages], pg_collection.pp)
        return compose_hooks(self._model_config.post_wrap_hooks)(stages)
