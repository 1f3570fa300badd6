"""Which update every parameter gets: one table over native names (SPEC 17), checked to cover each exactly once."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import math
import re
from collections.abc import Callable, Mapping

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase

Shape = tuple[int, ...]
ENGRAM_TABLE = "engram.embed.weight"


class Algorithm(enum.StrEnum):
    """The three update rules."""

    MUON = "muon"
    SINKHORN = "sinkhorn"
    ADAMW = "adamw"


class Kind(enum.StrEnum):
    """What a parameter is. Decides the update and whether weight decay applies."""

    MATRIX = "matrix"  # Muon, decayed
    TABLE = "table"  # embedding, head, Engram: Sinkhorn, not decayed
    GAIN = "gain"  # RMSNorm weights: AdamW, decayed
    OFFSET = "offset"  # biases, scales, sinks: AdamW, not decayed


@dataclasses.dataclass(frozen=True)
class Row:
    """One role (a native name without `layers.N.`): its kind, and how many logical matrices the tensor holds."""

    role: str
    kind: Kind
    matrices: Callable[[DSV41Config, Optimizer], int] = lambda config, settings: 1


_M, _T, _G, _O = Kind.MATRIX, Kind.TABLE, Kind.GAIN, Kind.OFFSET

TABLE: tuple[Row, ...] = (
    Row("embed.weight", _T),
    Row("head.weight", _T),
    Row("norm.weight", _G),
    Row("attn_norm.weight", _G),
    Row("ffn_norm.weight", _G),
    *(
        Row(f"{site}_hc.{part}", kind)
        for site in ("attn", "ffn")
        for part, kind in (("fn", _M), ("base", _O), ("scale", _O))
    ),
    Row("attn.wq_a.weight", _M),
    Row("attn.q_norm.weight", _G),
    Row("attn.wq_b.weight", _M, lambda c, s: c.num_attention_heads if s.query_heads else 1),
    Row("attn.wkv.weight", _M),
    Row("attn.kv_norm.weight", _G),
    Row("attn.wo_a.weight", _M, lambda c, s: c.o_groups if s.output_groups else 1),
    Row("attn.wo_b.weight", _M),
    Row("attn.attn_sink", _O),
    Row("attn.compressor.wkv.weight", _M),
    Row("attn.compressor.wgate.weight", _M),
    Row("attn.compressor.norm.weight", _G),
    Row("attn.indexer.wk.weight", _M),
    Row("attn.indexer.k_norm.weight", _G),
    Row("attn.indexer.wq_b.weight", _M, lambda c, s: c.index_n_heads if s.index_query_heads else 1),
    Row("attn.indexer.weights_proj.weight", _M),
    Row("ffn.gate.weight", _M),
    Row("ffn.experts.w13", _M, lambda c, s: 2 * c.n_routed_experts),  # gate and up of each expert apart
    Row("ffn.experts.w2", _M, lambda c, s: c.n_routed_experts),
    *(Row(f"ffn.shared_experts.{name}.weight", _M) for name in ("w1", "w2", "w3")),
    Row(ENGRAM_TABLE, _T),
    Row("engram.wkv.weight", _M, lambda c, s: c.hc_mult + 1 if s.engram_projections else 1),
    Row("engram.q_weight", _G),
    Row("engram.k_weight", _G),
)
ROLES = {row.role: row for row in TABLE}


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """All parameters of one role.

    decay: weight decay coefficient. lr: multiple of the run's learning rate. matrices: how many logical matrices one
    whole tensor holds, along its leading axes. frozen: no update at all. shapes: native name -> whole shape.
    """

    role: str
    algorithm: Algorithm
    decay: float
    lr: float
    matrices: int
    frozen: bool
    shapes: Mapping[str, Shape]

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def matrix(self) -> Shape:
        """Shape of one logical matrix of the first tensor; of a vector its own."""
        shape = next(iter(self.shapes.values()))
        return (math.prod(shape[:-1]) // self.matrices, shape[-1]) if len(shape) > 1 else shape

    def state_bytes(self, settings: Optimizer, low_precision: bool) -> int:
        """Bytes of optimizer state per parameter: moments, and an fp32 copy of a `low_precision` weight."""
        momentum = 2 if settings.momentum_dtype == "bfloat16" else 4
        return (8 if self.algorithm is Algorithm.ADAMW else momentum) + (4 if low_precision else 0)


def role_of(name: str) -> str:
    """The role of a native name."""
    return re.sub(r"^layers\.\d+\.", "", name)


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this native name."""
    return _row(name).kind in (Kind.MATRIX, Kind.GAIN)


