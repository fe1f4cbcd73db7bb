"""Where metrics go: every step once in each sink, whatever W&B does; and every name is documented."""

import ast
import dataclasses
import importlib.util
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from dta_jax.collect.evaluation import Evaluate
from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.config import load_config
from dta_jax.diagnostics import policy_diagnostics, reward_diagnostics
from dta_jax.errors import InputError, RunError
from dta_jax.generation.protocol import Sampling
from dta_jax.loop import run_training
from dta_jax.losses import KLPenalty, PPOClip
from dta_jax.metrics import read_metrics
from dta_jax.prepare import prepare
from dta_jax.settings import Logging
from dta_jax.sinks import TensorBoard, WeightsAndBiases, check_sinks, open_sinks, records
from tests.test_live import SYNCHRONOUS
from tests.test_structure import ROOT, modules
from tests.test_train import GIN


def events(folder: Path) -> list[Event]:
    files = sorted(folder.glob("events.out.tfevents.*"))
    return [Event.FromString(event) for file in files for _, event in records(file.read_bytes())]


def values(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events(folder)
        if event.HasField("summary")
    ]


def write(folder: Path, steps: range, keep_through: int) -> None:
    board = TensorBoard(folder, keep_through=keep_through)
    for step in steps:
        board.write({"step": step, "loss": step / 4, "tokens": 7, "staleness_histogram": [1, 2]})
    board.close()


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    write(tmp_path, range(1, 5), keep_through=0)
    write(tmp_path, range(3, 6), keep_through=2)
    assert values(tmp_path) == [(step, {"loss": step / 4, "tokens": 7.0}) for step in range(1, 6)]
    assert [event.file_version for event in events(tmp_path) if event.file_version] == ["brain.Event:2"] * 2


def test_an_event_that_was_cut_off_is_dropped(tmp_path):
    write(tmp_path, range(1, 4), keep_through=0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    write(tmp_path, range(3, 4), keep_through=3)
    assert [step for step, _ in values(tmp_path)] == [1, 2, 3]


def test_rows_are_in_the_file_when_they_are_written(tmp_path):
    board = TensorBoard(tmp_path, keep_through=0)
    board.write({"step": 1, "loss": 2.0})
    assert values(tmp_path) == [(1, {"loss": 2.0})]
    board.close()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: Full())
    with pytest.raises(RunError, match="tensorboard: cannot be written: No space left"):
        TensorBoard(tmp_path / "tensorboard", keep_through=0)


class FakeRun:
    """What `wandb.init` gives."""

    def __init__(self, trouble: str):
        self.trouble, self.logged, self.finished = trouble, [], False

    def log(self, row: dict, step: int) -> None:
        if self.trouble == "log":
            raise ConnectionError("no\nnetwork")
        self.logged.append((step, row))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch) -> types.ModuleType:
    """A module in its place that keeps what it is told; `trouble` says what fails."""
    fake = types.ModuleType("wandb")
    fake.trouble, fake.runs, fake.options = "", [], []

    def init(**options: object) -> FakeRun:
        fake.options.append(options)
        if fake.trouble == "init":
            raise RuntimeError("no API key")
        fake.runs.append(FakeRun(fake.trouble))
        return fake.runs[-1]

    fake.init, fake.Settings = init, dict
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


PROJECT = Logging(tensorboard=False, wandb_project="trees", wandb_mode="offline")


def test_weights_and_biases_gets_the_numbers_and_keeps_the_run(wandb, tmp_path):
    check_sinks(PROJECT)
    for step in (1, 2):
        sink = WeightsAndBiases(PROJECT, tmp_path, {"seed": 0})
        sink.write({"step": step, "loss": 0.5, "staleness_histogram": [1]})
        sink.close()
    assert [(run.logged, run.finished) for run in wandb.runs] == [
        ([(1, {"loss": 0.5})], True),
        ([(2, {"loss": 0.5})], True),
    ]
    first, second = wandb.options
    assert first["id"] == second["id"]
    assert (first["project"], first["mode"], first["config"]) == ("trees", "offline", {"seed": 0})
    assert first["name"] == tmp_path.name
    assert first["dir"] == tmp_path


