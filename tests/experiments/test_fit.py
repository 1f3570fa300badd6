"""Known laws, noise, and what comes back."""

import numpy as np
import pytest

from megatron_dsv41.experiments.collect import Row, read_rows, write_rows
from megatron_dsv41.experiments.fit import Cells, Refused, fit_cells
from megatron_dsv41.experiments.fit_minima import fit_minimum_law, fit_parabola, iso_flop_profiles
from megatron_dsv41.experiments.fit_predict import compute_multiplier, leave_largest_out, leave_one_out
from megatron_dsv41.experiments.fit_report import fit_report, predict_report
from megatron_dsv41.experiments.laws import Law, fit_law

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
SIZES = (1e7, 3e7, 1e8, 3e8, 1e9)
MULTIPLES = (5.0, 20.0, 80.0)
NOISE = 2e-3


def loss_of(n, d):
    return TRUTH["E"] + TRUTH["A"] / n ** TRUTH["alpha"] + TRUTH["B"] / d ** TRUTH["beta"]


def row(n, d, loss, *, arm="base", depth=8, seed=1, kind="tokens", size=1.0, flops=None, lr_factor=1.0, lr=1e-3):
    return Row(
        cell=f"{arm}-d{depth}-{kind}{size:g}-lr{lr_factor:g}-s{seed}",
        arm=arm,
        depth=depth,
        seed=seed,
        kind=kind,
        size=size,
        lr_factor=lr_factor,
        batch_factor=1.0,
        n=dict.fromkeys(("active", "prefill", "backbone", "non_embedding", "total", "flops"), n),
        tokens=d,
        flops=flops or 6 * n * d,
        loss=loss,
        train_loss=None,
        lr=lr,
        batch_tokens=1024,
        seconds=None,
        tokens_per_second=None,
        commit="c",
        config_digest="g",
        data_digest="d",
        wandb_id=None,
    )


def ladder_rows(seed=0, noise=NOISE, seeds=(1, 2), form=loss_of, multiples=MULTIPLES, sizes=SIZES):
    random = np.random.default_rng(seed)
    return [
        row(n, n * m, form(n, n * m) * np.exp(random.normal(0, noise)), depth=8 + 2 * i, seed=s, size=m)
        for i, n in enumerate(sizes)
        for m in multiples
        for s in seeds
    ]


def cells(rows):
    n, d, loss = (np.array(v) for v in zip(*((r.n["active"], r.tokens, r.loss) for r in rows), strict=True))
    return Cells(("N", "D"), (n, d), loss)


def test_without_noise_the_law_is_found_exactly():
    found = cells(ladder_rows(noise=0))
    law = fit_law(found.variables, found.loss).as_published()
    assert law == pytest.approx(TRUTH, rel=1e-3)


def test_a_few_broken_runs_do_not_move_the_law():
    found = cells(ladder_rows(noise=1e-4))
    found.loss[3] *= 1.2
    found.loss[20] *= 1.1
    law = fit_law(found.variables, found.loss).as_published()
    assert law["E"] == pytest.approx(TRUTH["E"], rel=0.02)
    assert law["alpha"] == pytest.approx(TRUTH["alpha"], rel=0.05)


def test_a_law_inverts():
    law = Law(1.5, (2.0,), (0.3,), (1e15,))
    assert float(law(law.invert(2.5))) == pytest.approx(2.5)
    assert np.isnan(law.invert(1.4))


def coverage(trials, samples):
    """Share of 95 % intervals that hold the truth, by parameter."""
    held = dict.fromkeys(TRUTH, 0)
    for trial in range(trials):
        ends = fit_cells(cells(ladder_rows(seed=trial)), samples=samples).intervals()
        for name, value in TRUTH.items():
            held[name] += ends[name][0] <= value <= ends[name][1]
    return {name: count / trials for name, count in held.items()}


def test_intervals_hold_the_truth():
    assert min(coverage(12, 60).values()) >= 0.75  # 12 of 12 trials at 95 %: fewer than 9 has a chance of 3e-4


@pytest.mark.slow
def test_intervals_hold_the_truth_in_90_of_100():
    assert min(coverage(200, 100).values()) >= 0.9


def test_a_wrong_form_is_flagged_and_not_extrapolated():
    rows = ladder_rows(form=lambda n, d: 2.0 + 0.4 * np.cos(np.log(n)) + 410.7 / d**0.28)
    fit = fit_cells(cells(rows), samples=5)
    assert fit.lack_of_fit < 1e-6 and "does not describe" in fit.problems[-1]
    with pytest.raises(Refused, match="no extrapolation"):
        leave_largest_out(rows, "active")


def test_the_right_form_is_not_flagged():
    fits = [fit_cells(cells(ladder_rows(seed=s)), samples=2) for s in range(5)]
    assert [(fit.problems, fit.remarks) for fit in fits] == [((), ())] * 5


def test_a_form_that_is_a_little_wrong_predicts_with_intervals_from_its_residuals():
    rows = ladder_rows(noise=2e-4, form=lambda n, d: loss_of(n, d) * (1 + 0.01 * np.cos(2 * np.log(n * d))))
    fit = fit_cells(cells(rows), samples=5)
    assert fit.lack_of_fit < 1e-6 and fit.problems == () and "does not describe" in fit.remarks[-1]
    held = leave_largest_out(rows, "active")
    assert held.problems and all(p.low < p.measured < p.high for p in held.predictions)
    assert min(p.high - p.low for p in held.predictions) > 0.01  # seeds agree to 0.0002


