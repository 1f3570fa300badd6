"""`native.json`: what makes a folder a native checkpoint, and what it remembers of its origin."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_dsv41.checkpoint.safetensors_io import Shard, TensorSpec

NATIVE = "native.json"


def is_native(path: Path | str) -> bool:
    """Whether a folder is a native checkpoint."""
    return (Path(path) / NATIVE).is_file()


@dataclasses.dataclass(frozen=True)
class NativeRecord:
    """`native.json`: what a native folder remembers of the checkpoint that it was imported from.

    shards: the source's files with every tensor's dtype and shape, in file order. index: its index file, verbatim.
    kept_scales: released names of the scales that lie in the native folder. hash_digest: of the Engram hash constants
    and token map (None: unknown tokenizer).
    """

    shards: tuple[Shard, ...]
    index: str | None
    kept_scales: frozenset[str]
    hash_digest: str | None = None

    def to_json(self) -> str:
        """The file's text."""
        shards = [
            {
                "file": shard.file,
                "metadata": shard.metadata,
                "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in shard.tensors],
            }
            for shard in self.shards
        ]
        content = {
            "format": "megatron_dsv41 native checkpoint",
            "version": 1,
            "hash_digest": self.hash_digest,
            "kept_scales": sorted(self.kept_scales),
            "source": {"shards": shards, "index": self.index},
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path) -> NativeRecord:
        """Read the record of a native folder; ValueError where there is none or it is of another version."""
        path = folder / NATIVE
        if not path.is_file():
            raise ValueError(
                f"{folder} is not a native checkpoint: it has no {NATIVE} (dsv41 convert import makes one)"
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}, this program reads version 1")
            shards = tuple(
                Shard(
                    shard["file"],
                    tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in shard["tensors"]),
                    shard["metadata"],
                )
                for shard in content["source"]["shards"]
            )
            kept = frozenset(content["kept_scales"])
            return cls(shards, content["source"]["index"], kept, content["hash_digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: corrupt: {error!r}") from error
