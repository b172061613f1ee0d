"""Calibration recovers the parameters that made the data; error figures are what they say."""

import math
import re
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from darts_parallel.config.schema import config_dir
from darts_parallel.planner.figure_posterior import read_correlation
from darts_parallel.problem.software import read_software
from experiments import calibrate as command
from experiments.calibrate import CalibrationOptions
from experiments.calibration.calibrated import (
    QUANTITIES,
    SHIPPED,
    Calibrated,
    Parameters,
    Place,
    write_fit,
)
from experiments.calibration.errors import spearman, summarise
from experiments.calibration.fit import Residuals, fit, posterior, residuals
from experiments.calibration.folds import (
    FLOOR,
    MODEL,
    NORMAL,
    HeldOut,
    constant_mfu,
    cross_validate,
    folds,
    job_rankings,
    misfits,
    regret,
    spreads,
    standardized,
    width_of,
)
from experiments.calibration.predict import predict
from experiments.calibration.preset_files import LINK, MARK, three_digits, write_presets
from experiments.calibration.problems import MeasuredCase, device_config
from experiments.calibration.report import rival_lines
from experiments.data.runs import read_runs
from tests.support.measured_files import cases_of, write_rows

FITTED = tuple(
    replace(q, sd={scope: 20 * sd for scope, sd in list(q.sd.items())[:2]})
    for q in QUANTITIES
    if q.name in ("gemm_efficiency", "inter_efficiency", "reserved_GiB")
)
"""With priors so wide that eight runs outweigh them."""
GRID = [
    {
        "hidden": hidden,
        "n_gpus": gpus,
        "dp": dp,
        "tp": tp,
        "global_batch": str(8 * int(dp)),
        "zero": zero,
        "memory_gb": "1",
        "model": f"GPT-{hidden}",
    }
    for hidden in ("1024", "4096")
    for gpus, dp, tp, zero in (
        ("8", "8", "1", "1"),
        ("8", "2", "4", "0"),
        ("32", "32", "1", "3"),
        ("32", "8", "4", "1"),
    )
]


def invented_cases(
    folder: Path, latent: torch.Tensor, quantities: tuple[object, ...] = FITTED
) -> list[MeasuredCase]:
    """Runs whose measured figures are the model's own under known parameters."""
    write_rows(folder / "runs.csv", GRID)
    blank = cases_of(folder)
    parameters = Parameters([Place.of_run(case.run) for case in blank], FITTED)
    rows = []
    for cells, case in zip(GRID, blank, strict=True):
        with torch.no_grad():
            truth = predict(case, parameters.values(latent, Place.of_run(case.run)))
        rows.append(
            cells
            | {
                "iteration_s": repr(float(truth.seconds)),
                "memory_gb": repr(float(truth.memory) / 2**30),
            }
        )
    write_rows(folder / "runs.csv", rows)
    return cases_of(folder)


def test_calibration_recovers_the_parameters_that_made_the_data(tmp_path: Path) -> None:
    # base and own deviation of gemm_efficiency, reserved_GiB and inter_efficiency
    truth = torch.tensor([-0.2, -0.15, 0.3, 0.2, -0.8, -0.6], dtype=torch.float64)
    cases = invented_cases(tmp_path, truth)
    parameters = Parameters([Place.of_run(case.run) for case in cases], FITTED)
    latent, found = fit(
        cases, parameters, parameters.zero() - 3.0
    )  # whole steps would pass the minimum
    assert found.error.abs().max() < 0.01
    for name, tolerance in (
        ("gemm_efficiency", 0.01),
        ("inter_efficiency", 0.03),
        ("reserved_GiB", 0.05),
    ):
        place = Place.of_run(cases[0].run)
        fitted = parameters.values(latent, place)[name]
        made, start = (
            parameters.values(latent, place)[name] for latent in (truth, parameters.zero())
        )
        assert float(fitted) == pytest.approx(float(made), rel=tolerance)
        assert abs(float(fitted / start) - 1) > 3 * tolerance


