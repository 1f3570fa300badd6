"""One forward and backward pass of a parity case in any layout, with outputs and gradients put together again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_dsv41.backends.megatron.layouts import check_layout, sequence_pieces
from megatron_dsv41.config import nearest
from megatron_dsv41.data.packing import Packed
from megatron_dsv41.modules.primitives import Linear
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.parallel.environment import missing_gpus
from megatron_dsv41.phase import Phase
from megatron_dsv41.run_config import Engram, Parallel, Recompute
from megatron_dsv41.testing.parity import ParityCase, Results

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "engram")
SWITCHES = ("sp", "recompute", "gradient_accumulation_fusion")  # recompute alone means block


@dataclasses.dataclass(frozen=True)
class ParityLayout:
    """A layout that needs no run file: the split, data-parallel ranks, and what is recomputed."""

    parallel: Parallel
    dp: int = 1
    recompute: Recompute = "none"

    @property
    def world_size(self) -> int:
        """Processes: the fewest that hold the dense and the expert split."""
        parallel = self.parallel
        dense = parallel.tp * parallel.cp * parallel.pp * self.dp
        return math.lcm(dense, parallel.ep * parallel.expert_tp * parallel.pp, parallel.engram or 1)


def parse_layout(text: str) -> ParityLayout:
    """From "tp=2,pp=2,sp,layout=Ettt|tttttL". ValueError for unknown keys and wrong values."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        known = {*SIZES, *SWITCHES, "layout", "dispatcher", "shadows"}
        if key not in known:
            raise ValueError(f"--layout {text!r}: {key!r} is not an axis{nearest(key, known)}")
        if key in SIZES and not value.isdigit():
            raise ValueError(f"--layout {text!r}: {key} needs a number, as in {key}=2")
        values[key] = int(value) if key in SIZES else (value if equals else True)
    dp, recompute = values.pop("dp", 1), values.pop("recompute", "none")
    recompute = "block" if recompute is True else recompute
    if recompute not in get_args(Recompute):
        raise ValueError(f"--layout {text!r}: recompute must be one of {', '.join(get_args(Recompute))}")
    return ParityLayout(Parallel(**values), dp, recompute)


def start_layout(folder: str | Path, text: str, ops: dict[str, str], device: str = "cpu") -> Results:
    """Start the processes of a layout on this machine and run a case on them, with device "cuda" on a GPU each.

    ValueError for an impossible layout, for missing GPUs, and for the CPU where there are GPUs: Megatron would use
    them.
    """
    from megatron_dsv41.backends.megatron.train import quiet
    from megatron_dsv41.testing.distributed import run_ranks

    layout = parse_layout(text)
    check_layout(ParityCase.load(folder).config, layout.parallel)
    size, gpus = layout.world_size, torch.cuda.device_count()
    if device == "cpu" and gpus:
        raise ValueError("--layout with --device cpu where there are GPUs: hide them with CUDA_VISIBLE_DEVICES=")
    if device == "cuda" and (missing := missing_gpus(size, gpus)):
        raise ValueError(f"--layout {text} {missing}")
    with quiet(False):  # reading results imports Megatron here, too
        results = run_ranks(run_layouts, size, folder, [text], ops, timeout=3600.0, device=device)
    return results[0][0]


def run_layouts(folder: str | Path, texts: list[str], ops: dict[str, str] | None = None) -> list[Results | None]:
    """On every rank of a started world: one case in several layouts; the results on rank 0, None elsewhere."""
    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.train import quiet

    found = []
    for text in texts:
        with quiet(False):
            found.append(run_layout(folder, text, ops or {}))
        launch.destroy_groups()
    return found


