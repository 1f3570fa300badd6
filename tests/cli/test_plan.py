import json
import subprocess
import sys

import pytest

from megatron_dsv41.cli import main
from megatron_dsv41.run_config import run_from_dict

RUN = """
model: {preset: tiny}
data: {train: corpus, seq_length: 128}
batch: {sequences: 8}
train: {steps: 100, precision: fp32}
schedule: {warmup: 10, stable: 40, min_lr: 1e-5}
optimizer: {lr: 1e-3}
checkpoint: {folder: runs/x}
"""


def planned(capsys, *arguments):
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_flash_shows_the_released_numbers(capsys):
    assert main(["plan", "--preset", "flash"]) == 0
    text = capsys.readouterr().out
    for number in ("763,205,315,794", "552,366,103,664", "7,894,958,080", "16,129,720,320", "890 B", "105.6 G"):
        assert number in text


def test_json_holds_what_the_tables_show(capsys):
    report = planned(capsys, "--preset", "flash")
    assert report["parameters"]["total"] == 763_205_315_794
    assert report["kv_bytes_per_token"] == 890
    assert len(report["layers"]) == 40
    assert report["layers"][30]["live"] == ["compressed_kv", "index_keys", "topk_indices", "candidates"]
    assert "schedule" not in report


def test_a_run_file_shows_its_steps_and_learning_rate(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    schedule = planned(capsys, str(file), "train.steps=200")["schedule"]
    assert (schedule["steps"], schedule["tokens_per_step"], schedule["tokens"]) == (200, 1024, 204_800)
    rates = dict(schedule["learning_rate"])
    assert rates[0] == 0.0
    assert rates[10] == rates[50] == 1e-3
    assert rates[200] == pytest.approx(1e-5)
    assert main(["plan", str(file)]) == 0
    assert "100 steps x 1,024 tokens = 102,400 tokens" in capsys.readouterr().out


def test_overrides_stand_on_either_side_of_options(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    report = planned(capsys, str(file), "train.steps=50", "--ranks", "2", "schedule.stable=10")
    assert report["schedule"]["steps"] == 50 and report["memory"]["layout"]["world"] == 2
    assert planned(capsys, "--ranks", "2", str(file), "train.steps=50", "schedule.stable=10") == report


def test_memory_of_large_stages_is_written_out(capsys):
    assert main(["plan", "--preset", "flash"]) == 0
    text = capsys.readouterr().out
    assert "1,497" in text and "e+03" not in text and "on 1 rank:" in text


def test_the_total_of_a_rank_has_its_owned_tables(capsys):
    run = ("--preset", "flash", "parallel.pp=4", "parallel.ep=32", "parallel.engram=128", "engram.table=float8")
    memory = planned(capsys, *run)["memory"]
    for stage in memory["stages"]:
        owned = stage["engram"]
        model = sum(stage[part] for part in ("weights", "gradients", "optimizer", "activations"))
        assert stage["total"] == pytest.approx(model + owned["rows"] + owned["exchange"]) and owned["exchange"] > 0
        assert owned["rows"] == sum(table[part] for table in memory["tables"] for part in ("served", "master", "state"))
    assert memory["largest"] == max(stage["total"] for stage in memory["stages"])
    shown = f"128 ranks: at most {memory['largest'] / 1e9:,.0f}; tp=1"
    assert main(["plan", *run]) == 0
    text = capsys.readouterr().out
    assert shown in text and "Engram rows  exchange  total" in text and "in host memory" not in text
    assert main(["plan", *run, "engram.memory=host"]) == 0
    assert "exchange  total  in host memory" in capsys.readouterr().out
    assert main(["plan", "--preset", "tiny"]) == 0
    assert "exchange" not in capsys.readouterr().out


def test_state_of_owned_tables_is_not_that_of_other_parameters(capsys):
    run = ("--preset", "tiny", "optimizer.name=published", "parallel.engram=2", "--ranks", "2")
    wide, narrow = (planned(capsys, *run, f"optimizer.momentum_dtype={kind}") for kind in ("float32", "bfloat16"))
    states = [report["memory"]["stages"][0]["engram"]["state"] for report in (wide, narrow)]
    assert states[1] == states[0] / 2
    rest = [group for group in wide["optimizer"] if group["role"] != "engram.embed.weight"]
    state = sum(group["state_bytes"] * group["parameters"] for group in rest)
    (stage,) = wide["memory"]["stages"]
    mean = state / sum(group["parameters"] for group in rest)
    assert stage["optimizer"] == pytest.approx(mean * stage["parameters"] / 2)  # divided over both ranks


def test_phases_count_owned_tables_too(capsys):
    run = ("--recipe", "pretrain-flash", "parallel.pp=8", "parallel.ep=64", "parallel.engram=64")
    report = planned(capsys, *run)
    assert report["phases"][0]["gigabytes"] == report["memory"]["largest"] / 1e9


def test_the_learning_rate_plot_is_a_png(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    assert main(["plan", str(file), "--plot", str(tmp_path / "lr.png")]) == 0
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lr.png", "run.yaml"]


def test_stages_hold_every_parameter_once(capsys):
    report = planned(capsys, "--preset", "flash", "parallel.pp=4")
    outside = report["parameters"]["by_kind"]["vision"] + report["parameters"]["by_kind"]["dspark"]
    held = sum(stage["parameters"] for stage in report["memory"]["stages"])
    assert held == report["parameters"]["total"] - outside


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--preset"),
        (["--preset", "flash", "model.hidden=1"], "model.hidden is not a setting"),
        (["--preset", "flash", "paralel.pp=2"], "did you mean parallel?"),
        (["--preset", "tiny", "parallel.pp=9"], "cannot fill 9 pipeline stages"),
        (["--preset", "tiny", "parallel.pp=2", "parallel.layout=Et|tttL"], "has 4 layers, the model has 8"),
        (["--preset", "tiny", "parallel.tp=2", "--ranks", "3"], "3 processes cannot be split into tp 2 x pp 1"),
        (["--preset", "tiny", "parallel.ep=4", "--ranks", "2"], "2 processes cannot be split into etp 1 x ep 4"),
        (["--preset", "tiny", "parallel.tp=3"], "parallel.tp 3 does not divide o_groups 4"),
        (["--preset", "tiny", "batch.sequences=8", "batch.micro=3"], "not a multiple of batch.micro 3"),
        (["--preset", "tiny", "parallel.cp=2", "data.seq_length=33"], "is not a multiple of the"),
        (["--preset", "tiny", "ops.csa2=tritn"], "no op has a provider 'tritn'; did you mean triton?"),
        (["--preset", "tiny", "megatron.train_iters=2"], "megatron.train_iters cannot be set"),
        (["--preset", "tiny", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["missing.yaml"], "missing.yaml does not exist"),
    ],
)
def test_mistakes_name_the_setting(capsys, arguments, words):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_updates_of_the_published_optimizer(capsys):
    report = planned(capsys, "--preset", "flash", "optimizer.name=published", "phase.index_loss=sparse")
    groups = {group["role"]: group for group in report["optimizer"]}
    kinds = report["parameters"]["by_kind"]
    router_biases = 40 * 2 * 384  # moved by their own rule
    moved = sum(number for kind, number in kinds.items() if kind not in ("vision", "dspark")) - router_biases
    assert sum(group["parameters"] for group in groups.values()) == moved
    assert groups["attn.wq_b.weight"]["matrices"] == 64 and groups["attn.wq_b.weight"]["matrix"] == [512, 1280]
    assert groups["ffn.experts.w13"]["matrices"] == 768 and groups["ffn.experts.w13"]["matrix"] == [2304, 5120]
    assert groups["engram.embed.weight"]["update"] == "sinkhorn" and groups["engram.embed.weight"]["lr_multiplier"] == 5
    adamw, own = planned(capsys, "--preset", "flash")["memory"]["stages"][0], report["memory"]["stages"][0]
    assert own["optimizer"] / adamw["optimizer"] == pytest.approx(8 / 12, rel=1e-3)  # one moment less
    assert groups["norm.weight"]["state_bytes"] == 12 and groups["attn.attn_sink"]["state_bytes"] == 8
    assert main(["plan", "--preset", "flash", "optimizer.name=published"]) == 0
    assert "64 x [512, 1280]" in capsys.readouterr().out


def test_cuts_say_what_crosses_and_what_else_could(capsys):
    long = ("--preset", "flash", "data.seq_length=65536", "parallel.pp=4")
    cuts = planned(capsys, *long)["cuts"]
    assert [(cut["layer"], cut["shadows"], cut["forward"], cut["backward"]) for cut in cuts] == [
        (10, [], 44048, 42000),
        (20, [], 40976, 40976),
        (30, [20], 47952, 43024),
    ]
    assert [cut["alternative"] and cut["alternative"]["forward"] for cut in cuts] == [44752, None, 53520]
    # Ranks that share a micro-batch send its cut once between them.
    assert planned(capsys, *long, "parallel.tp=2", "parallel.cp=2")["cuts"] == cuts
    assert main(["plan", *long, "parallel.vpp=2"]) == 0
    text = capsys.readouterr().out
    assert "every hop is filled up to the longest" in text and "kv keys top-k pool query, shadow of 20" in text


def test_interleaved_chunks_take_the_turns_that_training_takes(capsys):
    run = ("--preset", "tiny", "parallel.pp=2", "parallel.vpp=2")
    assert planned(capsys, *run)["memory"]["layout"]["num_micro_batches"] == 2  # a bare preset: the fewest
    assert main(["plan", *run, "batch.sequences=3"]) == 2
    assert "of the 3 in a step of a rank 1 remain" in capsys.readouterr().err


def test_a_phase_without_owned_tables_has_their_state(capsys, tmp_path):
    """Whatever the first phase has."""
    run = {"model": {"preset": "tiny"}, "data": {"train": "x", "seq_length": 64}, "batch": {"sequences": 4}}
    run |= {"train": {}, "checkpoint": {"folder": "x"}, "optimizer": {"name": "published"}}
    phases = [{"name": "own", "steps": 2, "parallel": {"engram": 2}}, {"name": "whole", "steps": 2}]
    sizes = {}
    for number in (0, 1):
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps(run | {"phases": phases[number:]}))
        sizes[number] = planned(capsys, str(file), "--ranks", "2")["phases"][-1]["gigabytes"]
    assert sizes[0] == sizes[1]


def test_traffic_divides_over_the_ranks_that_share_a_micro_batch(capsys):
    run = ("--preset", "flash", "data.seq_length=65536", "parallel.pp=4")
    one, four = (planned(capsys, *run, *more)["traffic"] for more in ((), ("parallel.tp=4", "parallel.sp=true")))
    assert [stage["pipeline"]["forward"] for stage in four] == [stage["pipeline"]["forward"] / 4 for stage in one]
    assert one[0]["tensor"] == {"forward": 0.0, "backward": 0.0} and four[0]["tensor"]["forward"] > 0


def test_gathered_tokens_are_counted_and_others_left_to_the_routing(capsys):
    two, sixteen = (("--preset", "flash", "data.seq_length=4096", f"parallel.ep={ep}") for ep in (2, 16))
    (stage,) = planned(capsys, *two)["traffic"]
    rows, weights, numbers = 4096 * 5120 * 2, 4096 * 6 * 4, 4096 * 6 * 8
    assert stage["expert"] == {"forward": 40 * (2 * rows + weights + numbers), "backward": 40 * (2 * rows + weights)}
    assert planned(capsys, *sixteen)["traffic"][0]["expert"] is None
    for run, cell in ((two, "3367 / 3359"), (sixteen, "by the routing")):
        assert main(["plan", *run]) == 0
        assert cell in capsys.readouterr().out


def test_planning_needs_no_torch():
    code = (
        "import sys; from megatron_dsv41.cli import main; main(['plan', '--preset', 'flash']);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_run_learning_rate_never_leaves_its_bounds():
    run = run_from_dict(
        {
            "model": {"preset": "tiny"},
            "data": {"train": "x", "seq_length": 8},
            "batch": {"sequences": 1},
            "train": {"steps": 50},
            "schedule": {"warmup": 5, "stable": 5, "cosine": 20, "min_lr": 1e-6},
            "checkpoint": {"folder": "x"},
        }
    )
    rates = [run.learning_rate(step) for step in range(1, 51)]
    assert max(rates) == run.optimizer.lr
    assert rates[30:] == [1e-6] * 20


def test_low_precision_shows_every_linear_and_refuses_what_the_start_would(capsys):
    report = planned(capsys, "--preset", "flash", "parallel.tp=2", "precision.fp8=block", "precision.roles=[attn.*]")
    rows = {row["role"]: row for row in report["precision"]["linears"]}
    assert rows["attn.wq_b"]["multiplies_in"] == "block" and rows["attn.wq_b"]["outputs"] == 16384
    assert rows["ffn.shared_experts.w2"]["multiplies_in"] == "bf16" and rows["ffn.shared_experts.w2"]["inputs"] == 1152
    assert rows["head"]["reason"] == "logits are fp32"
    assert "compute capability 9.0 or higher" in report["precision"]["needs"]
    assert "precision" not in planned(capsys, "--preset", "flash")
    assert main(["plan", "--preset", "flash", "precision.fp8=block", "train.precision=fp32"]) == 2
    assert "it needs train.precision=bf16" in capsys.readouterr().err
