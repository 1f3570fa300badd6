"""Is a checkpoint whole, and do two hold the same model? Works on folders of which shards are missing, too."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.inventory import LISTED, Problem, check_native, check_released
from megatron_dsv41.checkpoint.mapping import bind, is_carried
from megatron_dsv41.checkpoint.native_record import is_native
from megatron_dsv41.checkpoint.pieces import PIECE_BYTES, Effort, binding_pieces, num_elements
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, TensorInfo
from megatron_dsv41.checkpoint.sources import NativeSource, ReleasedSource, inventory_of
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES
from megatron_dsv41.config import DSV41Config

DEFAULT_EFFORT = Effort()
Check = Callable[[], "Difference | None"]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. `ok`: nothing wrong and nothing missing."""

    path: Path
    kind: str  # released or native
    num_tensors: int
    num_bytes: int
    missing_files: tuple[str, ...]
    problems: tuple[Problem, ...]
    checksum: str | None = None

    @property
    def ok(self) -> bool:
        """Complete and without problems."""
        return not self.problems and not self.missing_files

    def __str__(self) -> str:
        size = f"{self.num_tensors} tensors, {self.num_bytes:,} bytes"
        lines = [f"{self.path}: {self.kind} layout, {size}: {'ok' if self.ok else 'NOT ok'}"]
        if self.missing_files:
            lines.append(f"  {len(self.missing_files)} shards missing: {', '.join(self.missing_files[:LISTED])}")
        lines += [f"  {problem}" for problem in self.problems[:LISTED]]
        if len(self.problems) > LISTED:
            lines.append(f"  ... and {len(self.problems) - LISTED} more")
        if self.checksum:
            lines.append(f"  sha256 {self.checksum}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor of two checkpoints lies apart. max_abs: largest difference of values (inf: shapes differ)."""

    name: str
    max_abs: float
    num_different: int
    num_elements: int

    def __str__(self) -> str:
        return f"{self.name}: {self.num_different} of {self.num_elements} differ, by {self.max_abs:.3e} at most"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found, largest difference first."""

    num_compared: int
    differences: tuple[Difference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Same names, same values."""
        return not (self.differences or self.only_in_a or self.only_in_b)

    def __str__(self) -> str:
        lines = [f"{self.num_compared} tensors compared, {len(self.differences)} differ"]
        lines += [f"  {difference}" for difference in self.differences[:LISTED]]
        for side, names in (("first", self.only_in_a), ("second", self.only_in_b)):
            if names:
                lines.append(f"  only in the {side}: {len(names)}: {', '.join(names[:LISTED])}")
        return "\n".join(lines)


def verify(
    path: Path | str,
    *,
    config: DSV41Config | None = None,
    hash_digest: str | None = None,
    data: bool = True,
    checksums: bool = False,
    effort: Effort = DEFAULT_EFFORT,
) -> Verification:
    """Names, dtypes, shapes, scale pairing; with `data` also NaN scales and non-finite values.

    hash_digest: of the hash constants with the tokenizer in use; compared with what a native folder recorded.
    ValueError for files that cannot be read at all (truncated, corrupt header or index), naming them.
    """
    path = Path(path)
    config = config or DSV41Config.load(path)
    folder = SafetensorsFolder(path, partial=True)
    problems: list[Problem] = []
    if is_native(path):
        source = NativeSource(path, partial=True)
        shapes = {name: source.stored_shape(name) for name in source.names() if name in folder.tensors}
        shapes |= {name: folder.info(name).shape for name in source.unknown_names()}
        bindings = [b for b in bind(config) if b.native not in folder.missing_names]
        problems += check_native(shapes, bindings)
        recorded = source.record.hash_digest
        if hash_digest and recorded and hash_digest != recorded:
            problems.append(Problem("hash", "native.json", f"records {recorded}, this tokenizer gives {hash_digest}"))
    else:
        problems += check_released(inventory_of(folder), config, folder.missing_names)
    checksum = None
    if data or checksums:
        found, checksum = _scan(folder, checksums, effort)
        problems += found
    return Verification(
        path=path,
        kind="native" if is_native(path) else "released",
        num_tensors=len(folder.tensors),
        num_bytes=sum(info.num_bytes for info in folder.tensors.values()),
        missing_files=folder.missing_files,
        problems=tuple(problems),
        checksum=checksum,
    )


def compare(a: Path | str, b: Path | str, *, effort: Effort = DEFAULT_EFFORT) -> Comparison:
    """Two checkpoints of either layout and any storage, value by value; what only one of them has is listed."""
    sources = [_open(path) for path in (a, b)]
    first, second = sources
    names_a, names_b = (set(_available(source)) for source in sources)
    common = [name for name in first.names() if name in names_a & names_b]
    carried_a, carried_b = ({n for n in s.folder.tensors if is_carried(n)} for s in sources)
    largest = max((num_elements(b_.shape, r) for b_ in first.bindings.values() for r in binding_pieces(b_)), default=1)
    jobs: list[Check] = [_values_job(first, second, name) for name in common]
    jobs += [_bytes_job(first.folder, second.folder, name) for name in sorted(carried_a & carried_b)]
    with ThreadPoolExecutor(effort.threads(largest)) as pool:
        running = [pool.submit(job) for job in jobs]
        found = [difference for future in running if (difference := future.result())]
    return Comparison(
        num_compared=len(jobs),
        differences=tuple(sorted(found, key=lambda d: (-d.max_abs, d.name))),
        only_in_a=tuple(sorted((names_a - names_b) | (carried_a - carried_b))),
        only_in_b=tuple(sorted((names_b - names_a) | (carried_b - carried_a))),
    )


def _open(path: Path | str) -> NativeSource | ReleasedSource:
    if is_native(path):
        return NativeSource(path, partial=True)
    return ReleasedSource(SafetensorsFolder(path, partial=True), DSV41Config.load(path))


def _available(source: NativeSource | ReleasedSource) -> Iterator[str]:
    """Native names whose every stored piece is there."""
    absent = set(source.folder.missing_names)
    for name, binding in source.bindings.items():
        if not absent.intersection(source.stored_names(binding)):
            yield name


def _values_job(a: NativeSource | ReleasedSource, b: NativeSource | ReleasedSource, name: str) -> Check:
    def run() -> Difference | None:
        if a.shape(name) != b.shape(name):
            return Difference(name, float("inf"), -1, 0)
        count, largest, total = 0, 0.0, 0
        for rows in binding_pieces(a.bindings[name]):
            x, y = a.read(name, rows).float(), b.read(name, rows).float()
            different = x.view(torch.int32) != y.view(torch.int32)
            total += x.numel()
            number = int(different.sum())
            if number:
                count += number
                largest = max(largest, float((x - y).abs()[different].nan_to_num(float("inf")).max()))
        return Difference(name, largest, count, total) if count else None

    return run


def _bytes_job(a: SafetensorsFolder, b: SafetensorsFolder, name: str) -> Check:
    def run() -> Difference | None:
        one, two = a.info(name), b.info(name)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return Difference(name, float("inf"), -1, 0)
        pairs = zip(_blocks(a, one), _blocks(b, two), strict=True)
        count = sum(int((x != y).sum()) for x, y in pairs)
        return Difference(f"{name} (bytes)", 0.0, count, one.num_bytes) if count else None

    return run


def _scan(folder: SafetensorsFolder, checksums: bool, effort: Effort) -> tuple[list[Problem], str | None]:
    """Read every byte once: non-finite values, and the digest."""

    def one(info: TensorInfo) -> tuple[Problem | None, str]:
        digest = hashlib.sha256()
        bad = 0
        for block in _blocks(folder, info):
            bad += _num_non_finite(block.view(TORCH_DTYPES[info.dtype]), info)
            if checksums:
                digest.update(memoryview(block.numpy()))
        detail = (
            f"{bad} of {info.num_bytes // TORCH_DTYPES[info.dtype].itemsize} values are NaN or infinite ({info.file})"
        )
        return (Problem("non-finite", info.name, detail) if bad else None), digest.hexdigest()

    infos = sorted(folder.tensors.values(), key=lambda info: info.name)
    with ThreadPoolExecutor(effort.threads(PIECE_BYTES // 4)) as pool:
        results = list(pool.map(one, infos))
    problems = [problem for problem, _ in results if problem]
    return problems, _combined(infos, [digest for _, digest in results]) if checksums else None


def _combined(infos: Sequence[TensorInfo], digests: Iterable[str]) -> str:
    """One digest of all tensors, whatever the division into files."""
    lines = (f"{i.name} {i.dtype} {list(i.shape)} {digest}\n" for i, digest in zip(infos, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _blocks(folder: SafetensorsFolder, info: TensorInfo) -> Iterator[Tensor]:
    for start in range(0, info.num_bytes, PIECE_BYTES):
        yield folder.read_bytes(info, start, min(PIECE_BYTES, info.num_bytes - start))


def _num_non_finite(values: Tensor, info: TensorInfo) -> int:
    if info.dtype == "F8_E8M0" or (info.dtype == "U8" and info.name.endswith(".scale")):
        return int((values.view(torch.uint8) == 255).sum())
    if info.dtype == "F8_E4M3":
        return int((values.view(torch.uint8) & 0x7F == 0x7F).sum())
    return int((~values.isfinite()).sum()) if values.dtype.is_floating_point else 0
