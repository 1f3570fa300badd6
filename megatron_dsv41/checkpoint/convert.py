"""Released folder <-> native folder <-> model in memory, through the one table, streaming.

Import keeps three things beside the native tensors, so that export returns the same bytes: the original block scales
(several scales can hold the same values, and re-deriving them would change about one FP4 block in five), the
carried-through tensors, and a record of the source's files. Export uses a kept scale in every block whose values have
not changed and re-quantizes the others by the published rule (SPEC 19.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from torch import Tensor

from megatron_dsv41.checkpoint.distributed import DistributedSource, is_distributed
from megatron_dsv41.checkpoint.distributed_writer import DistributedWriter
from megatron_dsv41.checkpoint.export_plan import SHARD_BYTES, ExportPlan, ExportStorage, Origin, ShardPlan
from megatron_dsv41.checkpoint.inventory import check_native, refuse
from megatron_dsv41.checkpoint.jobs import ALONE, Job, Unit, free_target, run_job
from megatron_dsv41.checkpoint.lora import LoraAdapter, MergedSource
from megatron_dsv41.checkpoint.mapping import Binding, bind, is_carried
from megatron_dsv41.checkpoint.native_record import NATIVE, NativeRecord, is_native
from megatron_dsv41.checkpoint.pieces import (
    Effort,
    binding_pieces,
    copy_side_files,
    copy_units,
    num_elements,
    side_bytes,
    write_config,
    write_index,
)
from megatron_dsv41.checkpoint.safetensors_io import (
    SafetensorsFolder,
    ShardWriter,
    TensorSpec,
    shards_by_size,
    write_file,
)
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.checkpoint.sources import DictSource, NativeSource, ReleasedSource, StateSource
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES, num_bytes, stored_format
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.checkpoint.truncate import kept_shards, truncate
from megatron_dsv41.config import DSV41Config

DEFAULT_EFFORT = Effort()


def import_checkpoint(
    src: Path | str,
    dst: Path | str,
    *,
    config: DSV41Config | None = None,
    storage: Literal["config", "source"] = "config",
    hash_digest: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    layout: Layout | None = None,
    finite: bool = True,
    effort: Effort = DEFAULT_EFFORT,
    team: Team = ALONE,
) -> None:
    """Released folder -> native folder (new or empty). Collective over the team.

    storage "config": tensors decoded to the config's dtype, or the stored one where that is wider; nothing is rounded.
    "source": quantized tensors stay as they are stored, a third of the size. hash_digest: `EngramHash.digest` for the
    tokenizer of this checkpoint, kept and compared later. layers, experts: keep only the first ones (`truncate`).
    layout: write the native tensors as a distributed checkpoint, divided over the ranks of this layout. finite: NaN
    and infinity are errors. ValueError lists what does not fit; nothing is written then.
    """

    def plan() -> tuple[Job, int]:
        job, largest = _plan_import(Path(src), Path(dst), config, storage, hash_digest, layers, experts, layout, finite)
        return job, effort.threads(largest, team.local_size)

    job, workers = team.together(plan)
    run_job(job, workers=workers, progress=effort.progress, team=team)


def _plan_import(
    src: Path,
    dst: Path,
    config: DSV41Config | None,
    storage: Literal["config", "source"],
    hash_digest: str | None,
    layers: int | None,
    experts: int | None,
    layout: Layout | None,
    finite: bool,
) -> tuple[Job, int]:
    """The job, and the elements of its largest piece."""
    free_target(dst, [src])
    if layout and storage == "source":
        raise ValueError("a distributed checkpoint holds values to train on: storage must be 'config' with a layout")
    folder = SafetensorsFolder(src)
    config = config or DSV41Config.load(src)
    source = ReleasedSource(folder, config, finite=finite)
    cut = (layers, experts) != (None, None)
    kept = truncate(config, layers, experts) if cut else config
    origin = kept_shards(folder.shards(), kept) if cut else folder.shards()
    beside = [t.name for shard in origin for t in shard.tensors if t.name.endswith(".scale") or is_carried(t.name)]
    bindings = bind(kept)
    divided = DistributedWriter(source, bindings, layout) if layout else None
    if divided:
        specs, units, largest = list[TensorSpec](), list(divided.units()), divided.largest()
    else:
        specs, units, largest = _plan_shards(source, bindings, storage)
    for name in beside:
        specs.append(TensorSpec(name, folder.info(name).dtype, folder.info(name).shape))
        units += copy_units(folder, name, name, finite=finite)
    shards = shards_by_size(specs, SHARD_BYTES)

    def finish(work: Path) -> None:
        copy_side_files(src, work)
        write_config(work, kept, src)
        scales = frozenset(name for name in beside if not is_carried(name))
        record = NativeRecord(origin, None if cut else folder.index_text, scales, hash_digest)
        write_file(work / NATIVE, record.to_json())
        write_index(work, shards)
        if divided:
            divided.finish(work)

    job = Job(
        target=dst,
        writer=lambda work: ShardWriter(work, shards),
        units=units,
        finish=finish,
        identity=["import", source.identity(), storage, hash_digest, kept.to_hf(), layout and asdict(layout)],
        title="import",
        sources=(src,),
        extra_bytes=side_bytes(src) + (divided.num_bytes() if divided else 0),
    )
    return job, largest


def export_checkpoint(
    src: Path | str | StateSource,
    dst: Path | str,
    *,
    config: DSV41Config | None = None,
    storage: ExportStorage | None = None,
    like: Path | str | None = None,
    shards: ShardPlan | None = None,
    plain: Sequence[str] = (),
    merge: Path | str | None = None,
    beside: Sequence[Path] = (),
    finite: bool = True,
    effort: Effort = DEFAULT_EFFORT,
    team: Team = ALONE,
) -> None:
    """Native folder, or any `StateSource` with its config, -> released folder (new or empty). Collective over the team.

    storage: "source" as the checkpoint came in; "released" the release's quantized layout; "bf16" or "fp32" plain.
    Default: "source" where the origin is known, else by the config. like: a native or released folder that the model
    started from; scales, carried-through tensors, storage, shard split and side files come from it. A native `src` is
    its own `like`. shards: "source" the origin's split, "release" by role, or a number of bytes per file. plain:
    patterns of released names that stay bfloat16 in a quantized export. merge: folder of a LoRA adapter to be added
    (`lora`). beside: further files to lie in the folder. finite: NaN and infinity are errors.
    """

    def plan() -> tuple[Job, int]:
        job, largest = _plan_export(src, Path(dst), config, storage, like, shards, plain, merge, beside, finite)
        return job, effort.threads(largest, team.local_size)

    job, workers = team.together(plan)
    run_job(job, workers=workers, progress=effort.progress, team=team)


def _plan_export(
    src: Path | str | StateSource,
    dst: Path,
    config: DSV41Config | None,
    storage: ExportStorage | None,
    like: Path | str | None,
    shards: ShardPlan | None,
    plain: Sequence[str],
    merge: Path | str | None,
    beside: Sequence[Path],
    finite: bool,
) -> tuple[Job, int]:
    """The job, and the elements of its largest piece."""
    read = tuple(Path(path) for path in (src, like, merge) if isinstance(path, str | Path))
    free_target(dst, read)
    if isinstance(src, str | Path):
        like = like or src
        source = open_source(src, config, finite=finite)
        config = config or source.config
    else:
        source = src
    origin = Origin.load(like) if like is not None else None
    config = config or (origin.config if origin else None)
    if config is None:
        raise ValueError("export needs a config, or `like`: a folder that has one")
    refuse(str(dst), check_native({name: source.shape(name) for name in source.names()}, bind(config)))
    if merge is not None:
        source = MergedSource(source, LoraAdapter.load(merge), bind(config))
    plan = ExportPlan(source, config, origin, storage or ("source" if origin else None), plain, finite)
    units, largest = plan.units()
    files = plan.shards(shards)

    def finish(work: Path) -> None:
        if origin:
            copy_side_files(origin.folder.path, work)
        for path in beside:
            write_file(work / path.name, path.read_bytes())
        write_config(work, plan.config, origin.folder.path if origin else None)
        write_index(work, files, origin.index if origin and tuple(files) == origin.shards else None)

    job = Job(
        target=dst,
        writer=lambda work: ShardWriter(work, files),
        units=units,
        finish=finish,
        identity=plan.identity() and [plan.identity(), [[shard.file, len(shard.tensors)] for shard in files]],
        title="export",
        sources=read,
        extra_bytes=side_bytes(origin.folder.path) if origin else 0,
    )
    return job, largest


def open_source(
    path: Path | str, config: DSV41Config | None = None, *, finite: bool = True
) -> NativeSource | ReleasedSource | DistributedSource:
    """The weights of a native folder (plain or distributed) or a released one. ValueError listing what does not fit.

    config: of a released folder, default its own. finite: NaN and infinity in a released folder are errors.
    """
    if is_native(path):
        return DistributedSource(path) if is_distributed(path) else NativeSource(path)
    return ReleasedSource(path, config or DSV41Config.load(path), finite=finite)


def load_released(folder: Path | str, config: DSV41Config | None = None, dtype: str | None = None) -> dict[str, Tensor]:
    """All native tensors of a released folder, in memory: for `Transformer.load_state_dict`.

    dtype: "BF16" or "F32" for everything but the float32 parameters; default: the config's, or wider where stored so.
    """
    config = config or DSV41Config.load(folder)
    source = ReleasedSource(folder, config, dtype)
    return {name: source.read(name) for name in source.names()}


def save_released(
    folder: Path | str,
    state: Mapping[str, Tensor],
    config: DSV41Config,
    *,
    storage: ExportStorage | None = None,
    like: Path | str | None = None,
) -> None:
    """Write native tensors as a released folder; see `export_checkpoint`."""
    export_checkpoint(DictSource(state), folder, config=config, storage=storage, like=like)


def native_to_released(state: Mapping[str, Tensor], config: DSV41Config) -> dict[str, Tensor]:
    """Native tensors under released names, values and dtypes untouched (views where possible)."""
    bindings = bind(config)
    refuse("state", check_native({name: tuple(t.shape) for name, t in state.items()}, bindings))
    result: dict[str, Tensor] = {}
    for binding in bindings:
        result |= zip(binding.released, binding.via.to_released(state[binding.native]), strict=True)
    return result


def released_to_native(tensors: Mapping[str, Tensor], config: DSV41Config) -> dict[str, Tensor]:
    """The inverse of `native_to_released`, for plain tensors (gradients, say) of a complete backbone."""
    result: dict[str, Tensor] = {}
    for binding in bind(config):
        missing = [name for name in binding.released if name not in tensors]
        if missing:
            raise ValueError(f"{binding.native} needs {missing[0]}, which is not there ({len(missing)} missing)")
        result[binding.native] = binding.via.to_native([tensors[name] for name in binding.released])
    return result


def _plan_shards(
    source: ReleasedSource, bindings: Sequence[Binding], storage: Literal["config", "source"]
) -> tuple[list[TensorSpec], list[Unit], int]:
    """Native tensors as safetensors: what is written, the work, and the elements of its largest piece."""
    specs: list[TensorSpec] = []
    units: list[Unit] = []
    largest = 0
    for binding in bindings:
        spec = _stored_as_is(source.folder, binding) if storage == "source" else None
        if spec:
            units += _copy_parts(source, binding)
        else:
            spec = TensorSpec(binding.native, source.dtype(binding.native), binding.shape)
            units += [_import_unit(source, spec, rows) for rows in binding_pieces(binding)]
            largest = max(largest, *(num_elements(binding.shape, rows) for rows in binding_pieces(binding)))
        specs.append(spec)
    return specs, units, largest


def _import_unit(source: ReleasedSource, spec: TensorSpec, rows: slice) -> Unit:
    def run(writer: ShardWriter) -> None:
        values = source.read(spec.name, rows).to(TORCH_DTYPES[spec.dtype])
        writer.write_rows(spec.name, rows.start, values)

    return Unit(num_bytes(spec.dtype, (rows.stop - rows.start, *spec.shape[1:])), run, spec.name)


def _stored_as_is(folder: SafetensorsFolder, binding: Binding) -> TensorSpec | None:
    """The native tensor as the released bytes, one part behind the other; None where the parts' dtypes differ or only
    some of their rows are wanted.
    """
    infos = [folder.info(name) for name in binding.released]
    form = stored_format(infos[0].dtype, binding.storage)
    wanted = binding.part_shape if form is None else form.data_shape(binding.part_shape)
    if len({info.dtype for info in infos}) > 1 or infos[0].shape != wanted:
        return None
    return TensorSpec(binding.native, infos[0].dtype, binding.via.native_shape(infos[0].shape))


def _copy_parts(source: ReleasedSource, binding: Binding) -> Iterator[Unit]:
    size = source.folder.info(binding.released[0]).num_bytes
    for i, name in enumerate(binding.released):
        yield from copy_units(source.folder, name, binding.native, i * size, finite=source.finite)
