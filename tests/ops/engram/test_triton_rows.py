"""Row numbers, rows, sums by row in Triton against the definitions. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.ops.documents import documents_from_ids
from megatron_dsv41.ops.engram import ref
from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import LONG, Runs
from megatron_dsv41.ops.registry import load
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED
from megatron_dsv41.testing.tiny import identity_map, tiny_config

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("config", [presets.flash(), tiny_config()], ids=["flash", "tiny"])
@pytest.mark.parametrize("tokens", [1, 63, 65, 400])
def test_row_numbers_are_the_definitions(config, tokens):
    """Packed documents, image spans, padding, the largest classes, and ids that are in no vocabulary."""
    generator = torch.Generator().manual_seed(tokens)
    token_map = identity_map(config).flip(0).contiguous().to(DEVICE)
    ids = torch.randint(-100, config.vocab_size + 3, (tokens,), generator=generator)
    ids[::2] = torch.randint(config.vocab_size - 50, config.vocab_size, (len(ids[::2]),), generator=generator)
    ids[1::16], ids[3::16], ids[5::16] = -1, -100, config.vocab_size
    document = (torch.rand(1, tokens, generator=generator) < 0.2).cumsum(1)
    alive, image = (torch.rand(1, tokens, generator=generator) < p for p in (0.8, 0.2))
    documents = documents_from_ids(document.to(DEVICE), alive.to(DEVICE), image.to(DEVICE))
    found, expected = (
        EngramHash(config, token_map, load("engram.hash", name))(ids.to(DEVICE), documents)
        for name in ("triton", "ref")
    )
    for layer in config.engram_layer_ids:
        assert torch.equal(found[layer], expected[layer])
        assert tokens < 60 or (found[layer] == -1).any()


def test_no_tokens_have_no_rows():
    config, none = tiny_config(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    documents = documents_from_ids(none[None], none[None].bool(), none[None].bool())
    hashing = EngramHash(config, identity_map(config).to(DEVICE), load("engram.hash", "triton"))
    assert hashing(none, documents)[1].shape == (0, config.engram_columns)


@pytest.mark.parametrize("dim", [32, 96, 256])
@pytest.mark.parametrize("kind", ["float8", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_read_bit_by_bit(dim, kind, dtype):
    """Every byte there is: NaN elements, zero and infinite scales, values that bfloat16 rounds or cannot hold."""
    generator, form = torch.Generator().manual_seed(dim), RowFormat(kind, dim)
    rows = torch.randint(256, (67, form.width), generator=generator, dtype=torch.uint8)
    if form.plain is not None:
        rows = torch.randn(67, dim, generator=generator).to(form.plain).view(torch.uint8)
    places = torch.randint(67, (301,), generator=generator)
    args = rows.to(DEVICE), places.to(DEVICE), form, dtype
    found, expected = load("engram.read_rows", "triton")(*args), ref.read_rows(*args)
    assert found.dtype is dtype and found.shape == (301, dim)
    # A NaN's payload is nobody's promise.
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert len(load("engram.read_rows", "triton")(args[0], args[1][:0], form, dtype)) == 0


@pytest.mark.parametrize("dim", [32, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_published_bit_by_bit(dim, dtype):
    generator, form = torch.Generator().manual_seed(dim), RowFormat("float8", dim)
    values = torch.randn(133, dim, generator=generator) * torch.rand(133, 1, generator=generator) ** 8
    values[5], values[6, :32], values[7, 3], values[8, ::7] = 0, 0, 1e-30, 448.0
    values[9:40] *= 2.0 ** torch.randint(-120, 90, (31, dim), generator=generator)
    values = values.to(DEVICE, dtype)
    assert torch.equal(load("engram.encode_rows", "triton")(values, form), form.encode(values))
    read = load("engram.read_rows", "triton")(
        form.encode(values), torch.arange(133, device=DEVICE), form, torch.float32
    )
    assert torch.equal(load("engram.encode_rows", "triton")(read, form), form.encode(read))


def entries(kind):
    generator = torch.Generator().manual_seed(7)
    return {
        "distinct": torch.randperm(300, generator=generator),
        "random": torch.randint(40, (301,), generator=generator),
        "one row": torch.full((2 * LONG + 3,), 9),
        "skewed": (torch.rand(700, generator=generator) ** 6 * 50).long(),
        "nothing": torch.empty(0, dtype=torch.int64),
    }[kind]


@pytest.mark.parametrize("kind", ["distinct", "random", "one row", "skewed", "nothing"])
@pytest.mark.parametrize("dim", [32, 96, 256])
def test_sums_by_row(kind, dim):
    """Against fp64; the same bits on every run; added into what is there."""
    rows_E = entries(kind).to(DEVICE)
    values = torch.randn(len(rows_E), dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    runs, merge = Runs.of(rows_E), load("engram.merge", "triton")
    found = merge(values, runs, 0.5)
    assert torch.equal(merge(values, runs, 0.5), found)
    exact = torch.zeros(300, dim, dtype=torch.float64, device=DEVICE).index_add_(0, rows_E, values.double() * 0.5)
    close = {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(found.double(), exact[runs.rows_M], **close)
    torch.testing.assert_close(ref.merge(values, runs, 0.5).double(), exact[runs.rows_M], **close)
    sums = torch.randn(300, dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = sums.clone().index_add_(0, runs.rows_M, found)
    assert merge(values, runs, 0.5, into=sums) is sums
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-6)


def test_entries_may_lie_anywhere():
    rows_E, places = entries("random").to(DEVICE), torch.randperm(400)[:301].to(DEVICE)
    values, merge = torch.randn(400, 32).to(DEVICE), load("engram.merge", "triton")
    assert torch.equal(merge(values, Runs.of(rows_E).among(places)), merge(values[places], Runs.of(rows_E)))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no devices")
def test_what_cannot_be_is_refused():
    form, rows = RowFormat("float32", 32), torch.zeros(2, 128, dtype=torch.uint8, device="cuda")
    places = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="gives bfloat16 or float32, not torch.float64; choose 'ref'"):
        load("engram.read_rows", "triton")(rows, places, form, torch.float64)
    with pytest.raises(ValueError, match="engram.read_rows: provider 'triton' runs on CUDA tensors"):
        load("engram.read_rows", "triton")(rows, places.cpu(), form, torch.float32)


def test_a_nan_is_published_as_one():
    form, values = RowFormat("float8", 64), torch.ones(3, 64, device=DEVICE)
    values[1, 7] = torch.nan
    for encode in (load("engram.encode_rows", "triton"), lambda values, form: form.encode(values)):
        assert form.decode(encode(values, form), torch.float32)[1, 7].isnan()
