"""Is a checkpoint whole, and do two hold the same model? Works on folders of which shards are missing, too."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.distributed import DistributedSource, is_distributed, lost_files
from megatron_dsv41.checkpoint.finite import num_non_finite
from megatron_dsv41.checkpoint.inventory import LISTED, Problem, check_native, check_released
from megatron_dsv41.checkpoint.mapping import bind, is_carried
from megatron_dsv41.checkpoint.native_record import NATIVE, NativeRecord, is_native
from megatron_dsv41.checkpoint.pieces import PIECE_BYTES, Effort, binding_pieces, num_elements
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, TensorInfo
from megatron_dsv41.checkpoint.sources import NativeSource, ReleasedSource, inventory_of
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES, num_bytes
from megatron_dsv41.config import DSV41Config

DEFAULT_EFFORT = Effort()
Check = Callable[[], "Difference | None"]
Opened = NativeSource | ReleasedSource | DistributedSource


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. `ok`: nothing wrong and nothing missing."""

    path: Path
    kind: str  # released, native or distributed
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
            lines.append(f"  {len(self.missing_files)} files missing: {', '.join(self.missing_files[:LISTED])}")
        lines += [f"  {problem}" for problem in self.problems[:LISTED]]
        if len(self.problems) > LISTED:
            lines.append(f"  ... and {len(self.problems) - LISTED} more")
        if self.checksum:
            lines.append(f"  sha256 {self.checksum}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor of two checkpoints lies apart. max_abs: largest difference of values.

    num_elements 0: they cannot be compared, for their shapes or dtypes differ.
    """

    name: str
    max_abs: float
    num_different: int
    num_elements: int

    def __str__(self) -> str:
        if not self.num_elements:
            return f"{self.name}: another shape or dtype"
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
    Shards that are missing, truncated or have a corrupt header are named, and the others checked. ValueError for an
    index that cannot be read, or that the shards contradict.
    """
    path = Path(path)
    config = config or DSV41Config.load(path)
    folder = SafetensorsFolder(path, partial=True)
    problems = [Problem("damaged", file, what) for file, what in folder.damaged_files.items()]
    divided: DistributedSource | None = None
    if is_native(path) and is_distributed(path):
        lost = lost_files(path)
        if lost:
            return Verification(path, "distributed", len(folder.tensors), 0, tuple(lost), ())
        divided = DistributedSource(path)
        problems += _check_hash(divided.record, hash_digest)
    elif is_native(path):
        source = NativeSource(path, partial=True)
        shapes = {name: source.stored_shape(name) for name in source.names() if name in folder.tensors}
        shapes |= {name: folder.info(name).shape for name in source.unknown_names()}
        bindings = [b for b in bind(config) if b.native not in folder.missing_names]
        problems += check_native(shapes, bindings)
        problems += _check_hash(source.record, hash_digest)
    else:
        problems += check_released(inventory_of(folder), config, folder.missing_names)
    checksum = None
    stored = [_Stored.of(folder, info) for info in folder.tensors.values()]
    stored += [_Stored.divided(divided, name) for name in divided.names()] if divided else []
    if data or checksums:
        found, checksum = _scan(stored, checksums, effort)
        problems += found
    return Verification(
        path=path,
        kind="distributed" if divided else "native" if is_native(path) else "released",
        num_tensors=len(stored),
        num_bytes=sum(tensor.num_bytes for tensor in stored),
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


def _open(path: Path | str) -> Opened:
    if is_native(path):
        return DistributedSource(path) if is_distributed(path) else NativeSource(path, partial=True)
    return ReleasedSource(SafetensorsFolder(path, partial=True), DSV41Config.load(path), finite=False)


def _available(source: Opened) -> Iterator[str]:
    """Native names whose every stored piece is there."""
    absent = set(source.folder.missing_names)
    for name, binding in source.bindings.items():
        if not absent.intersection(source.stored_names(binding)):
            yield name


def _values_job(a: Opened, b: Opened, name: str) -> Check:
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


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A stored tensor, wherever it lies: `blocks` gives it piece by piece, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: str
    blocks: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, folder: SafetensorsFolder, info: TensorInfo) -> _Stored:
        dtype = TORCH_DTYPES[info.dtype]
        blocks = lambda: (block.view(dtype) for block in _blocks(folder, info))  # noqa: E731
        return cls(info.name, info.dtype, info.shape, info.file, blocks)

    @classmethod
    def divided(cls, source: DistributedSource, name: str) -> _Stored:
        pieces = list(binding_pieces(source.bindings[name]))
        blocks = lambda: (source.read(name, rows) for rows in pieces)  # noqa: E731
        return cls(name, source.dtype(name), source.shape(name), ".metadata", blocks)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def _check_hash(record: NativeRecord, digest: str | None) -> list[Problem]:
    recorded = record.hash_digest
    if digest and recorded and digest != recorded:
        return [Problem("hash", NATIVE, f"records {recorded}, this tokenizer gives {digest}")]
    return []


def _scan(tensors: Iterable[_Stored], checksums: bool, effort: Effort) -> tuple[list[Problem], str | None]:
    """Read every byte once: non-finite values, and the digest."""

    def one(tensor: _Stored) -> tuple[Problem | None, str]:
        digest = hashlib.sha256()
        bad = 0
        for block in tensor.blocks():
            bad += num_non_finite(block, is_scale=tensor.name.endswith(".scale"))
            if checksums:
                digest.update(memoryview(block.contiguous().view(-1).view(torch.uint8).numpy()))
        detail = f"{bad} of {math.prod(tensor.shape)} values are NaN or infinite ({tensor.place})"
        return (Problem("non-finite", tensor.name, detail) if bad else None), digest.hexdigest()

    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(effort.threads(PIECE_BYTES // 4)) as pool:
        results = list(pool.map(one, ordered))
    problems = [problem for problem, _ in results if problem]
    return problems, _combined(ordered, [digest for _, digest in results]) if checksums else None


def _combined(tensors: Sequence[_Stored], digests: Iterable[str]) -> str:
    """One digest of all tensors, whatever the division into files."""
    lines = (f"{t.name} {t.dtype} {list(t.shape)} {digest}\n" for t, digest in zip(tensors, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _blocks(folder: SafetensorsFolder, info: TensorInfo) -> Iterator[Tensor]:
    for start in range(0, info.num_bytes, PIECE_BYTES):
        yield folder.read_bytes(info, start, min(PIECE_BYTES, info.num_bytes - start))
