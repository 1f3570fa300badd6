"""The run file: numbers, overrides, round trip, and an error with a name for every mistake."""

from pathlib import Path

import pytest
import yaml

from megatron_dsv41.run_config import load_run, run_from_dict

RECIPE = Path(__file__).parent.parent / "examples" / "flash_recipe.yaml"

MINIMAL = """
model: {preset: tiny}
data: {train: corpus/train, seq_length: 64}
batch: {sequences: 4}
train: {steps: 100, precision: fp32}
checkpoint: {folder: runs/a}
"""


def make(*overrides: str):
    return run_from_dict(yaml.safe_load(MINIMAL), overrides)


def test_yaml_1_2_numbers_are_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "optimizer: {eps: 1e-20, lr: 3E-4}\nschedule: {warmup: 1e1}\n")
    run = load_run(path, ["model.overrides.rms_norm_eps=1e-6", "train.tokens=1e6", "train.steps=null"])
    assert (run.optimizer.eps, run.optimizer.lr, run.schedule.warmup) == (1e-20, 3e-4, 10)
    assert run.architecture().rms_norm_eps == 1e-6
    assert run.train.tokens == 1_000_000 and run.steps == 3907


def test_round_trip():
    run = make("ops.csa2.select=ref", "data.valid=[a, b]", "logging.wandb=off", "phase.index_loss=off")
    assert run.ops == {"csa2.select": "ref"} and run.data.valid == {"a": 1.0, "b": 1.0}
    assert run_from_dict(yaml.safe_load(run.to_yaml())) == run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1", r"optimizer\.learning_rate is not a setting"),
        ("optimzer.lr=1", r"optimzer is not a setting; did you mean optimizer\?"),
        ("optimizer.weight_deacy=1", r"optimizer\.weight_deacy is not a setting; did you mean weight_decay\?"),
        ("model.overrides.hiden_size=1", r"model\.hiden_size is not a model setting; did you mean hidden_size\?"),
        ("model.hidden_size=1", r"fields of the architecture are model\.overrides\.hidden_size"),
        ("model.preset=tinny", r"model\.preset 'tinny' does not exist; did you mean tiny\?"),
        ("train.precision=fp8", r"train\.precision must be one of fp32, bf16, got 'fp8'"),
        ("train.steps=ten", r"train\.steps must be of type int, got 'ten'"),
        ("optimizer.lr=.inf", r"optimizer\.lr must be a finite number, got inf"),
        ("optimizer.clip=.nan", r"optimizer\.clip must be a finite number, got nan"),
        ("model={path: nowhere}", r"nowhere does not exist: give a config\.json"),
        ("train.steps=1.5", r"train\.steps must be of type int, got 1\.5"),
        ("train.tokens=1000", r"exactly one of train\.steps and train\.tokens"),
        ("batch.tokens=100", r"exactly one of batch\.sequences and batch\.tokens; =null takes one"),
        ("schedule.warmup=200", r"warmup 200 \+ stable 0 \+ cosine 0 steps exceed the run's 100 steps"),
        ("schedule.min_lr=1", r"schedule\.min_lr 1\.0 exceeds optimizer\.lr"),
        ("eval.interval=10", r"data\.valid is empty"),
        ("data.train={a: 0}", r"weight of a must be positive"),
        ("data.train=[a, a]", r"names a prefix twice"),
        ("parallel.tp=0", r"parallel\.tp must be at least 1"),
        ("parallel.sp=true", r"needs parallel\.tp > 1"),
        ("phase.index_loss=sometimes", r"phase\.index_loss must be one of"),
        ("checkpoint.folder=null", r"checkpoint\.folder is required"),
        ("train.steps", r"must look like section\.key=value"),
        ("train.steps.x=1", r"steps is a value, not a section"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        run = make(override)
        run.architecture()


def test_missing_file_and_bad_yaml(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist"):
        load_run(tmp_path / "nowhere.yaml")
    with pytest.raises(ValueError, match="is a folder: name the YAML file"):
        load_run(tmp_path)
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_run(tmp_path / "bad.yaml")


def test_learning_rate_has_four_parts():
    run = make("schedule={warmup: 10, stable: 20, cosine: 50, min_lr: 1e-5}", "optimizer.lr=1e-3", "optimizer.clip=0")
    assert run.learning_rate(5) == pytest.approx(5e-4)
    assert run.learning_rate(10) == run.learning_rate(30) == 1e-3
    assert run.learning_rate(55) == pytest.approx((1e-3 + 1e-5) / 2)
    assert run.learning_rate(80) == pytest.approx(1e-5) and run.learning_rate(100) == 1e-5


def test_tokens_decide_steps_and_batch():
    run = make("batch={tokens: 1024, micro: 2}", "train={tokens: 10000}", "schedule={unit: tokens, warmup: 2048}")
    assert (run.sequences_per_step, run.tokens_per_step, run.steps) == (16, 1024, 10)
    assert run.lr_steps == (2, 0, 8)
    with pytest.raises(ValueError, match="not a multiple of data.seq_length 64: set it to 960"):
        make("batch={tokens: 1000}")


def test_the_published_recipe():
    run = load_run(RECIPE)
    assert run.tokens_per_step == 100_663_296 and run.steps == 447_035
    at = {step: run.learning_rate(step) for step in (1000, 2000, 278_155, 400_000, 447_035)}
    assert at[1000] == pytest.approx(1.3e-4) and at[2000] == at[278_155] == 2.6e-4
    assert at[400_000] == at[447_035] == pytest.approx(2.6e-5)
    middle = (278_155 + 397_364) // 2
    assert run.learning_rate(middle) == pytest.approx((2.6e-4 + 2.6e-5) / 2, rel=1e-3)
    short = load_run(RECIPE, ["train.tokens=450_000_000_000"])
    assert short.learning_rate(short.steps // 2) == 2.6e-4 and short.learning_rate(10) == pytest.approx(1.3e-4)


def test_the_published_shape_takes_no_other_setting():
    with pytest.raises(ValueError, match="leave out the other settings"):
        make("schedule.shape=published", "schedule.warmup=5")
