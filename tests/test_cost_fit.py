"""The fitted cost model: found where it holds, refused where nothing fits, kept with what it holds for."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.cost_fit import (
    CostFit,
    Fingerprint,
    calibration,
    fit_cost,
    fit_terms,
    load_fit,
    saved_fit,
    time_operations,
)
from dta_jax.errors import InputError
from dta_jax.losses import NLL
from dta_jax.planner import CostModel, widths
from dta_jax.schedule import check_schedule
from dta_jax.schedule_stats import cost_terms, operation_costs, schedule_cost
from dta_jax.types import BACK, PUSH
from tests.trees import make_model, random_samples, schedule_for

MEASURED = tuple(
    np.concatenate(parts)
    for parts in zip(*((cost_terms(s), s.kind) for s in calibration(64, 400)), strict=True)
)


@given(
    st.builds(
        CostModel,
        backward=st.floats(1.5, 5),
        attention=st.floats(0, 0.1),
        launch=st.floats(0, 500),
        entry=st.floats(0, 3),
    ),
    st.floats(1e-9, 1e-2),
)
@settings(max_examples=25, deadline=None)
def test_a_model_that_holds_is_found(cost, row_seconds):
    terms, kind = MEASURED
    seconds = row_seconds * operation_costs(terms, kind, cost)
    found, found_row = fit_terms(terms, kind, seconds)
    np.testing.assert_allclose(found_row * operation_costs(terms, kind, found), seconds, rtol=1e-5)
    np.testing.assert_allclose(found_row, row_seconds, rtol=1e-3)
    np.testing.assert_allclose(found.backward, cost.backward, rtol=1e-3)
    assert found.push == 1


def test_noise_is_averaged(rng):
    cost = CostModel(backward=2.7, attention=0.01, launch=90.0, entry=0.4)
    terms, kind = (np.concatenate([part] * 20) for part in MEASURED)
    seconds = 1e-5 * operation_costs(terms, kind, cost) * rng.lognormal(0, 0.1, len(kind))
    found, row_seconds = fit_terms(terms, kind, seconds)
    assert abs(row_seconds / 1e-5 - 1) < 0.05
    for name, want in dataclasses.asdict(cost).items():
        assert abs(getattr(found, name) / want - 1) < 0.35, name


def test_operations_that_tell_nothing_are_refused():
    terms, kind = MEASURED
    for chosen in (kind == PUSH, kind == BACK):
        with pytest.raises(InputError, match="PUSH and BACK of several widths"):
            fit_terms(terms[chosen], kind[chosen], np.ones(chosen.sum()))
    with pytest.raises(InputError, match="dearer the wider they are"):
        fit_terms(terms, kind, 1.0 / terms[:, 1])


@pytest.mark.parametrize(("chunk_size", "longest"), [(1, 3), (5, 40), (64, 400), (64, 10)])
def test_calibration_runs_every_width_at_growing_context_with_and_without_entries(chunk_size, longest):
    plans = calibration(chunk_size, longest)
    assert len({plan.stack_slots for plan in plans}) == 1
    assert [plan.chunk_size for plan in plans] == [chunk_size] * len(plans)
    for plan, width in zip(plans, widths(chunk_size), strict=True):
        check_schedule(plan)
        assert set(plan.width.tolist()) == {width}
        assert (np.diff(plan.offset) == width).all()
        pairs, entries = cost_terms(plan).T[2:]
        back = plan.kind == BACK
        assert (np.diff(pairs[~back]) > 0).all()
        assert not entries[~back].any()
        assert set(entries[back].tolist()) == {0, width}
    assert plans[0].trie.num_rows == max(2, longest // chunk_size) * chunk_size


def test_every_operation_is_timed_and_the_least_counts():
    model, params = make_model()
    samples = random_samples(3)
    schedule = schedule_for(samples, 2)
    runs, ticks = 3, itertools.count()
    values = {"weight": samples.values["weight"]}
    capacity, clock = 512, lambda: float(next(ticks) ** 2)  # later operations take longer
    seconds = time_operations(
        model, params, schedule, values, NLL(), entry_capacity=capacity, repeat=runs, clock=clock
    )
    begun = 2 * np.arange(schedule.num_ops, 2 * schedule.num_ops)  # the first run does not count
    np.testing.assert_array_equal(seconds, (begun + 1.0) ** 2 - begun**2)
    assert next(ticks) == 2 * (runs + 1) * schedule.num_ops


def test_a_fit_of_this_machine_is_kept_and_used_again(tmp_path, monkeypatch):
    model, params = make_model()
    file = tmp_path / "cost.json"
    options = {"chunk_size": 2, "longest": 12}
    with pytest.raises(InputError, match=r"cost\.json: file: expected a saved fit"):
        saved_fit(file, model, params, **options, refit=False)
    measured = []

    def fit(model, params, **options):
        cost = CostModel(backward=2.5, launch=10.0, attention=0.1, entry=1.0)
        measured.append(options)
        return CostFit(cost, 1e-6, 0.1, 30, Fingerprint.of(model, params, options["chunk_size"]))

    monkeypatch.setattr("dta_jax.cost_fit.fit_cost", fit)
    first = saved_fit(file, model, params, **options, refit=True)
    assert saved_fit(file, model, params, **options, refit=True) == first
    assert saved_fit(file, model, params, **options, refit=False) == first
    assert len(measured) == 1
    schedule = schedule_for(random_samples(3), 2)
    assert first.seconds(schedule) == 1e-6 * schedule_cost(schedule, first.cost)
    other = saved_fit(file, model, params, chunk_size=4, longest=12, refit=True)
    assert other.fingerprint.chunk_size == 4
    assert len(measured) == 2
    with pytest.raises(InputError, match="chunk_size: expected 2; got 4; measure anew"):
        saved_fit(file, model, params, **options, refit=False)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_a_fit_for_something_else_is_refused(tmp_path, field):
    model, params = make_model()
    here = Fingerprint.of(model, params, 2)
    file = tmp_path / "cost.json"
    there = dataclasses.replace(here, **{field: 3 if field == "chunk_size" else "another"})
    CostFit(CostModel(), 1e-6, 0.1, 30, there).save(file)
    with pytest.raises(InputError, match=f"{field}: expected .*; got (another|3)"):
        load_fit(file, here)
    assert load_fit(file, there).fingerprint == there


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cost": 3}', '{"fingerprint": {"device": "x"}}'])
def test_damaged_files_are_one_line(tmp_path, text):
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(InputError, match="expected a saved fit of the cost model"):
        load_fit(file, Fingerprint("cpu", jax.__version__, "model", "float32", 2))
    good = {"cost": {"launch": -1.0}, "fingerprint": dict.fromkeys(Fingerprint.__annotations__, "x")}
    file.write_text(json.dumps(good))
    with pytest.raises(InputError, match="expected a saved fit of the cost model"):
        load_fit(file, Fingerprint("cpu", jax.__version__, "model", "float32", 2))


def readings(plans, cost):
    """What a clock shows around each operation, if it takes what `cost` says; every plan runs twice."""
    now = 0.0
    for plan in plans:
        for elapsed in 2 * operation_costs(cost_terms(plan), plan.kind, cost).tolist():
            yield now
            now += 1e-6 * elapsed
            yield now


def test_a_machine_is_measured():
    model, params = make_model()
    plans, cost = calibration(2, 12), CostModel(backward=2.5, attention=0.3, launch=9.0, entry=0.5)
    times = readings(plans, cost)
    fit = fit_cost(model, params, chunk_size=2, longest=12, repeat=1, clock=times.__next__)
    assert not list(times)
    assert fit.operations == sum(plan.num_ops for plan in plans)
    assert fit.error < 1e-3
    np.testing.assert_allclose(fit.row_seconds, 1e-6, rtol=1e-2)
    np.testing.assert_allclose(
        [fit.seconds(plan) for plan in plans], [1e-6 * schedule_cost(p, cost) for p in plans], rtol=1e-3
    )
    assert fit.fingerprint == Fingerprint.of(model, params, 2)
    with pytest.raises(InputError, match="repeat: expected at least 1; got 0"):
        fit_cost(model, params, chunk_size=2, longest=12, repeat=0)
