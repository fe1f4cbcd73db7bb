"""Profiles: which steps, what the trace and the table say, and that other steps are left alone."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from dta_jax.errors import InputError
from dta_jax.loop import run_training
from dta_jax.metrics import read_metrics
from dta_jax.phases import recording
from dta_jax.prepare import prepare
from dta_jax.profiling import Profile, ProfiledSteps, Profiler
from dta_jax.settings import Checkpoints
from tests.test_train import PPO, command, config  # noqa: F401, a fixture

TRAIN = dataclasses.replace(PPO, steps=4, checkpoints=Checkpoints(every=3))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Path:
    """The folder of a run whose steps 2 and 3 were profiled."""
    out = tmp_path_factory.mktemp("profiled")
    run_training(prepare(TRAIN), out, "Train.seed = 0\n", profile=ProfiledSteps(2, 3), quiet=True)
    return out


def test_the_trace_has_the_steps_and_their_phases(profiled):
    (trace,) = profiled.glob("profile/plugins/profile/*/*.trace.json.gz")
    (xplane,) = profiled.glob("profile/plugins/profile/*/*.xplane.pb")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"plan", "credit", "gradient", "push", "back", "update", "publish", "save"} <= names
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert steps == {"2", "3"}
    assert b"gradient" in xplane.read_bytes()


def test_only_profiled_steps_wait_for_each_operation(profiled):
    rows = read_metrics(profiled / "metrics.jsonl")
    assert [row["step"] for row in rows if "seconds_back" in row] == [2, 3]
    assert all("seconds_gradient" in row and "seconds_update" in row for row in rows)
    assert [row["step"] for row in rows if "seconds_save" in row] == [4]  # saved after step 3
    for row in rows:
        own = sum(x for name, x in row.items() if name.startswith("seconds_") and name != "seconds_save")
        assert 0 < own <= row["seconds"]


def test_the_table_has_every_phase_and_the_rest():
    spent = {"push": 1.0, "back": 4.0, "update": 1.0}
    found = Profile(ProfiledSteps(3, 4), Path("p"), 8.0, spent, {"compile": 2.0})
    assert found.rows() == [
        ("back", "2.0000", "50.0%"),
        ("push", "0.5000", "12.5%"),
        ("update", "0.5000", "12.5%"),
        ("other", "1.0000", "25.0%"),
        ("step", "4.0000", "100.0%"),
        ("compile (within)", "1.0000", "25.0%"),
    ]


def test_the_command_prints_the_table(config, tmp_path, capsys):  # noqa: F811
    status, err = command(capsys, config, "--out", tmp_path / "out", "--profile", "steps=2", "--quiet")
    assert status == 0
    lines = err.splitlines()
    assert lines[0] == f"profile of steps 2, seconds a step ({tmp_path / 'out' / 'profile'}):"
    assert {"back", "gradient", "update", "other", "step"} <= {line.split()[0] for line in lines[1:]}


def test_a_run_that_fails_ends_its_trace(tmp_path):
    def fail() -> None:
        with recording() as record, Profiler(ProfiledSteps(1, 5), tmp_path, record) as profiler:
            with profiler.step(1):
                assert record.waits
            with profiler.step(2):
                raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))
    with recording() as record, Profiler(ProfiledSteps(1, 1), tmp_path / "next", record) as profiler:
        with profiler.step(1):
            pass
        found = profiler.finished(1)
    assert found is not None
    assert not record.waits


@pytest.mark.parametrize(
    ("text", "steps"), [("steps=3:5", ProfiledSteps(3, 5)), ("steps=7", ProfiledSteps(7, 7))]
)
def test_steps_are_read(text, steps):
    assert ProfiledSteps.parse(text) == steps


@pytest.mark.parametrize(
    "text", ["3:5", "steps=", "steps=5:3", "steps=0:2", "steps=a:b", "steps=1:2:3", "step=1"]
)
def test_bad_arguments_are_one_line(config, tmp_path, capsys, text):  # noqa: F811
    status, err = command(capsys, config, "--out", tmp_path / "out", "--profile", text)
    assert (status, err) == (2, f"error: --profile: value: expected steps=FIRST:LAST, from 1; got {text!r}\n")
    assert not (tmp_path / "out").exists()


def test_steps_that_the_run_does_not_make_are_refused():
    ProfiledSteps(3, 5).check(start=2, steps=5)
    for start, steps in ((3, 9), (0, 4)):
        with pytest.raises(InputError, match=f"expected steps from {start + 1} to {steps}, .*; got 3:5"):
            ProfiledSteps(3, 5).check(start=start, steps=steps)