def is_frozen(name: str, phase: Phase, settings: Optimizer) -> bool:
    """No update and no decay: named by `optimizer.frozen`, or an indexer that no loss trains.

    Without this, decoupled weight decay would shrink what gets no gradient.
    """
    untrained_indexer = ".indexer." in name and phase.index_loss == "off"
    return untrained_indexer or any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.frozen)


def group_parameters(
    shapes: Mapping[str, Shape], config: DSV41Config, phase: Phase, settings: Optimizer
) -> tuple[ParameterGroup, ...]:
    """Groups of the parameters with these native names and whole shapes, in the order of the table.

    ValueError listing the names that no row covers, a frozen pattern that matches nothing, a tensor whose rows its
    logical matrices do not divide.
    """
    uncovered = [name for name in shapes if role_of(name) not in ROLES]
    if uncovered:
        raise ValueError(
            f"{len(uncovered)} parameters have no row in the optimizer's table: {', '.join(sorted(uncovered)[:10])}"
        )
    for pattern in settings.frozen:
        if not fnmatch.filter(shapes, pattern):
            raise ValueError(f"optimizer.frozen {pattern!r} matches no parameter; names look like {next(iter(shapes))}")
    groups = []
    for row in TABLE:
        names = [name for name in shapes if role_of(name) == row.role]
        for frozen in (False, True):
            chosen = {name: shapes[name] for name in names if is_frozen(name, phase, settings) is frozen}
            if chosen:
                groups.append(_group(row, chosen, frozen, config, settings))
    return tuple(groups)


def _group(
    row: Row, shapes: Mapping[str, Shape], frozen: bool, config: DSV41Config, settings: Optimizer
) -> ParameterGroup:
    algorithm = _algorithm(row, settings)
    matrices = row.matrices(config, settings) if algorithm is Algorithm.MUON else 1
    for name, shape in shapes.items():
        if math.prod(shape[:-1]) % matrices:
            raise ValueError(f"{name} {list(shape)} cannot be cut into {matrices} matrices")
    scaled = row.role == ENGRAM_TABLE or (row.role == "engram.wkv.weight" and settings.engram_lr_projections)
    return ParameterGroup(
        role=row.role,
        algorithm=algorithm,
        decay=settings.weight_decay if row.kind in (Kind.MATRIX, Kind.GAIN) else 0.0,
        lr=settings.engram_lr if scaled and settings.name != "adamw" else 1.0,
        matrices=matrices,
        frozen=frozen,
        shapes=shapes,
    )


def _algorithm(row: Row, settings: Optimizer) -> Algorithm:
    if settings.name == "adamw" or row.kind in (Kind.GAIN, Kind.OFFSET):
        return Algorithm.ADAMW
    if row.kind is Kind.TABLE:
        return Algorithm.SINKHORN if settings.name == "published" else Algorithm.ADAMW
    if row.role.endswith("_hc.fn"):
        return Algorithm(settings.mhc)
    return Algorithm(settings.router) if row.role == "ffn.gate.weight" else Algorithm.MUON


def _row(name: str) -> Row:
    row = ROLES.get(role_of(name))
    if row is None:
        raise ValueError(f"{name} has no row in the optimizer's table")
    return row