def run_layout(folder: str | Path, text: str, ops: dict[str, str], phase: Phase | None = None) -> Results | None:
    """On every rank of a started world: the results on rank 0, None elsewhere."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_dsv41.backends.megatron import launch

    layout, case = parse_layout(text), ParityCase.load(folder)
    launch.create_groups(layout.parallel)
    # The cases were recorded without auxiliary losses.
    phase = dataclasses.replace(phase or Phase(), balance_loss_weight=0.0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    job = LayoutJob(case, layout, phase, ops, groups)
    return job.run()


class LayoutJob:
    """One rank's part. Micro-batches are single rows, so that any layout can take them."""

    def __init__(self, case: ParityCase, layout: ParityLayout, phase: Phase, ops: dict[str, str], groups: Any):
        from megatron.core.distributed import DistributedDataParallelConfig

        from megatron_dsv41.backends.megatron import launch
        from megatron_dsv41.backends.megatron.aux_loss import AuxLoss
        from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder, DSV41ModelConfig
        from megatron_dsv41.backends.megatron.config import bare_transformer_config
        from megatron_dsv41.backends.megatron.engram_build import own_tables
        from megatron_dsv41.backends.megatron.initial import load_weights
        from megatron_dsv41.backends.megatron.layout import Layout
        from megatron_dsv41.backends.megatron.pipeline import Boundaries
        from megatron_dsv41.checkpoint.sources import ReleasedSource

        self.case, self.groups, parallel, self.device = case, groups, layout.parallel, launch.device()
        check_layout(case.config, parallel)
        self.layout = Layout.of(groups, parallel.sp)
        self.config = bare_transformer_config(case.config, phase, parallel, ops, layout.recompute)
        self.config.experimental_attention_variant_loss_scale_func = AuxLoss.set_scale
        self.boundaries = Boundaries.of(case.config, phase, parallel, 1, self._length(parallel))
        source = ReleasedSource(case.weights_folder, case.config)
        table = "float32" if case.config.dtype == "float32" else "bfloat16"
        self.engram = own_tables(self.config, case.token_map, self.boundaries, groups, table, Engram())
        model_config = DSV41ModelConfig(
            transformer=self.config,
            token_map=case.token_map,
            boundaries=self.boundaries,
            vocab_size=case.config.vocab_size,
            engram=self.engram,
            pre_wrap_hooks=[lambda stages: load_weights(stages, source)],
        )
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunks = DSV41ModelBuilder(model_config).build_distributed_models(groups, ddp)
        self.stages = [chunk.module for chunk in self.chunks]
        self.pieces: list[dict[str, Any]] = []  # what this rank saw, for rank 0
        self.touched: set[str] = set()
        self.rows = self._rows(parallel)

    def _rows(self, parallel: Parallel) -> list[tuple[int, Tensor, Packed]]:
        """(row number, ids, layout) of this data-parallel rank; rows that only fill up have number -1 and weight 0."""
        packed, ids_BS = self.case.pack(), self.case.input_ids
        num_rows = ids_BS.shape[0]
        per_rank = -(-num_rows // self.groups.dp.size())
        per_rank = -(-per_rank // parallel.pp) * parallel.pp if parallel.vpp > 1 else per_rank
        length = self._length(parallel)
        rows = []
        for index in range(per_rank):
            number = self.groups.dp.rank() * per_rank + index
            real = number < num_rows
            ids, layout = _row(ids_BS, packed, number if real else 0, length, real)
            rows.append((number if real else -1, ids.to(self.device), _moved(layout, self.device)))
        return rows

    def _length(self, parallel: Parallel) -> int:
        """Tokens of a row, filled up to what the layout can cut."""
        seq, pieces, halo = self.case.input_ids.shape[1], sequence_pieces(parallel), self.case.config.sliding_window - 1
        seq = max(seq, halo * parallel.cp) if parallel.cp > 1 else seq
        return -(-seq // pieces) * pieces

    def run(self) -> Results | None:
        """Forward, backward, and everything gathered on rank 0."""
        handles = list(self._watch())
        loss = self.step()
        for handle in handles:
            handle.remove()
        return self._gather(loss)

    def step(self) -> float:
        """Forward and backward of all micro-batches; this rank's part of the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_dsv41.backends.megatron.pipeline import communicator

        self.config.finalize_model_grads_func = self._finalize
        self.config.grad_scale_func = None
        length = self.rows[0][1].shape[1]
        several = self.groups.pp.size() > 1
        pipeline = {}
        if several:
            link = communicator(self.boundaries, self.groups.pp, self.config)
            pipeline = {"p2p_communicator": link, "pg_collection": self.groups}
        fetched: list[Any] = [None] * len(self.rows)
        if self.engram is not None:
            rows = self.engram.announce([(ids, packed.documents) for _, ids, packed in self.rows], training=True)
            self.engram.begin(rows)
            fetched = rows.batches
        feeds: list[Any] = [zip(self.rows, fetched, strict=True) for _ in self.chunks]
        reports = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(self.rows),
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
            **pipeline,
        )
        return sum(float(report["loss"]) for report in reports)

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        if self.engram is not None:
            self.engram.start_return()
        finalize_model_grads(*args, **kwargs)
        if self.engram is not None:
            self.engram.finish_return()

    def _forward(self, feed: Iterator[tuple[tuple[int, Tensor, Packed], Any]], chunk: Any) -> Any:
        (number, ids_BS, packed), rows = next(feed)
        self.row = number
        losses_BS = chunk(ids_BS, packed.documents, packed.labels_BS, engram_rows=rows)
        weight_BS = self.layout.context_slice(packed.weight_BS)
        # Megatron averages over micro-batches and data-parallel ranks.
        total = self.case.pack().weight_BS.sum()
        copies = len(self.rows) * self.groups.dp.size()

        def loss(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            part = (losses_BS * weight_BS).sum() / total
            return part * copies, {"loss": part.detach()}

        return losses_BS, loss

    def _watch(self) -> Iterator[Any]:
        """Hooks that note streams entering layers, logits, and parameters that receive a gradient."""
        for stage in self.stages:
            for layer, block in stage.layers.items():
                yield block.register_forward_pre_hook(
                    lambda module, inputs, layer=int(layer): self._note("streams", layer, inputs[0][:, 0])
                )
            if stage.post_process:
                # Training goes from hidden state to losses; the same weights make logits here.
                yield stage.head.register_forward_pre_hook(
                    lambda head, inputs: self._note("logits", 0, Linear.forward(head, inputs[0]))
                )
            for name, parameter in stage.named_parameters():
                if not parameter.requires_grad:
                    continue
                yield parameter.register_hook(lambda gradient, name=name: self.touched.add(name))

    def _note(self, kind: str, layer: int, value: Tensor) -> None:
        if self.row < 0 or (kind == "streams" and self.row != 0):
            return
        piece = {"kind": kind, "layer": layer, "row": self.row, "value": value.detach().cpu().clone()}
        key = [piece[k] for k in ("kind", "layer", "row")]
        if key not in [[p[k] for k in ("kind", "layer", "row")] for p in self.pieces]:  # recomputation passes twice
            self.pieces.append(piece | {"cp": self.layout.cp.rank, "tp": self.layout.tp.rank})

    def _gather(self, loss: float) -> Results | None:
        from megatron_dsv41.backends.megatron.layout import cuts_of

        gradients = [
            (name, [(c.dim, getattr(self.layout, c.axis).rank, getattr(self.layout, c.axis).size) for c in cuts_of(p)],
             p.main_grad.cpu().clone())
            for stage in self.stages
            for name, p in stage.named_parameters()
            if name in self.touched
        ]  # fmt: skip
        last = self.stages[-1].post_process and self.layout.tp.rank == 0
        tables = [
            (table.name, table.rows, table.first, table.master.grad.to_dense().cpu())
            for table in self.stages[0].engram_tables
        ]
        own = {"loss": loss if last else 0.0, "pieces": self.pieces, "gradients": gradients, "tables": tables}
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        first = torch.distributed.get_rank() == 0
        torch.distributed.gather_object(own, everyone if first else None, dst=0)
        return self._assemble(everyone) if first else None

    def _assemble(self, everyone: list[dict[str, Any]]) -> Results:
        rows, seq = self.case.input_ids.shape
        pieces = [piece for rank in everyone for piece in rank["pieces"]]
        logits = [
            _joined([p for p in pieces if p["kind"] == "logits" and p["row"] == row], ("cp", "tp"), (0, -1))[:seq]
            for row in range(rows)
        ]
        order = ("cp", "tp") if self.layout.sequence else ("cp",)
        streams = {
            layer: _joined(
                [p for p in pieces if p["kind"] == "streams" and p["layer"] == layer], order, (0,) * len(order)
            )[:seq]
            for layer in sorted({p["layer"] for p in pieces if p["kind"] == "streams"})
        }
        found = [entry for rank in everyone for entry in rank["gradients"]]
        loss = sum(rank["loss"] for rank in everyone)
        gradients = _whole_gradients(found)
        for name, size, first, part in (table for rank in everyone for table in rank["tables"]):
            whole = gradients.setdefault(name, part.new_zeros(size, part.shape[1]))
            whole[first : first + len(part)] = part
        return Results(loss, torch.stack(logits), streams, gradients)


def _row(ids_BS: Tensor, packed: Packed, row: int, length: int, real: bool) -> tuple[Tensor, Packed]:
    """One row, filled up to `length` with dead tokens; all of it dead where it is not `real`."""
    seq = ids_BS.shape[1]
    documents = packed.documents
    here = slice(row * seq, (row + 1) * seq)
    fill = torch.arange(length - seq) + seq
    start = torch.cat([documents.start_T[here] - row * seq, torch.full_like(fill, seq)])
    position = torch.cat([documents.position_T[here], fill - seq])
    alive = torch.cat([documents.alive_T[here] & real, torch.zeros_like(fill, dtype=torch.bool)])
    image = torch.cat([documents.image_T[here], torch.zeros_like(fill, dtype=torch.bool)])

    def filled(x_BS: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_BS[row : row + 1], (0, length - seq))

    weight = filled(packed.weight_BS) * real
    return filled(ids_BS), Packed(Documents(start, position, alive, image), filled(packed.labels_BS), weight)


def _moved(packed: Packed, device: torch.device) -> Packed:
    tensors = {field.name: getattr(packed.documents, field.name) for field in dataclasses.fields(Documents)}
    documents = Documents(**{name: tensor.to(device) for name, tensor in tensors.items()})
    return Packed(documents, packed.labels_BS.to(device), packed.weight_BS.to(device))


def _joined(pieces: list[dict[str, Any]], axes: tuple[str, ...], dims: tuple[int, ...]) -> Tensor:
    """Join pieces along one dimension per axis; ranks that hold the same piece count once."""
    if not axes:
        return pieces[0]["value"]
    groups: Mapping[int, list[dict[str, Any]]] = {}
    for piece in pieces:
        groups.setdefault(piece[axes[0]], []).append(piece)  # type: ignore[attr-defined]
    return torch.cat([_joined(groups[rank], axes[1:], dims[1:]) for rank in sorted(groups)], dim=dims[0])


def _whole_gradients(entries: list[tuple[str, list[tuple[int, int, int]], Tensor]]) -> dict[str, Tensor]:
    """Whole gradients from the parts of all ranks; equal parts of replicas overwrite each other."""
    whole: dict[str, Tensor] = {}
    for name, cuts, part in entries:
        if name not in whole:
            shape = list(part.shape)
            for dim, _, size in cuts:
                shape[dim] *= size
            whole[name] = part.new_zeros(shape)
        place = whole[name]
        for dim, rank, size in cuts:
            place = place.chunk(size, dim)[rank]
        place.copy_(part)
    return whole
