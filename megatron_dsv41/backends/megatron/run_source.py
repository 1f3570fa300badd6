"""The weights in a training run's folder, tensor by tensor: what `dsv41 convert export RUN DST` reads.

Reads torch_dist files with torch alone, in one process, whatever layout wrote them, and rows where rows are asked
for. Optimizer state is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dsv41.backends.megatron.checkpoints import checkpoint_path, complete_steps
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.checkpoint.storage import DTYPE_NAMES
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.files import sha256_of
from megatron_dsv41.data.prepared import read_sidecar
from megatron_dsv41.data.tokenizer import find_tokenizer
from megatron_dsv41.run_config import Run, load_run

RUN_FILE = "run.yaml"


class RunSource:
    """A `StateSource` over the newest complete checkpoint of a run, or that of `step`.

    ValueError when there is none, or when a tensor of the run's model is missing.
    """

    def __init__(self, folder: str | Path, step: int | None = None):
        self.run: Run = load_run(Path(folder) / RUN_FILE)
        self.config: DSV41Config = self.run.architecture()
        steps = complete_steps(folder)
        if not steps:
            raise ValueError(f"{folder} has no complete checkpoint yet")
        if step is not None and step not in steps:
            raise ValueError(f"{folder} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        self.step = steps[-1] if step is None else step
        self.path = checkpoint_path(folder, self.step)
        self.metadata = FileSystemReader(self.path).read_metadata()
        stored = self.metadata.state_dict_metadata
        self.native = [binding.native for binding in bind(self.config)]
        missing = [name for name in self.native if not isinstance(stored.get(name), TensorStorageMetadata)]
        if missing:
            raise ValueError(f"{self.path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
        self.stored: dict[str, Any] = {name: stored[name] for name in self.native}

    def tokenizer_files(self) -> list[Path]:
        """tokenizer.json of the run's data and what lies beside it. ValueError when it is gone or has changed."""
        sidecar = read_sidecar(next(iter(self.run.data.train)))
        path = find_tokenizer(self.run.data.tokenizer or sidecar.tokenizer)
        if sha256_of(path) != sidecar.tokenizer_sha256:
            raise ValueError(f"{path} is not the tokenizer that the run's data was prepared with")
        beside = path.with_name("tokenizer_config.json")
        return [path, beside] if beside.is_file() else [path]

    def names(self) -> Sequence[str]:
        """Native names in the order of the mapping table."""
        return self.native

    def shape(self, name: str) -> tuple[int, ...]:
        """Native shape."""
        return tuple(self.stored[name].size)

    def dtype(self, name: str) -> str:
        """Dtype that `read` returns, by its safetensors name."""
        return DTYPE_NAMES[self.stored[name].properties.dtype]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or rows of its first axis."""
        shape = self.shape(name)
        first, end, _ = (rows or slice(None)).indices(shape[0])
        target = torch.empty(end - first, *shape[1:], dtype=self.stored[name].properties.dtype)
        # Reader and planner are made anew: several threads may read at once.
        reader, planner = FileSystemReader(self.path), _RowsPlanner(name, target, first)
        planner.set_up_planner({name: target}, self.metadata, is_coordinator=True)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        return target


class _RowsPlanner(DefaultLoadPlanner):
    """Reads rows [first, first + len(target)) of one stored tensor into `target`."""

    def __init__(self, name: str, target: Tensor, first: int):
        super().__init__()
        self.name, self.target = name, target
        self.chunk = ChunkStorageMetadata(
            offsets=torch.Size([first, *[0] * (target.dim() - 1)]), sizes=torch.Size(target.shape)
        )

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[self.name]
        assert isinstance(stored, TensorStorageMetadata)
        return LoadPlan(create_read_items_for_chunk_list(self.name, stored, [self.chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target
