"""The model as Megatron sees it: one stage of blocks. Parameter names are the native names, with global layer ids."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron_dsv41.backends.megatron import cpu
from megatron_dsv41.backends.megatron.aux_loss import AuxLoss
from megatron_dsv41.backends.megatron.config import DSV41TransformerConfig
from megatron_dsv41.backends.megatron.engram_tables import OwnedTable
from megatron_dsv41.backends.megatron.layer_specs import layer_specs, shadow_specs
from megatron_dsv41.backends.megatron.layout import Layout
from megatron_dsv41.backends.megatron.pipeline import Boundaries
from megatron_dsv41.backends.megatron.primitives import MegatronPrimitives
from megatron_dsv41.backends.megatron.recompute import run_kept
from megatron_dsv41.backends.megatron.state_dict import sharded_model
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.block import Aux
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.modules.hyper_connection import open_streams
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import make_batch
from megatron_dsv41.ops.csa2.quality import QUALITY
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.parallel.boundary import BoundaryCodec
from megatron_dsv41.parallel.engram_rows import FetchedRows
from megatron_dsv41.parallel.payload import Crossing


class DSV41Model(LanguageModule):
    """A contiguous run of layers, with the embedding on the first stage and norm and head on the last.

    forward: token ids int64 [b, s], their documents, labels int64 [b, s], of whole sequences -> fp32 losses of this
    rank's context shard [b, s / cp] on the last stage, the packed boundary tensor on others. What training forwards
    report adds up in `expert_load` [layers, 2, E] and `layer_sums` [layers, 7] (balance and index loss, and
    `selection_quality`) until a step ends.
    """

    expert_load: Tensor
    layer_sums: Tensor

    def __init__(
        self,
        config: DSV41TransformerConfig,
        token_map: Tensor,
        stage: int,
        boundaries: Boundaries,
        pg_collection: ProcessGroupCollection,
        *,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config, pg_collection=pg_collection)
        assert config.architecture is not None
        model = self.architecture = config.architecture
        self.number, self.stage, self.vp_stage = stage, boundaries.stages[stage], vp_stage
        self.boundaries = boundaries
        self.before, self.after = boundaries.before(stage), boundaries.after(stage)
        self.pre_process, self.post_process = stage == 0, stage == len(boundaries.stages) - 1
        self.share_embeddings_and_output_weights = False
        self.recompute = config.recompute_kind
        self.layout = Layout.of(pg_collection, config.sequence_parallel)
        self.ops = Ops(config.ops)
        self.primitives = MegatronPrimitives(model, self.ops, self.layout, config, pg_collection)
        self.engram_hash = EngramHash(model, token_map.to(torch.cuda.current_device()), self.ops["engram.hash"])
        self.hashed = tuple(layer for layer in model.engram_layer_ids if layer in self.stage)
        self.received: Tensor | None = None
        self.engram_tables: tuple[OwnedTable, ...] = ()  # rows that this rank owns, of whatever layers
        if self.pre_process:
            with _drawn_from(config.seed, 0):
                self.embed = self.primitives.embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict()
        parts: dict[str, Any] = {"phase": config.phase, "primitives": self.primitives, "ops": self.ops}
        self.shadows = nn.ModuleDict()
        for layer, spec in shadow_specs(model, self.before).items():
            with _drawn_from(config.seed, 1 + layer):  # overwritten with the owner's weight
                shadow: Any = build_module(spec, config=model, **parts)
                self.shadows[str(layer)] = shadow
        for layer, spec in layer_specs(model, self.stage, self.after).items():
            with _drawn_from(config.seed, 1 + layer):
                block: Any = build_module(spec, config=model, **parts)
                self.layers[str(layer)] = block
        if self.post_process:
            with _drawn_from(config.seed, 1 + model.num_hidden_layers):
                self.norm = self.primitives.norm("norm", model.hidden_size, model.rms_norm_eps)
                self.head = self.primitives.head(model.hidden_size, model.vocab_size)
        for name, shape in (("expert_load", (2, model.n_routed_experts)), ("layer_sums", (2 + len(QUALITY),))):
            self.register_buffer(name, torch.zeros(len(self.stage), *shape), persistent=False)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Megatron's schedules hand over what the previous stage sent, right before each forward."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @cpu.bypass()
    def forward(
        self,
        input_ids_BS: Tensor,
        documents: Documents,
        labels_BS: Tensor,
        *,
        engram_rows: Mapping[int, FetchedRows] | None = None,
        replay_start_T: Tensor | None = None,
        index_scale: float = 1.0,
        probes: int = 0,
    ) -> Tensor:
        """See class, and `make_batch` for the rest. engram_rows: where tables have owners."""
        step = {"replay_start_T": replay_start_T, "index_scale": index_scale, "probes": probes}
        batch = self._batch(input_ids_BS, documents, engram_rows, **step)
        if self.before is None:
            streams_SBND, pre_mix_SBN = self._open(self.layout.context_slice(input_ids_BS))
            state = SharedState()
        else:
            received, self.received = self.received, None
            assert received is not None, "a later stage runs after its input has arrived"
            if received.requires_grad:
                received.register_post_accumulate_grad_hook(_forget_value)
            streams_SBND, pre_mix_SBN, state = self._codec(self.before).unpack(received)
            for shadow in self.shadows.values():
                state = shadow(state, batch)
        if self.layers:
            kept = self.recompute != "full"
            values = (streams_SBND, pre_mix_SBN, state, batch)
            with self.primitives.forward_pass():
                streams_SBND, pre_mix_SBN, state, aux = run_kept(kept, self._run_layers, *values)
            streams_SBND = self._account(streams_SBND, aux)
        if self.after is not None:
            return self._codec(self.after).pack(streams_SBND, pre_mix_SBN, state)
        hidden_SBD = self.norm(self.ops["mhc.collapse"](streams_SBND, pre_mix_SBN))
        hidden_SBD = self.primitives.fan_out(self.primitives.enter_site(hidden_SBD))
        labels_SB = self.layout.context_slice(labels_BS).transpose(0, 1)
        losses_T = self.head(hidden_SBD.flatten(0, 1), labels_SB.flatten())
        return losses_T.view(labels_SB.shape).transpose(0, 1)

    def _codec(self, crossing: Crossing) -> BoundaryCodec:
        return self.boundaries.codec(crossing, self.layout.tp.group, self.layout.cp.group)

    def _batch(
        self, input_ids_BS: Tensor, documents: Documents, fetched: Mapping[int, FetchedRows] | None, **step: Any
    ) -> Batch:
        layers = self.hashed if fetched is None else ()
        hashing = functools.partial(self.engram_hash, layers=layers)
        batch = make_batch(self.architecture, hashing, input_ids_BS, documents, shard=self.layout.shard, **step)
        # Engram writes between sites, where a rank keeps only its tokens.
        own = functools.partial(self.layout.stream_slice, batch_size=input_ids_BS.shape[0])
        rows = fetched or {layer: own(ids) for layer, ids in batch.engram_rows.items()}
        return dataclasses.replace(batch, engram_rows=rows, gate_open_T=own(batch.gate_open_T))

    def _open(self, input_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        embedded_SBD = self.primitives.leave_site(self.embed(input_ids_BS).transpose(0, 1).contiguous())
        return open_streams(embedded_SBD, self.architecture.hc_mult)

    def _run_layers(
        self, streams_SBND: Tensor, pre_mix_SBN: Tensor, state: SharedState, batch: Batch
    ) -> tuple[Tensor, Tensor, SharedState, Aux]:
        layer_aux, kept = [], self.recompute != "block"
        for block in self.layers.values():
            values = (streams_SBND, pre_mix_SBN, state, batch)
            streams_SBND, pre_mix_SBN, state, aux = run_kept(kept, block, *values)
            layer_aux.append(aux)
        return streams_SBND, pre_mix_SBN, state, Aux.stack(layer_aux)

    def _account(self, streams_SBND: Tensor, aux: Aux) -> Tensor:
        """Let the auxiliary losses of this stage take part in its backward, and add up what layers report."""
        if not (self.training and torch.is_grad_enabled()):
            return streams_SBND
        self.expert_load += aux.expert_load.detach()
        losses_L2 = torch.stack([aux.balance_loss, aux.index_loss], dim=1).detach()
        self.layer_sums += torch.cat([losses_L2, aux.index_quality], dim=1)
        loss = aux.loss.sum()
        return AuxLoss.apply(streams_SBND, loss) if loss.requires_grad else streams_SBND

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Native names with their global shapes and this rank's place in them."""
        dtype = getattr(torch, self.architecture.dtype)
        owned = {table.name: table.entry(prefix + table.name, dtype) for table in self.engram_tables}
        return sharded_model(self, prefix, self.pg_collection, self.layout) | owned

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Owned rows too: what `sharded_state_dict` described."""
        rest = dict(state_dict)
        for table in self.engram_tables:
            table.load(rest.pop(table.name))
        return super().load_state_dict(rest, strict, assign)


def _forget_value(received: Tensor) -> None:
    """Let go of a received boundary when its gradient is complete; schedules name the tensor until the next arrives.

    Views of it that are still read keep the storage.
    """
    received.data = received.new_empty(0)


@contextlib.contextmanager
def _drawn_from(seed: int, place: int) -> Iterator[None]:
    """Initial weights depend on the seed and their place in the model alone, so that every layout starts equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + place)
        yield
