"""The model as Megatron sees it: one stage of blocks. Parameter names are the native names, with global layer ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_dsv41.backends.megatron.aux_loss import AuxLoss
from megatron_dsv41.backends.megatron.config import DSV41TransformerConfig
from megatron_dsv41.backends.megatron.primitives import MegatronPrimitives
from megatron_dsv41.backends.megatron.state_dict import sharded_model
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.modules.block import Aux, Block
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.modules.hyper_connection import open_streams
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import make_batch
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.ops.registry import Ops


class DSV41Model(LanguageModule):
    """A contiguous run of layers, with the embedding on the first stage and norm and head on the last.

    forward: token ids int64 [b, s], their documents, labels int64 [b, s] -> fp32 losses [b, s] on the last stage, the
    packed boundary tensor on others. Expert loads of training forwards add up in `expert_load` [layers, 2, E] until the
    router biases are updated.
    """

    expert_load: Tensor

    def __init__(
        self,
        config: DSV41TransformerConfig,
        token_map: Tensor,
        layers: Sequence[int],
        pg_collection: ProcessGroupCollection,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config, pg_collection=pg_collection)
        assert config.architecture is not None
        model = self.architecture = config.architecture
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = False
        self.recompute_blocks = config.recompute_blocks
        self.ops = Ops(config.ops)
        self.primitives = MegatronPrimitives(model, self.ops)
        self.engram_hash = EngramHash(model, token_map)
        self.received: Tensor | None = None
        plans = plan_layers(model)
        if pre_process:
            with _drawn_from(config.seed, 0):
                self.embed = self.primitives.embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict()
        for layer in layers:
            with _drawn_from(config.seed, 1 + layer):
                self.layers[str(layer)] = Block(
                    model, plans[layer], config.phase, self.primitives, self.ops, live_at(plans, layer + 1)
                )
        if post_process:
            with _drawn_from(config.seed, 1 + model.num_hidden_layers):
                self.norm = self.primitives.norm("norm", model.hidden_size, model.rms_norm_eps)
                self.head = self.primitives.linear("head", model.hidden_size, model.vocab_size, fp32=True)
        load = torch.zeros(len(layers), 2, model.n_routed_experts, dtype=torch.float32)
        self.register_buffer("expert_load", load, persistent=False)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Megatron's schedules hand over what the previous stage sent, right before each forward."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, input_ids_BS: Tensor, documents: Documents, labels_BS: Tensor) -> Tensor:
        """See class."""
        batch = make_batch(self.architecture, self.engram_hash, input_ids_BS, documents)
        embedded_SBD = self.embed(input_ids_BS).transpose(0, 1)
        streams_SBND, pre_mix_SBN = open_streams(embedded_SBD, self.architecture.hc_mult)
        state, layer_aux = SharedState(), []
        for block in self.layers.values():
            streams_SBND, pre_mix_SBN, state, aux = block(streams_SBND, pre_mix_SBN, state, batch)
            layer_aux.append(aux)
        streams_SBND = self._account(streams_SBND, Aux.stack(layer_aux))
        hidden_SBD = self.norm(self.ops["mhc.collapse"](streams_SBND, pre_mix_SBN))
        return self.primitives.token_losses(self.head(hidden_SBD), labels_BS)

    def _account(self, streams_SBND: Tensor, aux: Aux) -> Tensor:
        """Let the auxiliary losses of this stage take part in its backward, and count its routing."""
        if not (self.training and torch.is_grad_enabled()):
            return streams_SBND
        self.expert_load += aux.expert_load.detach()
        loss = aux.loss.sum()
        return AuxLoss.apply(streams_SBND, loss) if loss.requires_grad else streams_SBND

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Native names with their global shapes and this rank's place in them."""
        return sharded_model(self, prefix, self.pg_collection)


@contextlib.contextmanager
def _drawn_from(seed: int, place: int) -> Iterator[None]:
    """Initial weights depend on the seed and their place in the model alone, so that every layout starts equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + place)
        yield