def with_slow_terms(n, d):
    """A term that falls so slowly that it looks like a constant, and no constant."""
    return 8.8 / n**0.11 + 630 / d**0.49


def test_a_loss_may_be_known_better_than_the_parameters():
    rows = ladder_rows(form=with_slow_terms, noise=1e-3, multiples=(0.5, 1), sizes=(1.9e5, 3e5, 3.3e5, 4.7e5, 7.9e5))
    fit = fit_cells(cells([r for r in rows if r.depth < 16]), samples=5)
    assert fit.problems == () and "do not determine single parameters" in fit.remarks[0]
    held = leave_largest_out(rows, "active")
    assert held.unsigned < 0.02
    assert fit.remarks[0] in held.problems


def test_a_loss_that_is_left_open_is_refused():
    with pytest.raises(Refused, match="leave depth 16 with .* open"):
        leave_largest_out(ladder_rows(noise=0.15), "active")


def test_intervals_of_held_out_losses_hold_them():
    found = [p for seed in range(20) for p in leave_largest_out(ladder_rows(seed=seed), "active").predictions]
    truth = [loss_of(SIZES[-1], p.tokens) for p in found]
    held = [p.low <= value <= p.high for p, value in zip(found, truth, strict=True)]
    assert sum(held) >= 0.8 * len(held)  # three dependent points of each of 20 ladders


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (ladder_rows()[:8], "more different cells"),
        ([r for r in ladder_rows(multiples=(1, 2, 4, 8)) if r.depth < 12], "at least 3 values of N"),
        (ladder_rows(multiples=(5.0,)) + ladder_rows(multiples=(5.01,)), "grow together"),
    ],
)
def test_too_few_or_degenerate_cells_are_refused(rows, reason):
    with pytest.raises(Refused, match=reason):
        fit_cells(cells(rows))


def test_the_largest_rung_is_predicted():
    held = leave_largest_out(ladder_rows(), "active")
    assert {p.depth for p in held.predictions} == {16}
    assert held.unsigned < 0.01
    assert all(p.low < p.predicted < p.high for p in held.predictions)


def test_every_point_is_predicted_by_the_others():
    held = leave_one_out(ladder_rows(multiples=(5.0, 80.0)), "active")
    assert len(held.predictions) == 10
    assert abs(held.signed) <= held.unsigned < 0.01


def test_an_arm_that_saves_half_the_compute_is_worth_two():
    base = ladder_rows()
    random = np.random.default_rng(9)
    arm = [
        row(
            n, 20 * n, loss_of(n, 20 * n) * np.exp(random.normal(0, NOISE)), arm="good", size=20.0, flops=3 * n * 20 * n
        )
        for n in SIZES[1:4]
    ]
    found = compute_multiplier([*base, *arm], "good")
    assert found.cells == 3
    assert found.low < 2 < found.high
    assert found.value == pytest.approx(2, rel=0.15)


def test_an_arm_without_a_base_curve_is_refused():
    arm = [row(1e8, 1e9, 3.0, arm="lonely", size=7.0)]
    with pytest.raises(Refused, match="no base curve"):
        compute_multiplier([*ladder_rows(), *arm], "lonely")


def iso_rows(budgets=(1e15, 1e16, 1e17), sizes=5, shift=0.0):
    found = []
    for budget in budgets:
        best = 0.1 * budget**0.5 * np.exp(shift)
        for i in range(sizes):
            n = 0.1 * budget**0.5 * 2.0 ** (i - sizes // 2)
            loss = 3 + 0.05 * (np.log(n) - np.log(best)) ** 2
            found.append(row(n, budget / 6 / n, loss, kind="flops", size=budget, depth=8 + 2 * i, flops=budget))
    return found


def test_iso_flop_minima_give_the_law_of_the_best_size():
    profiles = iso_flop_profiles(iso_rows())
    law = fit_minimum_law(profiles, lambda r: r.n["active"], samples=5)
    assert (law.k, law.power) == pytest.approx((0.1, 0.5), rel=1e-6)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([(1, 3.0), (2, 2.0), (4, 3.0)], "at least 4"),
        ([(1, 4.0), (2, 3.0), (4, 2.1), (8, 1.5)], "outside"),
        ([(1, 1.0), (2, 2.0), (4, 2.0), (8, 1.0)], "bends downwards"),
    ],
)
def test_a_minimum_at_the_edge_is_none(points, reason):
    with pytest.raises(Refused, match=reason):
        fit_parabola(points)


def test_learning_rate_sweeps_give_a_law():
    rows = [
        row(n, n, 3 + 0.1 * np.log(f * 2.0**0.5) ** 2, depth=8 + i, lr_factor=f, lr=f * n**-0.3)
        for i, n in enumerate((1e6, 1e7, 1e8))
        for f in (0.25, 0.5, 1.0, 2.0)
    ]
    law = fit_report(rows, ["active"])["sweeps"]["lr"]["law"]
    assert law["power"] == pytest.approx(-0.3)


def test_reports_are_plain_and_say_what_was_refused():
    rows = ladder_rows()
    fitted, predicted = fit_report(rows, ["active"]), predict_report(rows[:6], ["active"])
    assert fitted["loss_nd"]["active"]["parameters"]["E"]["low"] < TRUTH["E"]
    assert set(fitted["loss_c"]) == {"5", "20", "80"}
    assert "needs more different cells" in predicted["largest"]["active"]["refused"]


def test_rows_read_back(tmp_path):
    rows = ladder_rows()
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path) == rows
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(rows)
