"""A small run that every mechanism takes part in: prepared documents and a run file for `tiny_config`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dsv41.data.files import sha256_of, write_whole
from megatron_dsv41.data.prepared import Sidecar, prepared_paths
from megatron_dsv41.data.token_map import TokenClasses
from megatron_dsv41.run_config import Run, run_from_dict
from megatron_dsv41.testing.tiny import tiny_config

VOCABULARY = 96
EOD = 1


def write_corpus(
    prefix: str | Path,
    documents: int = 200,
    seed: int = 0,
    first_class: int = 0,
    lengths: tuple[int, int] = (5, 60),
) -> Path:
    """Prepared files of random documents over 64 ids, each ended by `EOD`.

    first_class: of token 0 in the Engram token map, which goes around. lengths: least tokens, and one above the most.
    """
    random = np.random.default_rng(seed)
    # Runs of neighbouring ids, so that there is something to learn.
    texts = [(random.integers(64) + np.arange(random.integers(*lengths))) % 64 + 3 for _ in range(documents)]
    return write_documents(prefix, texts, (np.arange(VOCABULARY) + first_class) % VOCABULARY, VOCABULARY, seed)


def write_documents(
    prefix: str | Path, texts: Iterable[np.ndarray], classes_V: np.ndarray, num_classes: int, seed: int
) -> Path:
    """Prepared files of documents of ids below 65,536, each ended here by `EOD`. classes_V: the token map."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    paths = prepared_paths(prefix)
    paths.bin.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(paths.bin), dtype=np.uint16)
    documents = total = 0
    for ids in texts:
        builder.add_item(torch.from_numpy(np.append(ids, EOD)))
        builder.end_document()
        documents, total = documents + 1, total + len(ids) + 1
    builder.finalize(str(paths.idx))
    tokenizer = hashlib.sha256(b"identity").hexdigest()
    classes = TokenClasses(classes_V, num_classes, tokenizer)
    classes.save(paths.token_map)
    sidecar = Sidecar(
        tokenizer="identity",
        tokenizer_sha256=tokenizer,
        token_map_sha256=classes.digest,
        num_classes=num_classes,
        vocab_size=len(classes_V),
        eod_id=EOD,
        documents=documents,
        tokens=total,
        skipped=0,
        dtype="uint16",
        bin_bytes=paths.bin.stat().st_size,
        idx_sha256=sha256_of(paths.idx),
        source={"kind": "random", "seed": seed},
    )
    write_whole(paths.sidecar, sidecar.to_json())
    return Path(prefix)


def tiny_run(folder: str | Path, *overrides: str, **sections: Any) -> Run:
    """`tiny_config` on a corpus in `folder`/data (made when missing), into `folder`/run."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", json.dumps(tiny_config().to_hf()).encode())  # ranks may read it meanwhile
    prefixes = {name: folder / "data" / name for name in ("train", "valid")}
    for seed, prefix in enumerate(prefixes.values()):
        if not prepared_paths(prefix).sidecar.exists():
            write_corpus(prefix, seed=seed)
    values: dict[str, Any] = {
        "model": {"path": str(folder / "config.json")},
        "data": {"train": str(prefixes["train"]), "valid": str(prefixes["valid"]), "seq_length": 32},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 6, "precision": "fp32"},
        "checkpoint": {"folder": str(folder / "run")},
        "logging": {"interval": 1},
        **sections,
    }
    return run_from_dict(values, overrides)


def smooth(tokens: int = 32) -> tuple[str, ...]:
    """Overrides of a `tiny_run` of sequences of at most `tokens` that leave out step functions.

    Fake quantization, selection and routing turn a rounding into a jump: after a few updates two orders of summation
    part by more than rounding. Without them curves agree closely.
    """
    return (
        "phase.window_kv_fp8=false",
        "phase.main_kv_fp4=false",
        "phase.index_mxfp4=false",
        f"model.overrides.index_topk={tokens}",
        f"model.overrides.candidate_topk_blocks={tokens // 4}",
        "model.overrides.num_experts_per_tok=4",
    )
