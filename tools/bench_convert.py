"""Conversion throughput against the disk, all in one run: every conversion in turn with its plain peer.

Peers: a copy with fsync of the bytes that storage-keeping conversions move; a write with fsync of as many bytes as a
decoding one puts out. Prints for each the median seconds, GB/s of output and the ratio to its peer of the same round.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.pieces import Effort
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.testing.released import write_released

BLOCK = 32 * 2**20


def bench_config(gigabytes: float) -> DSV41Config:
    """Three layers of the release's width; the experts and two Engram tables take most of `gigabytes`."""
    experts = max(2, int(gigabytes * 0.55e9 / (3 * 3 * 5120 * 2304 * 17 / 32)))
    rows = int(gigabytes * 0.35e9 / 264)
    return dataclasses.replace(
        presets.flash(),
        vocab_size=4096,
        image_token_id=4095,
        num_hidden_layers=3,
        compress_ratios=(0, 0, 2),
        kv_source_layer_ids=(2,),
        index_source_layer_ids=(2,),
        candidate_source_layer_id=-1,
        n_routed_experts=max(6, experts),
        engram_layer_ids=(1,),
        engram_num_embeddings=(rows,),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        vision={},
    )


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    os.sync()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def folder_size(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_plainly(source: Path, target: Path) -> None:
    """Read and write every file in blocks, sync each."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            shutil.copyfileobj(read, write, BLOCK)
            os.fsync(write.fileno())


def write_plainly(target: Path, size: int) -> None:
    """Write `size` bytes and sync."""
    block = os.urandom(BLOCK)
    target.mkdir()
    with (target / "bytes").open("wb") as file:
        for start in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - start)])
        os.fsync(file.fileno())


@dataclasses.dataclass(frozen=True)
class Case:
    """A conversion and the plain operation that it is compared with."""

    title: str
    plain: Callable[[Path], object]
    convert: Callable[[Path], object]
    output: int


def measured(case: Case, root: Path, rounds: int) -> str:
    """One line. Peer and conversion alternate, so that both meet the same disk."""
    plain: list[float] = []
    own: list[float] = []
    for _ in range(rounds):
        for run, seconds in ((case.plain, plain), (case.convert, own)):
            target = root / "target"
            seconds.append(timed(lambda run=run, target=target: run(target)))
            shutil.rmtree(target)
    ratios = [p / c for p, c in zip(plain, own, strict=True)]
    rate, peer = (case.output / statistics.median(times) / 1e9 for times in (own, plain))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{case.title:<26}{rate:7.3f} GB/s, plain {peer:7.3f} GB/s: {statistics.median(ratios):.2f} ({spread})"


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the released folder (default: 4)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to work; needs 8 times the size")
    parser.add_argument("--workers", type=int, default=0, help="threads (default: as conversions choose)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of plain and conversion (default: 3)")
    args = parser.parse_args()
    effort = Effort(workers=args.workers)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        source, kept, native = root / "released", root / "kept", root / "native"
        write_released(source, bench_config(args.gigabytes))
        import_checkpoint(source, kept, storage="source", effort=effort)
        import_checkpoint(source, native, effort=effort)
        size, decoded = folder_size(source), folder_size(native)
        print(f"released folder {size / 1e9:.2f} GB, in bfloat16 {decoded / 1e9:.2f} GB; {os.cpu_count()} CPUs")
        cases = (
            Case(
                "import, storage kept",
                lambda target: copy_plainly(source, target),
                lambda target: import_checkpoint(source, target, storage="source", effort=effort),
                size,
            ),
            Case(
                "export, storage kept",
                lambda target: copy_plainly(source, target),
                lambda target: export_checkpoint(kept, target, effort=effort),
                size,
            ),
            Case(
                "import to bf16",
                lambda target: write_plainly(target, decoded),
                lambda target: import_checkpoint(source, target, effort=effort),
                decoded,
            ),
            Case(
                "export, quantized again",
                lambda target: copy_plainly(source, target),
                lambda target: export_checkpoint(native, target, effort=effort),
                size,
            ),
        )
        for case in cases:
            print(measured(case, root, args.rounds), flush=True)


if __name__ == "__main__":
    main()
