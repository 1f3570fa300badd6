"""Engram: n-gram rows looked up by hash and gated into the streams (SPEC 12)."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.layout import from_flat, to_flat
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.ops.engram import ref
from megatron_dsv41.ops.registry import Ops

DRAWN_TOGETHER = 1 << 10  # rows that share a generator
SEED_STRIDE = 10007  # layer l draws its multipliers from default_rng(10007 * l)


def _is_prime(number: int) -> bool:
    """Deterministic Miller-Rabin below 3.3e24."""
    if number < 2:
        return False
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    for prime in small:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(base, odd, twos, number) for base in small)


def _passes(base: int, odd: int, twos: int, number: int) -> bool:
    x = pow(base, odd, number)
    if x in (1, number - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % number
        if x == number - 1:
            return True
    return False


def _primes_from(start: int) -> Iterator[int]:
    number = start
    while True:
        if _is_prime(number):
            yield number
        number += 1


@functools.cache
def _all_primes(vocab_size: int, count: int) -> tuple[int, ...]:
    primes = _primes_from(vocab_size)
    return tuple(next(primes) for _ in range(count))


def column_primes(config: DSV41Config) -> dict[int, tuple[int, ...]]:
    """Per Engram layer the prime size of every table column: consecutive primes from engram_vocab_size on."""
    columns = config.engram_columns
    primes = _all_primes(config.engram_vocab_size, columns * len(config.engram_layer_ids))
    return {layer: primes[i * columns : (i + 1) * columns] for i, layer in enumerate(config.engram_layer_ids)}


def layer_multipliers(config: DSV41Config, layer: int) -> tuple[int, ...]:
    """Odd hash multipliers of look-back 0..max_ngram-1, bounded so that the product with any class fits in int64."""
    bound = ((2**63 - 1) // config.engram_compressed_vocab_size) // 2
    draws = np.random.default_rng(SEED_STRIDE * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return tuple(int(v) * 2 + 1 for v in draws)


def draw_rows(seed: int, layer: int, rows: slice, dim: int, std: float) -> Tensor:
    """Initial rows [n, dim] of a layer's table, fp32, normal. A row depends on seed, layer and its number alone.

    Whoever owns which rows, every layout of a run starts from one table that exists nowhere whole.
    """
    first, last = rows.start // DRAWN_TOGETHER, -(-rows.stop // DRAWN_TOGETHER)
    generator, blocks = torch.Generator(), []
    for block in range(first, last):
        generator.manual_seed(((seed * 1_000_003 + layer) << 24) + block)
        blocks.append(torch.randn(DRAWN_TOGETHER, dim, generator=generator))
    drawn = torch.cat(blocks) if blocks else torch.empty(0, dim)
    return drawn[rows.start - first * DRAWN_TOGETHER :][: rows.stop - rows.start] * std


class EngramHash:
    """Row ids of every Engram layer from raw token ids. Constants follow from the config and the token map alone.

    token_map: int64 [vocabulary], raw id -> compressed id. hash_tokens: a provider of engram.hash. Raises ValueError
    when map, primes and table sizes disagree.
    """

    def __init__(self, config: DSV41Config, token_map: Tensor, hash_tokens: Callable[..., Tensor] = ref.hash_tokens):
        self.config, self.hash_tokens = config, hash_tokens
        self.primes = column_primes(config)
        self.multipliers = {layer: layer_multipliers(config, layer) for layer in config.engram_layer_ids}
        if config.engram_layer_ids and token_map.shape[0] < config.vocab_size:
            raise ValueError(
                f"token map covers {token_map.shape[0]} ids, the model's vocab_size is {config.vocab_size}: "
                "build the map from this model's tokenizer"
            )
        highest = int(token_map.max()) if token_map.numel() else -1
        if config.engram_layer_ids and not 0 <= highest < config.engram_compressed_vocab_size:
            raise ValueError(
                f"token map reaches class {highest}, engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}: map and config belong to different tokenizers"
            )
        for layer, primes in self.primes.items():
            if sum(primes) > config.engram_rows(layer):
                raise ValueError(
                    f"engram_num_embeddings of layer {layer} is {config.engram_rows(layer)}, "
                    f"its {len(primes)} columns need {sum(primes)} rows"
                )
        self.token_map = token_map

    @property
    def digest(self) -> str:
        """sha256 of everything that decides a row id: two models with equal digests read equal rows."""
        constants = json.dumps([sorted(self.primes.items()), sorted(self.multipliers.items())])
        pad = self.config.engram_pad_token_id
        head = hashlib.sha256(f"{constants};pad={pad};".encode())
        head.update(self.token_map.to(torch.int64).cpu().numpy().tobytes())
        return head.hexdigest()

    def __call__(
        self, input_ids_T: Tensor, documents: Documents, layers: Collection[int] | None = None
    ) -> dict[int, Tensor]:
        """Flat raw ids int64 [T] -> layer -> rows int64 [T, columns], of `layers` (None: of all that have a table)."""
        chosen = [layer for layer in self.primes if layers is None or layer in layers]
        if not chosen:
            return {}
        token_map, pad = self.token_map.to(input_ids_T.device), self.config.engram_pad_token_id
        return {
            layer: self.hash_tokens(
                input_ids_T,
                token_map,
                pad,
                documents,
                self.multipliers[layer],
                self.primes[layer],
                self.config.engram_n_heads,
            )
            for layer in chosen
        }


class Engram(nn.Module):
    """Writes gated n-gram memory into the streams, before the layer's own sites."""

    def __init__(self, config: DSV41Config, layer: int, primitives: Primitives, ops: Ops):
        super().__init__()
        n, d = config.hc_mult, config.hidden_size
        self.layer, self.shape, self.eps, self.ops = layer, (n, d), config.rms_norm_eps, ops
        width = config.engram_columns * config.engram_head_dim
        self.embed = primitives.engram_table(layer, config.engram_rows(layer), config.engram_head_dim)
        self.wkv = primitives.linear("engram.wkv", width, (n + 1) * d)
        self.q_weight = primitives.parameter(torch.ones(n, d, dtype=primitives.dtype), "engram.q_weight")
        self.k_weight = primitives.parameter(torch.ones(n, d, dtype=primitives.dtype), "engram.k_weight")

    def forward(self, streams_SBND: Tensor, batch: Batch) -> Tensor:
        """streams [s, b, n, d] -> the same shape."""
        memory_TM = self.embed(batch.engram_rows[self.layer]).flatten(1)
        key_TK, value_TD = self.wkv(memory_TM.to(streams_SBND.dtype)).split(
            [self.shape[0] * self.shape[1], self.shape[1]], dim=-1
        )
        streams_TND = self.ops["engram.gate"](
            to_flat(streams_SBND),
            key_TK.unflatten(-1, self.shape),
            value_TD,
            self.q_weight,
            self.k_weight,
            batch.gate_open_T,
            self.eps,
        )
        return from_flat(streams_TND, streams_SBND.shape[1])
