"""Phases of a run file: lengths, what they change, rates, and what they must not change."""

import pytest
import yaml

from megatron_dsv41.run_config import run_from_dict

RUN = """
model: {preset: tiny}
data: {train: corpus/train, seq_length: 64}
batch: {tokens: 256, micro: 2}
train: {precision: fp32}
checkpoint: {folder: runs/a}
optimizer: {lr: 1.0e-3}
schedule: {warmup: 4, stable: 6, min_lr: 1.0e-4}
phases:
- {name: short, steps: 10}
- {name: long, tokens: 1280, data: {seq_length: 128}, batch: {micro: 1}, phase: {hsi: false}}
- {name: down, steps: 5, lr: {end: 0.0}}
- {name: up, steps: 4, lr: {end: 2.0e-3, shape: cosine}}
"""


def make(*overrides: str):
    return run_from_dict(yaml.safe_load(RUN), overrides)


def test_legs_follow_each_other():
    run = make()
    assert [(leg.name, leg.start, leg.end) for leg in run.legs] == [
        ("short", 0, 10),
        ("long", 10, 15),
        ("down", 15, 20),
        ("up", 20, 24),
    ]
    assert run.steps == 24
    short, long, down, _ = (leg.run for leg in run.legs)
    assert (short.data.seq_length, short.sequences_per_step, short.batch.micro, short.phase.hsi) == (64, 4, 2, True)
    assert (long.data.seq_length, long.sequences_per_step, long.batch.micro, long.phase.hsi) == (128, 2, 1, False)
    assert down.data.seq_length == 64 and down.phase.hsi  # a phase changes the run's settings, not its predecessor's
    assert [leg.run.steps for leg in run.legs] == [10, 15, 20, 24]


def test_a_checkpoint_is_of_the_phase_that_ends_with_it():
    run = make()
    assert [run.leg_of(step).name for step in (1, 10, 11, 15, 20, 21, 24)] == [
        *("short", "short", "long", "long", "down", "up", "up")
    ]


def test_rates_go_on_where_the_last_phase_ended():
    run = make()
    rates = [run.learning_rate(step) for step in range(25)]
    plain = run_from_dict(yaml.safe_load(RUN) | {"phases": [], "train": {"steps": 24}})
    assert rates[:15] == [plain.learning_rate(step) for step in range(15)]
    assert rates[15] == plain.learning_rate(15) and rates[20] == 0.0 and rates[24] == 2e-3
    assert rates[17] == pytest.approx(rates[15] * 3 / 5) and rates[22] == pytest.approx(1e-3)


def test_round_trip():
    run = make()
    assert run_from_dict(yaml.safe_load(run.to_yaml())) == run


def test_a_run_without_phases_is_one_leg():
    run = run_from_dict(yaml.safe_load(RUN) | {"phases": [], "train": {"steps": 24}})
    (leg,) = run.legs
    assert (leg.start, leg.end) == (0, 24) and leg.run is run


def test_index_loss_ramps_up_in_its_phase():
    phase = make("phase.index_loss_ramp=4").phase
    assert [phase.index_scale(step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert make().phase.index_scale(1) == 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.0.steps=null", r"phase short needs exactly one of steps and tokens"),
        ("phases.1.name=short", r"two phases are called 'short'"),
        ("phases.1.data.seq_length=96", r"phase long: batch\.tokens 256 is not a multiple of data\.seq_length 96"),
        ("phases.1.data.seq_lenght=96", r"phase long: data\.seq_lenght is not a setting; did you mean seq_length\?"),
        ("phases.1.phase.index_loss=maybe", r"phase long: phase\.index_loss must be one of"),
        ("phases.1.train={seed: 3}", r"phase long cannot change train\.seed: it belongs to the run"),
        ("phases.1.batch.tokens=512", r"phase long cannot change batch\.tokens: the batch in tokens is constant"),
        ("phases.1.checkpoint={folder: b}", r"phases\.1\.checkpoint is not a setting"),
        ("phases.2.lr.end=-1", r"lr\.end must not be negative"),
        ("phases.7.steps=3", r"phases has 4 entries, there is no 7"),
        ("train.steps=5", r"the length of a run with phases is theirs"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        make(override)


def test_sequences_of_another_length_need_a_batch_in_tokens():
    with pytest.raises(ValueError, match="phase long: sequences of 128 make a batch of 512 tokens, the run's has 256"):
        make("batch.tokens=null", "batch.sequences=4")
