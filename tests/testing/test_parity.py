"""An independent implementation's outputs are met, and wrong rules are caught."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import megatron_dsv41.ops.mhc.ref as mhc
from megatron_dsv41.cli import main
from megatron_dsv41.modules.indexer import Indexer
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.parity import ParityCase, compare, run_transformer

FOLDER = Path(__file__).parents[1] / "data" / "parity"
CASES = ["text_fp32", "odd_length_fp32", "packed_fp32", "released_layout"]


@pytest.mark.parametrize("name", CASES)
def test_case_is_met(name):
    case = ParityCase.load(FOLDER / name)
    report = compare(case, run_transformer(case))
    assert report.failures == ()
    # The tolerances allow other summation orders; this one is far inside them.
    assert report.logits_abs_max < 1e-4 and report.tokens_within == 1.0
    assert all(deviation < 1e-4 for deviation in report.streams.values()) and len(report.streams) == 8
    assert len(report.gradients) == 272


@pytest.mark.parametrize("switch", ["window_kv_fp8", "main_kv_fp4", "index_mxfp4", "hsi", "yarn"])
def test_a_missing_rule_is_caught(switch):
    case = ParityCase.load(FOLDER / "text_fp32")
    report = compare(case, run_transformer(case, phase=Phase(**{switch: False})))
    assert report.failures and report.tokens_within < 0.9


def test_transposed_mixing_is_caught(monkeypatch):
    right = mhc.sinkhorn
    monkeypatch.setattr(mhc, "sinkhorn", lambda *a: right(*a).transpose(-1, -2))
    case = ParityCase.load(FOLDER / "text_fp32")
    assert compare(case, run_transformer(case)).failures


def test_gradient_where_the_reference_has_none_is_caught(monkeypatch):
    case = ParityCase.load(FOLDER / "text_fp32")
    monkeypatch.setattr(Indexer, "trained", property(lambda self: True))
    results = run_transformer(case)
    grads = {**results.grads, "layers.2.attn.indexer.wk.weight": torch.zeros(32, 32)}
    report = compare(case, type(results)(results.loss, results.logits, results.streams, grads))
    assert any("layers.2.attn.indexer.wk.weight has a gradient" in failure for failure in report.failures)


def test_nan_is_out_of_tolerance():
    case = ParityCase.load(FOLDER / "odd_length_fp32")
    results = run_transformer(case)
    report = compare(case, type(results)(float("nan"), results.logits * float("nan"), {}, results.grads))
    assert len(report.failures) >= 3
    assert report.summary()["loss_rel"] is None and report.summary()["ok"] is False


def test_command_prints_one_json_object_last(capsys):
    assert main(["parity", str(FOLDER / "packed_fp32"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert set(result) == {
        "loss_rel",
        "logits_abs_p999",
        "logits_cos",
        "tokens_within_1e-4",
        "grad_cos_min",
        "grad_norm_rel_max",
        "ok",
    }
    assert result["ok"] is True


def copy_case(tmp_path, name="text_fp32"):
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    return folder


def test_command_fails_on_changed_outputs(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = copy_case(tmp_path)
    expected = load_file(folder / "expected.safetensors")
    expected["logits"][0, 3] += 0.01
    expected["logits"][1] += 0.01
    save_file(expected, folder / "expected.safetensors")
    assert main(["parity", str(folder), "--json"]) == 1
    out = capsys.readouterr().out
    assert "out of tolerance" in out and json.loads(out.rstrip("\n").split("\n")[-1])["ok"] is False


def test_bf16_case_is_a_smoke_test(tmp_path):
    folder = copy_case(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    case = ParityCase.load(folder)
    report = compare(case, run_transformer(case))
    assert report.failures == () and report.loss_rel < 5e-3 and report.logits_cos > 0.95
    assert report.tokens_within < 0.9  # it is bf16 that ran


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: e.pop("loss"), "has no loss"),
        (
            lambda e: e.update(logits=e["logits"][..., :-1].clone()),
            r"logits must be \[2, 48, 400\], got \[2, 48, 399\]",
        ),
        (lambda e: e["input_ids"].fill_(400), "input_ids reach from 400 to 400, vocab_size is 400"),
        (lambda e: e.update({"streams.3": e["streams.3"][:, 1:].clone()}), r"streams.3 \[1, 47, 4, 64\] is not \[48,"),
        (lambda e: e.update({"grad.norm.wieght": torch.ones(64)}), "no tensor of the model; did you mean norm.weight"),
        (lambda e: e.update({"grad.norm.weight": torch.ones(65)}), r"\[65\], the model's tensor \[64\]"),
    ],
)
def test_recorded_outputs_that_do_not_fit_are_named(tmp_path, capsys, damage, message):
    from safetensors.torch import load_file, save_file

    folder = copy_case(tmp_path)
    expected = load_file(folder / "expected.safetensors")
    damage(expected)
    save_file(expected, folder / "expected.safetensors")
    with pytest.raises(ValueError, match=message):
        ParityCase.load(folder)
    assert main(["parity", str(folder), "--json"]) == 2
    result = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert result["ok"] is False and result["loss_rel"] is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.update(text_config=3), "text_config must be a mapping, got 3"),
        (lambda c: c["text_config"].update(rope_parameters=5), "rope_parameters must be a mapping, got 5"),
    ],
)
def test_config_of_another_form_is_named(tmp_path, capsys, damage, message):
    folder = copy_case(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    damage(config)
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["parity", str(folder), "--json"]) == 2
    result = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert result["ok"] is False and message in result["error"]


def test_an_error_of_ours_leaves_one_json_object_too(tmp_path, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("megatron_dsv41.testing.parity.compare", broken)
    with pytest.raises(ZeroDivisionError):
        main(["parity", str(FOLDER / "odd_length_fp32"), "--json"])
    result = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert result["ok"] is False and result["error"] == "ZeroDivisionError()"


def test_device_that_is_not_there_is_named(capsys):
    assert main(["parity", str(FOLDER / "odd_length_fp32"), "--device", "warp"]) == 2
    assert "--device warp cannot be used here" in capsys.readouterr().err


def test_damaged_recording_is_named(tmp_path):
    folder = copy_case(tmp_path)
    (folder / "expected.safetensors").write_bytes((folder / "expected.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="expected.safetensors cannot be read"):
        ParityCase.load(folder)


def test_gradient_recorded_without_its_norm_is_judged(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copy_case(tmp_path)
    expected = load_file(folder / "expected.safetensors")
    del expected["grad_norm.norm.weight"]
    expected["grad.norm.weight"] *= -1
    save_file(expected, folder / "expected.safetensors")
    case = ParityCase.load(folder)
    assert any("smallest cosine" in failure for failure in compare(case, run_transformer(case)).failures)


def test_folder_is_found_from_inside_and_through_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER / "packed_fp32")
    assert ParityCase.load(".").weights_folder.name == "text_fp32"
    (tmp_path / "link").symlink_to(FOLDER / "odd_length_fp32")
    assert ParityCase.load(tmp_path / "link").weights_folder.name == "text_fp32"


def test_folder_without_expected_outputs_is_named(tmp_path, capsys):
    folder = copy_case(tmp_path)
    (folder / "expected.safetensors").unlink()
    assert main(["parity", str(folder)]) == 2
    assert "is not a parity folder: it has no expected.safetensors" in capsys.readouterr().err
