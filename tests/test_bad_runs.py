"""Runs that cannot go on: what they say, how they end, and what they leave behind."""

import asyncio
import dataclasses
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from dta_jax.checkpoint import CheckpointStore
from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.stream import CollectError
from dta_jax.config import load_config
from dta_jax.cost_fit import saved_fit
from dta_jax.errors import InputError, Interrupted, RunError, Terminated, run_command, writing
from dta_jax.evaluate import find_checkpoint
from dta_jax.evaluate import main as evaluate
from dta_jax.generation.protocol import GenerationError
from dta_jax.generation.sglang import SGLang
from dta_jax.live import LiveFeed, check_fits, sampling_params
from dta_jax.loop import run_training
from dta_jax.metrics import MetricsLog, read_metrics
from dta_jax.objective import PreferencePairs
from dta_jax.prepare import Run, prepare
from dta_jax.sequence_losses import DPO
from dta_jax.settings import Checkpoints
from dta_jax.signals import StopSignals
from tests.test_live import SYNCHRONOUS, collecting
from tests.trees import make_model

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.gin"
FULL = Path("/dev/full")  # every write to it finds a full disk
ONE_LINE = "Train.seed = 0\n"


def ends(error: BaseException, capsys) -> tuple[int, str]:
    """Status and stderr of a command that raises."""

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (CollectError("nothing moves"), 1, "error: nothing moves"),
        (GenerationError("no\nserver"), 1, "error: no server"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device"),
        (Terminated(), 143, "terminated"),
        (Interrupted(signal.SIGTERM, 0), 143, "stopped by SIGTERM before the first step"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stops_a_run_is_one_line(error, status, line, capsys):
    assert ends(error, capsys) == (status, line + "\n")


def test_the_second_signal_ends_the_process_as_its_kind():
    for number, kind in ((signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)):
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == signal.SIGTERM
            with pytest.raises(kind):
                signal.raise_signal(number)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(RunError, match="full: cannot be written: No space left"), writing(FULL):
        FULL.write_text("x")
    (tmp_path / ".metrics.jsonl.partial").symlink_to(FULL)
    row = {"step": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: No space left"):
        MetricsLog(tmp_path / "metrics.jsonl", keep_through=1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)

    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device [tensorstore_spec='{...}']")

    with store, monkeypatch.context() as patch:
        patch.setattr(store._manager, "save", full)
        with pytest.raises(RunError, match=r"checkpoints: a checkpoint .*No space left on device$"):
            store.save(1, {"x": np.zeros(2, np.float32)}, {})


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["Collect.group_size = 1"], "Collect.group_size of at least 2, because GroupNormalized"),
        (
            [
                "Collect.group_size = 1",
                "Train.loss = @DPO()",
                "Train.advantages = @PreferencePairs()",
            ],
            "Collect.group_size of at least 2, because PreferencePairs",
        ),
        (["Sampling.temperature = 0.0"], r"Train.temperature: expected 0.0, the Sampling.temperature"),
        (["Train.max_groups = 3"], "Train.max_groups: expected None"),
        (["Train.advantages = @GAE()"], "Train.critic: expected a critic, or ValueClip"),
    ],
)
def test_contradictions_are_found_before_anything_runs(bindings, message):
    with pytest.raises(InputError, match=message):
        load_config(QUICKSTART, bindings)


def test_groups_of_one_are_fine_where_nothing_compares_them():
    train = load_config(QUICKSTART, ["Collect.group_size = 1", "GroupNormalized.mean = 'batch'"])
    assert train.rollouts.collect.group_size == 1


def test_every_limit_of_length_counts():
    rollouts, model = SYNCHRONOUS.rollouts, SYNCHRONOUS.model
    assert check_fits(rollouts, model, 1000) == 64
    assert check_fits(rollouts, model, 20) == 20
    tight = dataclasses.replace(rollouts, collect=dataclasses.replace(rollouts.collect, max_context=9))
    assert check_fits(tight, model, 20) == 9


