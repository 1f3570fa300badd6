"""Conversion throughput against the disk, all in one run: copy and write the same bytes plainly, then convert them.

Prints one line per measurement: seconds, GB/s of output, and the ratio to the plain operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
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
    with target.open("wb") as file:
        for start in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - start)])
        os.fsync(file.fileno())


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the released folder (default: 4)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to work; needs 6 times the size")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    effort = Effort(workers=args.workers)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        source = root / "released"
        write_released(source, bench_config(args.gigabytes))
        size = folder_size(source)
        print(f"released folder: {size / 1e9:.2f} GB")

        def measure(title: str, run: Callable[[], object], output: int, plain: float | None = None) -> float:
            seconds = timed(run)
            ratio = f"  {plain / seconds:.2f} of plain" if plain else ""
            print(f"{title:<28}{seconds:8.2f} s {output / seconds / 1e9:7.3f} GB/s{ratio}", flush=True)
            return seconds

        copy = measure("plain copy", lambda: copy_plainly(source, root / "copy"), size)
        shutil.rmtree(root / "copy")
        kept, native = root / "kept", root / "native"
        measure(
            "import, storage kept", lambda: import_checkpoint(source, kept, storage="source", effort=effort), size, copy
        )
        measure("export, storage kept", lambda: export_checkpoint(kept, root / "a", effort=effort), size, copy)
        shutil.rmtree(root / "a")
        shutil.rmtree(kept)
        seconds = timed(lambda: import_checkpoint(source, native, effort=effort))
        output = folder_size(native)
        plain = measure("plain write and fsync", lambda: write_plainly(root / "plain", output), output)
        (root / "plain").unlink()
        print(
            f"{'import to bf16':<28}{seconds:8.2f} s {output / seconds / 1e9:7.3f} GB/s  {plain / seconds:.2f} of plain"
        )
        measure("export, quantized again", lambda: export_checkpoint(native, root / "b", effort=effort), size, copy)


if __name__ == "__main__":
    main()