def test_the_jacobian_equals_finite_differences(tmp_path: Path) -> None:
    write_rows(tmp_path / "runs.csv", GRID[7:8])
    cases = cases_of(tmp_path)
    parameters = Parameters([Place.of_run(case.run) for case in cases])
    latent = 0.1 * torch.randn(
        len(parameters), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = residuals(cases, parameters, latent)
    for column in range(0, len(parameters), 8):
        move = torch.zeros_like(latent)
        move[column] = 1e-5
        up, down = (residuals(cases, parameters, latent + sign * move).error for sign in (1, -1))
        torch.testing.assert_close(
            found.jacobian[:, column], (up - down) / 2e-5, rtol=1e-4, atol=1e-7
        )


def test_held_out_runs_are_predicted_without_their_own_measurement(tmp_path: Path) -> None:
    cases = invented_cases(
        tmp_path, torch.tensor([-0.2, -0.1, 0.3, 0.2, -0.4, -0.3], dtype=torch.float64)
    )
    parameters = Parameters([Place.of_run(case.run) for case in cases], FITTED)
    latent, found = fit(cases, parameters, steps=20)
    assert folds(cases, "model").keys() == {"GPT-1024", "GPT-4096"}
    results = cross_validate(cases, parameters, latent, found, "model")
    assert [h.part for h in results] == ["seconds", "memory", "fit"] * len(cases)
    assert all(abs(held.error) < 0.05 for held in results if held.part == "seconds")
    everything = cross_validate(cases, parameters, latent, found, "source")
    with torch.no_grad():
        prior = predict(
            everything[0].case,
            parameters.values(parameters.zero(), Place.of_run(everything[0].case.run)),
        )
    assert everything[0].predicted == pytest.approx(float(prior.seconds), rel=1e-6)
    # the fit to no run is the prior, and so are the slopes there
    own = residuals([everything[0].case], parameters, parameters.zero())
    variance = float(own.jacobian[0].square() @ parameters.unseen_sd.square())
    assert everything[0].variance == pytest.approx(variance, rel=1e-6)


def test_the_command_writes_files_that_validation_and_the_search_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "experiments.calibration.preset_files.device_names", lambda: ["a100_80", "b200"]
    )
    monkeypatch.setattr(command, "read_runs", list)
    (tmp_path / "data").mkdir()
    invented_cases(tmp_path / "data", torch.zeros(6, dtype=torch.float64))
    out = tmp_path / "new" / "folder"
    options = CalibrationOptions(
        data=str(tmp_path / "data"), out=str(out), steps=2, cross_validate=[]
    )
    assert command.calibrate(options) == 0
    fitted = Calibrated.read(out / "calibrated.yaml")
    shipped = Calibrated.read(SHIPPED)
    assert {key[0] for key in fitted.numbers} == {key[0] for key in shipped.numbers}
    assert all(math.isfinite(sd) for _, sd in fitted.numbers.values())
    assert (
        "prior_sd: {base: 0.4, device: 0.3," in (out / "calibrated.yaml").read_text()
    )  # not the fit's 0.1
    text = (out / "device" / "b200.yaml").read_text()
    assert re.search(r"(?s)NVIDIA HGX B200 data sheet.*no runs on this GPU", text)
    assert "fitted to runs on this GPU" in (out / "device" / "a100_80.yaml").read_text()


def test_calibration_rewrites_the_devices_of_data_sheets_and_no_invented_one(
    tmp_path: Path,
) -> None:
    write_presets(tmp_path, Calibrated.read(SHIPPED), "(a test)")  # as shipped=true does into conf
    shipped = {
        file.stem: file.read_text() for file in (Path(config_dir()) / "device").glob("*.yaml")
    }
    invented = {
        name for name, text in shipped.items() if "invented" in text or "not of any machine" in text
    }
    assert {"toy", "toy_fast", "small", "cpu"} <= invented
    written = {file.stem for file in (tmp_path / "device").iterdir()}
    assert written == shipped.keys() - invented
    for name in written:
        text = (tmp_path / "device" / f"{name}.yaml").read_text()
        assert text.split(MARK)[0] == shipped[name].split(MARK)[0]
    for file in (Path(config_dir()) / "cluster").glob("*.yaml"):
        text = file.read_text()
        # every link with an efficiency is rewritten
        assert len(LINK.findall(text)) == text.count(", efficiency: "), file.stem
    for file in (tmp_path / "cluster").iterdir():
        assert not any(f"device: {name}," in file.read_text() for name in invented), file.stem
    for file in tmp_path.glob("*/*.yaml"):  # one that the last fit did not rewrite is stale
        conf = Path(config_dir()) / file.relative_to(tmp_path)
        mine, theirs = (re.sub(rf"{MARK}.*", "", f.read_text()) for f in (file, conf))
        assert mine == theirs, file.stem


HOP = "intra_latency_us"