def test_prompts_that_fill_the_context_end_the_run(tmp_path):
    run = prepare(dataclasses.replace(SYNCHRONOUS, max_length=3))
    with pytest.raises(RunError, match=r"step 1: no episode has an answer: .* context of 3 tokens"):
        run_training(run, tmp_path, ONE_LINE)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_preferences_need_rewards_that_differ(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("dta_jax.envs.game.Hunt._distance", lambda _: 1)  # no move changes it or pays
    train = dataclasses.replace(prepared.train, loss=DPO(), advantages=PreferencePairs())
    run = Run(dataclasses.replace(prepared.learner, train=train), prepared.source)
    with feed_of(run, tmp_path, start=0, saved=None) as feed:
        assert re.match(r"there is no pair to prefer: .*Collect\.skip_equal", feed.get(1).reason)
    settings = dataclasses.replace(train, advantages=PreferencePairs(margin=5))
    run = Run(dataclasses.replace(prepared.learner, train=settings), prepared.source)
    with feed_of(run, tmp_path, start=0, saved=None) as feed:
        assert "differ by more than 5" in feed.get(1).reason


def cost_file(file: Path) -> None:
    model, params = make_model()
    saved_fit(file, model, params, chunk_size=2, longest=12, refit=True)


def test_a_cost_file_is_checked_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("dta_jax.cost_fit.fit_cost", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(InputError, match=r"none/cost\.json: folder: expected one that exists"):
        cost_file(tmp_path / "none" / "cost.json")
    with pytest.raises(InputError, match="file: expected a saved fit"):
        cost_file(tmp_path)
    other = tmp_path / "tokenizer.json"
    other.write_text('{"model": {}}')
    with pytest.raises(InputError, match=r"tokenizer\.json: file: expected a saved fit"):
        cost_file(other)
    assert other.read_text() == '{"model": {}}'


def test_evaluation_is_refused_before_it_is_played(tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(InputError, match="step: expected one of 4; got 0"):
        find_checkpoint(tmp_path, 0)
    with pytest.raises(InputError, match="--json: expected a file in a folder that exists"):
        evaluate([str(tmp_path), "--json", str(tmp_path / "none" / "x.json")])


@pytest.fixture(scope="module")
def prepared() -> Run:
    return prepare(dataclasses.replace(SYNCHRONOUS, checkpoints=Checkpoints(every=50)))


def feed_of(run: Run, out: Path, **options: object) -> LiveFeed:
    state = run.learner.starting_state()
    settings = options.pop("settings", run.source)
    return LiveFeed(run.learner, settings, sampling_params(run.learner, state), out=out, **options)


SAVED = {
    "step": 1, "version": 1, "next": [2, 0], "restart": [], "accepted": [[2, 0]], "groups": [],
    "replacements": {}, "resampled": {}, "num_tasks": 6, "batch_groups": 2, "group_size": 3, "seed": 0,
}  # fmt: skip


def test_accepted_rollouts_that_are_lost_are_made_again(prepared, tmp_path):
    with (
        pytest.warns(UserWarning, match=r"accepted/1\.npz: no such file; its episodes are played again"),
        feed_of(prepared, tmp_path, start=1, saved=SAVED),
    ):
        pass
    for text in (b"", b"PK\x03\x04junk"):
        (tmp_path / "accepted" / "1.npz").write_bytes(text)
        with pytest.raises(InputError, match=r"accepted/1\.npz: .*; remove the file to have its episodes"):
            feed_of(prepared, tmp_path, start=1, saved=SAVED)


def test_a_run_keeps_its_tasks_and_groups(prepared, tmp_path):
    others = SAVED | {"num_tasks": 7, "accepted": []}
    with pytest.raises(InputError, match=r"num_tasks: expected 7, as the run began; got 6; .* --out"):
        feed_of(prepared, tmp_path, start=1, saved=others)


def test_folders_of_a_run_are_made_before_it_begins(prepared, tmp_path):
    (tmp_path / "rollouts").write_text("a file")
    settings = dataclasses.replace(prepared.source, save_every=1)
    with pytest.raises(InputError, match="rollouts: folder: expected a folder; got File exists"):
        feed_of(prepared, tmp_path, settings=settings, start=0, saved=None)


def test_servers_that_are_not_there_are_one_line_in_bounded_time(prepared, tmp_path):
    nowhere = SGLang(
        urls=("http://127.0.0.1:9",), weights_dir=str(tmp_path / "weights"), outage_seconds=0.2, backoff=0.05
    )
    settings = dataclasses.replace(prepared.source, generator=nowhere)
    with pytest.raises(RunError, match=r"no server loaded version 0: .*Cannot connect"):
        feed_of(prepared, tmp_path, settings=settings, start=0, saved=None)


class Trouble:
    """Lets the first steps of a run's source pass and then raises."""

    def __init__(self, name: str, after: int, error: BaseException | signal.Signals):
        self.name, self.after, self.error = name, after, error
        self.original = getattr(LiveFeed, name)

    def __get__(self, feed: LiveFeed, _: type) -> object:
        def call(*arguments: object) -> object:
            if max(a for a in arguments if isinstance(a, int)) <= self.after:
                return self.original(feed, *arguments)
            if isinstance(self.error, signal.Signals):
                return signal.raise_signal(self.error)
            raise self.error

        return call


@pytest.mark.parametrize(
    ("name", "after", "error", "kept"),
    [
        ("get", 2, CollectError("stuck"), 2),
        ("get", 1, InputError("SGLang", "urls", expected="servers", actual="none"), 1),
        ("get", 2, signal.SIGTERM, 2),
        ("publish", 1, GenerationError("no server"), 2),
        ("publish", 1, signal.SIGINT, 2),
        ("evaluate", 0, CollectError("stuck"), 1),
        ("evaluate", 0, signal.SIGTERM, 1),
    ],
)
def test_steps_that_were_made_are_saved_whatever_stops_the_run(
    prepared, tmp_path, monkeypatch, name, after, error, kept
):
    monkeypatch.setattr(LiveFeed, name, Trouble(name, after, error))
    evaluated = dataclasses.replace(
        prepared.train, evaluate=Evaluate() if name == "evaluate" else None, evaluate_every=1
    )
    run = Run(dataclasses.replace(prepared.learner, train=evaluated), prepared.source)
    stops = Interrupted if isinstance(error, signal.Signals) else type(error)
    with pytest.raises(stops) as stopped:
        run_training(run, tmp_path, ONE_LINE)
    if isinstance(error, signal.Signals):
        assert (stopped.value.by, stopped.value.step) == (error, kept)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, kept + 1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(kept)]


def test_a_hanging_environment_ends_the_run(prepared, tmp_path, monkeypatch):
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("dta_jax.envs.game.Hunt.step", hang)
    settings = collecting(stuck_after=0.5).rollouts
    with pytest.raises(RunError, match="batch 1: no model call and no step of an environment"):
        run_training(Run(prepared.learner, settings), tmp_path, ONE_LINE)
