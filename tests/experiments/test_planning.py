from megatron_dsv41 import presets
from megatron_dsv41.experiments.planning import boundary_bytes, describe_model
from megatron_dsv41.phase import Phase

STREAMS = 4 * 5120 * 2 + 4 * 4  # bf16 streams and the fp32 pre-mix


def test_a_cut_before_a_full_layer_carries_the_streams_alone():
    flash = presets.flash()
    assert [boundary_bytes(flash, layer) for layer in (2, 8, 14, 20)] == [STREAMS] * 4


def test_a_cut_in_the_decoder_carries_what_later_layers_read():
    flash = presets.flash()
    latents, keys, selection, pool = 512 * 4, 128 * 2, 512 * 4, 2048 * 4
    assert boundary_bytes(flash, 10) == STREAMS + latents / 2 + selection
    assert boundary_bytes(flash, 24) == STREAMS + latents + keys + pool
    assert boundary_bytes(flash, 30) == STREAMS + latents + keys + selection + pool
    assert boundary_bytes(flash, 38) == STREAMS + latents + selection


def test_every_layer_is_described():
    report = describe_model(presets.tiny(), Phase(), 64)
    assert [layer["kind"] for layer in report["layers"]] == [
        "swa",
        "swa",
        "full",
        "reuse",
        "full",
        "reuse",
        "reindex",
        "reuse",
    ]
    assert report["layers"][4]["candidates"] == "makes"
    assert report["layers"][6]["candidates"] == "uses"
    assert report["layers"][6]["live"] == ["compressed_kv", "index_keys", "candidates"]