def test_shipped_parameters_are_physical_and_the_files_of_devices_and_frameworks_give_them() -> (
    None
):
    fitted = Calibrated.read()
    quantities = {q.name: q for q in QUANTITIES}
    for device, framework in product(fitted.names("device"), fitted.names("framework")):
        file = {"a100": "a100_80"}.get(device, device)
        framework = "" if framework == "default" else framework
        named = read_software(framework or None)
        own = replace(named, runs={}).on(file, device_config(file))
        for name, value in fitted.at(Place(device, framework, "nvlink4", "infiniband")).items():
            assert quantities[name].above < float(value), (device, framework, name)
            assert float(value) < 1.0 or not quantities[name].share, (device, framework, name)
            if name in ("gemm_efficiency", "attention_efficiency", "streaming_factor"):
                assert getattr(own, name) == pytest.approx(float(value), rel=6e-3), (
                    device,
                    framework,
                    name,
                )
    assert min(sd for _, sd in fitted.numbers.values()) > 0
    for link in ("nvlink2", "nvlink3", "nvlink4", "nvlink5"):
        # nccl-tests: some 19 us for the smallest all-reduce of 8 GPUs, six hops
        assert 1.5 < float(fitted.at(Place("h100", "nemo", link, "infiniband"))[HOP]) < 6.0