@pytest.mark.parametrize("trouble", ["init", "log"])
def test_trouble_with_weights_and_biases_is_one_warning(wandb, tmp_path, trouble):
    wandb.trouble = trouble

    def use() -> None:
        sink = WeightsAndBiases(PROJECT, tmp_path, {})
        for step in range(1, 4):
            sink.write({"step": step, "loss": 0.5})
        sink.close()

    with pytest.warns(UserWarning, match="Weights & Biases: no .*; the run goes on without it") as caught:
        use()
    assert len(caught) == 1


def test_a_missing_package_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"wandb_project: .*no module named wandb; pip install 'dta_jax\[wandb\]'"
    ):
        check_sinks(PROJECT)
    check_sinks(Logging())


def test_without_its_package_tensorboard_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr("dta_jax.sinks.has_tensorboard", lambda: False)
    with open_sinks(SYNCHRONOUS, tmp_path, keep_through=0) as sinks:
        assert [type(sink).__name__ for sink in sinks] == ["MetricsLog"]


def test_sinks_are_set_in_a_config(tmp_path):
    (tmp_path / "c.gin").write_text(GIN.format(path="r.npz"))
    bindings = ["Train.log = @Logging()", "Logging.wandb_project = 'trees'", "Logging.wandb_mode = 'offline'"]
    assert load_config(tmp_path / "c.gin", bindings).log == dataclasses.replace(PROJECT, tensorboard=True)
    assert load_config(tmp_path / "c.gin").log == Logging()
    with pytest.raises(InputError, match=r"Logging\.wandb_mode: expected 'online' or 'offline'; got 'never'"):
        load_config(tmp_path / "c.gin", ["Logging.wandb_mode = 'never'"])


def documented() -> re.Pattern[str]:
    """Names of the tables in docs/training.md; words in capitals stand for anything."""
    section = (ROOT / "docs" / "training.md").read_text().split("## Metrics\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) + re.findall(
        r"^\| .*? \| (.*) \|$", section, re.MULTILINE
    )
    names = {name for cell in cells for name in re.findall(r"`([\w@^]+)`", cell)}
    return re.compile("|".join(re.sub(r"[A-Z]+", r"\\S+", re.escape(name)) for name in sorted(names)))


def undocumented(names: set[str]) -> list[str]:
    known = documented()
    return sorted(name for name in names if not known.fullmatch(name))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """The folder of a run on rollouts of its own, with an evaluation."""
    out = tmp_path_factory.mktemp("evaluated")
    how = Evaluate(trials=2, sampling=Sampling(max_new_tokens=1))
    train = dataclasses.replace(SYNCHRONOUS, evaluate=how, evaluate_every=2, steps=2)
    run_training(prepare(train), out, "Train.seed = 0\n", quiet=True)
    return out


def test_every_name_that_a_run_writes_is_documented(evaluated):
    rows = read_metrics(evaluated / "metrics.jsonl")
    names = set().union(*rows)
    assert undocumented(names) == []
    assert {"seconds_rollouts", "seconds_evaluate", "environment_seconds", "eval_reward_mean"} <= names


def test_every_diagnostic_and_every_phase_is_documented(rng):
    numbers = {name: rng.normal(size=4) for name in ("advantage", "old_logp", "ref_logp", "prox_logp")}
    loss = Sum((OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight()), KLPenalty(0.1)))
    names = set(policy_diagnostics(loss, rng.normal(size=4), np.ones(4), numbers))
    names |= set(reward_diagnostics(np.arange(4.0), numbers["advantage"], np.array([0, 0, 1, 1])))
    assert {"behaviour_weight_mean", "kl_mismatch", "clip_fraction_dual"} <= names
    calls = [
        node
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    phases = {
        f"seconds_{call.args[0].value}"
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("phase", "dispatch")
        and isinstance(call.args[0], ast.Constant)
    }
    assert {"seconds_push", "seconds_plan", "seconds_save"} <= phases
    assert undocumented(names | phases) == []
    assert undocumented({"seconds_nothing", "loss_of_nothing"}) == ["loss_of_nothing", "seconds_nothing"]


def test_all_sinks_have_the_same_numbers(evaluated):
    rows = read_metrics(evaluated / "metrics.jsonl")
    for row, (step, found) in zip(rows, values(evaluated / "tensorboard"), strict=True):
        assert step == row["step"]
        assert found == pytest.approx(
            {k: v for k, v in row.items() if k != "step" and not isinstance(v, list)}, rel=1e-6
        )
