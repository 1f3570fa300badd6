"""Chat files to prepared data with a loss mask beside it (`data/prepared.py`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dsv41.data.chat import encode, read_chats, turns
from megatron_dsv41.data.files import disk_full_explained, sha256_of, staging_folder, sync_folder, write_whole
from megatron_dsv41.data.prepared import Sidecar, mask_prefix, prepared_paths
from megatron_dsv41.data.token_map import token_classes
from megatron_dsv41.data.tokenizer import open_tokenizer
from megatron_dsv41.data.writer import TokenWriter, token_dtype


def prepare_chats(
    inputs: Sequence[str], tokenizer_name: str, output: str, *, effort: str | None = None, overwrite: bool = False
) -> Sidecar:
    """Write PREFIX.bin, .idx, .token_map.npz, .json and the mask PREFIX.mask.bin, .mask.idx; one document per turn.

    ValueError for wrong input and for existing output without `overwrite`. Nothing half-written is left.
    """
    target = Path(output).expanduser().absolute()
    final, mask = prepared_paths(target), prepared_paths(mask_prefix(target))
    existing = [path for path in (*final, mask.bin, mask.idx) if path.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} exists: choose another --output, or pass --overwrite to replace it")
    tokenizer = open_tokenizer(tokenizer_name)
    eod_id, dtype = tokenizer.eod_id(), token_dtype(tokenizer.vocab_size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_explained(target.parent), staging_folder(target) as folder:
        with TokenWriter(folder / "chats", dtype) as tokens, TokenWriter(folder / "mask", "uint8") as trained:
            for where, row in read_chats(inputs):
                for turn in turns(row, where, effort):
                    example = encode(turn, tokenizer, eod_id)
                    tokens.add(example.ids)
                    trained.add(example.trained)
            tokens.finish()
            trained.finish()
        classes = token_classes(tokenizer)
        sidecar = Sidecar(
            tokenizer=tokenizer_name,
            tokenizer_sha256=tokenizer.sha256,
            token_map_sha256=classes.digest,
            num_classes=classes.num_classes,
            vocab_size=tokenizer.vocab_size,
            eod_id=eod_id,
            documents=tokens.documents,
            tokens=tokens.tokens,
            skipped=0,
            dtype=dtype,
            bin_bytes=tokens.paths.bin.stat().st_size,
            idx_sha256=sha256_of(tokens.paths.idx),
            source={"kind": "chat", "inputs": list(map(str, inputs)), "reasoning_effort": effort},
        )
        classes.save(tokens.paths.token_map)
        write_whole(tokens.paths.sidecar, sidecar.to_json())
        final.sidecar.unlink(missing_ok=True)  # no old sidecar beside new data
        moves = [(trained.paths.bin, mask.bin), (trained.paths.idx, mask.idx), *zip(tokens.paths, final, strict=True)]
        for source, place in moves:
            os.replace(source, place)
        sync_folder(target.parent)
    return sidecar