def test_the_file_keeps_the_posterior(tmp_path: Path) -> None:
    places = [
        Place("a100", "nemo", "nvlink3", "roce"),
        Place("h100", "jax", "nvlink4", "infiniband"),
    ]
    parameters = Parameters(places)
    rows = torch.randn(
        40, len(parameters), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = Residuals(
        torch.arange(40),
        torch.zeros(40),
        torch.zeros(40, dtype=torch.float64),
        rows,
        torch.zeros(40, dtype=torch.bool),
    )
    covariance = posterior(found, parameters)
    prior = torch.diag(parameters.sd**2)
    assert (torch.linalg.eigvalsh(prior - covariance) > -1e-9).all()  # data never make it wider
    fitted = (parameters, parameters.zero(), covariance)
    write_fit(tmp_path / "c.yaml", *fitted, ["a test"], {"seconds": {"family": 0.1}})
    read = Calibrated.read(tmp_path / "c.yaml")
    assert list(read.numbers) == parameters.keys
    sds = torch.diagonal(covariance).sqrt()
    assert [sd for _, sd in read.numbers.values()] == pytest.approx(sds.tolist(), rel=1e-2)
    correlation = read_correlation(tmp_path / "c.npz", len(parameters))
    whole = covariance / torch.outer(sds, sds)
    torch.testing.assert_close(correlation, whole, rtol=0.0, atol=0.5 / 127 + 1e-12)


def test_deviations_of_device_software_and_their_pair_add_up() -> None:
    place = Place("a100", "nemo", "nvlink3", "roce")
    parameters = Parameters([place])
    quantity = next(q for q in QUANTITIES if q.name == "gemm_efficiency")
    latent = parameters.zero()
    names = {"base": "", "device": "a100", "framework": "nemo", "device+framework": "a100+nemo"}
    for scope, name in names.items():
        latent[parameters.index["gemm_efficiency", scope, name]] = 0.1
    whole = parameters.value(latent, quantity, place)
    other = parameters.value(latent, quantity, replace(place, framework="unheard"))
    start = parameters.value(parameters.zero(), quantity, place)
    assert float(torch.logit(whole) - torch.logit(start)) == pytest.approx(0.4)
    assert float(torch.logit(other) - torch.logit(start)) == pytest.approx(0.2)
    pairs = zip(latent.tolist(), parameters.sd.tolist(), strict=True)
    fitted = Calibrated(dict(zip(parameters.keys, pairs, strict=True)))
    assert float(fitted.at(place)[quantity.name]) == pytest.approx(float(whole))


def held_out(case: MeasuredCase, fold: str, error: float, variance: float = 0.0) -> HeldOut:
    return HeldOut(fold, case, "seconds", math.exp(error), 1.0, variance)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> MeasuredCase:
    """One invented run."""
    folder = tmp_path_factory.mktemp("one")
    write_rows(folder / "runs.csv", [{}])
    return cases_of(folder)[0]


def test_a_fold_speaks_as_the_root_of_its_runs(case: MeasuredCase) -> None:
    # one source is right in all its runs, others are far off in their only one: six against one are enough
    for others, wide in ((1, False), (6, True)):
        held = [held_out(case, "many", 0.0)] * 36
        held += [held_out(case, f"one{n}", 0.3) for n in range(others)]
        found = width_of({"source": held}, "seconds")
        assert (found.own > 0.3 / NORMAL * 0.95) == wide
        assert wide or found.own == FLOOR


def test_widths_hold_the_share_that_they_promise_and_grow_with_the_distance(
    case: MeasuredCase,
) -> None:
    rng = np.random.default_rng(0)
    held = {
        kind: [
            held_out(replace(case), f"fold{i % 7}", rng.normal(0, (0.06**2 + 3 * v) ** 0.5), v)
            for i in range(700)
        ]
        for kind, v in (("source", 0.05**2), ("house", 0.2**2))
    }
    found = width_of(held, "seconds")
    for v in (0.05**2, 0.2**2):
        assert found.own**2 + found.widening * v == pytest.approx(0.06**2 + 3 * v, rel=0.3)
    assert np.mean(
        np.abs(standardized(held, "source", "seconds")["all dense"][:, 0]) < NORMAL
    ) == pytest.approx(0.8, abs=0.05)


def test_the_width_of_bytes_is_the_likeliest_so_that_a_far_house_counts(case: MeasuredCase) -> None:
    # nine of ten houses are off by 5 %, one by 30 %: 80 % intervals of the nine say nothing of it
    errors = [0.05] * 9 + [0.3]
    held = [held_out(case, f"{n}", error) for n, error in enumerate(errors)]
    likely = float(np.mean(np.square(errors))) ** 0.5
    assert width_of({"house": held}, "memory").own == pytest.approx(likely, rel=0.08)
    assert width_of({"house": held}, "seconds").own < likely / 2
    # one house is known to half: the widening takes what the parameters explain
    known = [held_out(case, f"{n}", 0.05 * (1 + n % 2), 0.0025 * (n % 2)) for n in range(20)]
    found = width_of({"house": known}, "memory")
    assert found.own == pytest.approx(0.05, rel=0.08)
    assert found.widening == pytest.approx(3.0, rel=0.1)


def test_bytes_count_models_that_were_left_out_and_seconds_do_not(case: MeasuredCase) -> None:
    # of three kinds of folds one is off by 20 %
    for part, expected in (("seconds", FLOOR), ("memory", 0.2 / 3.0**0.5)):
        held = {
            kind: [replace(held_out(case, f"{n}", error), part=part) for n in range(9)]
            for kind, error in (("house", 0.01), ("source", 0.01), ("model", 0.2))
        }
        assert spreads(held)[part]["own"] == pytest.approx(expected, rel=0.08)


def test_one_mfu_a_device_is_the_median_of_the_other_folds(case: MeasuredCase) -> None:
    slow = [
        replace(held_out(case, fold, 0.0), measured=seconds)
        for fold, seconds in (("a", 1.0), ("b", 4.0))
    ]
    assert [h.predicted for h in constant_mfu(slow)] == pytest.approx([4.0, 1.0])


def test_another_program_stands_next_to_ours_on_its_rows(
    case: MeasuredCase, tmp_path: Path
) -> None:
    other = replace(case, run=replace(case.run, row=case.run.row + 1))
    held = [held_out(case, "a", math.log(1.1)), replace(held_out(other, "b", 0.0), measured=2.0)]
    told = [
        f"Other,1,{run.file},{run.row},{seconds}"
        for run, seconds in ((case.run, 0.5), (other.run, 1.5))
    ]
    file = tmp_path / "rivals.csv"
    file.write_text("\n".join(["program,version,file,row,seconds", *told, "Other,1,none.csv,2,9"]))
    cells = [line.split("|") for line in rival_lines(held, file)[-3:]]
    # ours 1.1 of 1 and 1 of 2; theirs 0.5 and 0.75, then each divided by the other's
    assert [(float(c[4]), float(c[6])) for c in cells] == [
        (30.0, -20.0),
        (37.5, -37.5),
        (41.7, 8.3),
    ]


def test_error_figures_by_hand() -> None:
    errors = summarise([1.1, 0.8, 1.0, 2.0])
    assert errors.median == pytest.approx(0.15)
    assert errors.mean == pytest.approx(0.325)
    assert errors.bias == pytest.approx(0.05)
    assert math.isnan(summarise([]).median)


def test_spearman_compares_ranks_and_knows_no_order_of_constants() -> None:
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 20.0, 300.0, 4000.0]) == pytest.approx(1.0)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4
    assert spearman([1.0, 2.0, 2.0, 4.0], [1.0, 30.0, 20.0, 40.0]) == pytest.approx(
        4.5 / (4.5 * 5.0) ** 0.5
    )
    assert math.isnan(spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


def test_runs_of_one_job_are_ranked_by_their_seconds(tmp_path: Path) -> None:
    strategies = (("8", "1", "1.0"), ("4", "2", "2.0"), ("2", "4", "3.0"), ("1", "8", "4.0"))
    cells = [
        {
            "dp": dp,
            "tp": tp,
            "micro_batch": "1",
            "num_microbatches": str(32 // int(dp)),
            "iteration_s": s,
        }
        for dp, tp, s in strategies
    ]
    write_rows(tmp_path / "a.csv", [*cells, {"hidden": "2048"}])
    cases = cases_of(tmp_path)
    [job] = job_rankings(cases, [1.5, 1.2, 3.3, 9.0, 1.0])
    assert job.plans == 4
    assert job.spearman == pytest.approx(0.8)
    assert (job.regret[MODEL, 1], job.regret[MODEL, 3]) == (1.0, 0.0)
    # tp x pp is 1, 2, 4, 8: the smallest is the fastest here; chance: mean of 1, 2, 3, 4 over 1, less 1
    assert job.regret["smallest", 1] == 0.0
    assert job.regret["chance", 1] == pytest.approx(1.5)
    [worst] = job_rankings(cases, [4.0, 3.0, 2.0, 1.0, 9.0])
    assert (worst.regret[MODEL, 1], worst.regret[MODEL, 3]) == (3.0, 1.0)


def test_gpus_are_missed_by_dense_models_and_by_mixtures_apart() -> None:
    case: Any = SimpleNamespace(run=next(run for run in read_runs() if run.devices))
    device = Place.of_run(case.run).device
    found = Residuals(
        torch.zeros(4, dtype=torch.int64),
        torch.tensor([0, 0, 1, 0]),  # the third are bytes
        torch.tensor([0.2, -0.2, 3.0, 0.9], dtype=torch.float64),
        torch.zeros(4, 1),
        torch.tensor([False, False, False, True]),
    )
    by_kind = command.misfits_by_kind([case], found, {"own": 0.06, "experts": {"own": 0.16}})
    assert by_kind == {
        "dense": misfits([device] * 2, torch.tensor([0.2, 0.2]).double(), 0.06),
        "experts": misfits([device], torch.tensor([0.9]).double(), 0.16),
    }
    assert by_kind["dense"][device] < 0.2 < by_kind["experts"][device]


def test_places_that_a_fit_misses_have_a_spread_of_their_own() -> None:
    places = ["few", "few", *["many"] * 100, *["good"] * 100]
    errors = torch.cat(
        [torch.tensor([0.3, -0.3]), torch.full((100,), 0.3), torch.full((100,), 0.05)]
    )
    found = misfits(places, errors.double(), 0.06)
    assert set(found) == {"few", "many"}
    # 80 % of the runs lie within 1.28 standard deviations; many runs outweigh the spread of all
    for place, weight in (("few", 2**0.5), ("many", 10.0)):
        squared = (2.0 * 0.06**2 + weight * (0.3 / 1.2815515655) ** 2) / (2.0 + weight)
        assert found[place] == pytest.approx(squared**0.5, abs=5e-4)


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_the_regret_of_ties_is_the_mean_over_their_orders(trials: int) -> None:
    rng = np.random.default_rng(trials)
    scores = np.array([0.0, 1.0, 1.0, 1.0, 2.0])
    truth = rng.uniform(1.0, 2.0, 5)
    orders = [
        order for order in permutations(range(5)) if (np.diff(scores[list(order)]) >= 0).all()
    ]
    mean = np.mean([truth[list(order[:trials])].min() for order in orders])
    assert regret(scores, truth, trials) == pytest.approx(mean / truth.min() - 1.0)


@pytest.mark.parametrize("value", [1000.0, 1400.0, 999.7, 0.00012345, 12.34, 3.0e7])
def test_a_written_figure_is_read_as_a_number(value: float) -> None:
    read = OmegaConf.create(f"figure: {three_digits(value)}").figure
    assert isinstance(read, (int, float))
    assert read == pytest.approx(value, rel=6e-3)
