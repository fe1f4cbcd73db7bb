"""Checkpoints: what comes back is what was saved, whole or not at all."""

import gc
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.checkpoint import CheckpointStore, DueCheckpoints
from dta_jax.errors import InputError
from dta_jax.settings import Checkpoints


class Moments(NamedTuple):
    count: jax.Array
    mean: dict


def make_state(scale: float = 1.0) -> dict:
    x = scale * jax.random.normal(jax.random.key(0), (64, 32))
    return {
        "params": {"embed": x, "layers": {"kernel": x[None].astype(jnp.bfloat16)}},
        "opt_state": (Moments(jnp.int32(3), {"embed": x / 3}), ()),
    }


def assert_same_bits(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def anything(step: int, run: dict) -> None:
    """Accepts every checkpoint."""


def newest(directory: Path, like: object = None, **options: object) -> tuple[int, object] | None:
    with CheckpointStore(directory, keep=2) as store:
        return store.newest(make_state() if like is None else like, anything, **options)


def save(directory: Path, *steps: int, keep: int = 2) -> None:
    """Saves `make_state(step)` for each step."""
    with CheckpointStore(directory, keep=keep) as store:
        for step in steps:
            store.save(step, make_state(step), {"step": step, "config": "a = 1\n"})


def test_state_and_run_come_back_bit_for_bit(tmp_path):
    assert newest(tmp_path / "c") is None
    save(tmp_path / "c", 5)
    seen = []
    with CheckpointStore(tmp_path / "c", keep=2) as store:
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_state())
        step, state = store.newest(shapes, lambda step, run: seen.append((step, run["config"])))
    assert seen == [(5, "a = 1\n")]
    assert step == 5
    assert_same_bits(state, make_state(5))


def test_the_newest_few_are_kept(tmp_path):
    save(tmp_path, 2, 4, 6, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]
    assert newest(tmp_path)[0] == 8


def rated(directory: Path, scores: dict[int, float | None], **options: object) -> list[int]:
    """Saves a checkpoint per step with its `score`, None for none; the steps that are left."""
    best = {"keep": 1, "keep_best": 2, "best_metric": "score"} | options
    with CheckpointStore(directory, **best) as store:
        for step, score in scores.items():
            store.save(
                step, make_state(step), {"metrics": {} if score is None else {"score": score, "loss": -step}}
            )
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


@pytest.mark.parametrize(("mode", "left"), [("max", [2, 3, 6]), ("min", [1, 5, 6])])
def test_the_best_few_are_kept_beside_the_newest(tmp_path, mode, left):
    scores = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.5, 5: 0.1, 6: 0.3}
    assert rated(tmp_path, scores, best_mode=mode) == left
    assert newest(tmp_path)[0] == 6


def test_of_equally_good_checkpoints_the_newest_are_kept(tmp_path):
    assert rated(tmp_path, {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.1}) == [2, 3, 4]


def test_checkpoints_without_the_metric_are_never_the_best(tmp_path):
    assert rated(tmp_path, {1: 0.1, 2: None, 3: None, 4: None}) == [1, 4]


def test_a_resumed_run_still_knows_which_were_best(tmp_path):
    assert rated(tmp_path, {1: 0.9, 2: 0.1, 3: 0.8}) == [1, 3]
    assert rated(tmp_path, {4: 0.2, 5: 0.85}) == [1, 5]
    with CheckpointStore(tmp_path, keep=1, keep_best=1, best_metric="loss", best_mode="min") as store:
        assert (store.best(), store.steps()) == (5, [1, 5])  # by another number: all of them are saved


def test_a_best_checkpoint_that_cannot_be_read_is_kept_and_named(tmp_path):
    rated(tmp_path, {1: 0.9, 2: 0.1, 3: 0.8})
    (tmp_path / "1" / "run" / "metadata").write_text('{"metrics": {"sco')
    with (
        CheckpointStore(tmp_path, keep=1, keep_best=1, best_metric="score") as store,
        pytest.warns(
            UserWarning, match=f"^{tmp_path / '1'}: run: cannot be read; it is kept, and not rated$"
        ),
    ):
        assert store.newest(make_state(), anything)[0] == 3
    assert rated(tmp_path, {4: 0.7, 5: 0.6}, keep_best=1) == [1, 3, 5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_best_checkpoint_does_not_stop_a_run(tmp_path):
    rated(tmp_path, {1: 0.9, 2: 0.1, 3: 0.8})
    flip_a_bit(largest_file(tmp_path / "1" / "state"))
    assert rated(tmp_path, {4: 0.2}) == [1, 3, 4]
    assert newest(tmp_path)[0] == 4
    gc.collect()


def test_a_metric_that_nobody_reports_is_said_once(tmp_path):
    with pytest.warns(UserWarning, match="step 1 has no scor; did you mean score") as said:
        assert rated(tmp_path, {1: 0.9, 2: 0.1}, best_metric="scor") == [2]
    assert len(said) == 1


def test_checkpoints_are_due_by_step_by_clock_and_when_they_are_rated():
    now = 0.0
    due = DueCheckpoints(Checkpoints(every=4, every_minutes=0.5), lambda: now)
    found = []
    for step in range(1, 9):
        now += 12.0
        if due.at(step, {"eval_reward_mean": 1.0}):
            found.append(step)
            due.note_saved()
    assert found == [3, 4, 7, 8]
    rating = Checkpoints(every=4, keep_best=1, best_metric="eval_reward_mean")
    due = DueCheckpoints(rating, lambda: now)
    assert [due.at(step, {"eval_reward_mean": 1.0} if step == 2 else {}) for step in (1, 2, 3, 4)] == [
        False, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every_minutes": 0.0}, "every_minutes: expected None or minutes, above 0; got 0.0"),
        ({"keep_best": 1}, "best_metric: expected a name in metrics.jsonl, to rank by; got None"),
        ({"best_metric": "loss"}, "best_metric: expected None without keep_best; got 'loss'"),
        ({"keep_best": 1, "best_metric": "loss", "best_mode": "up"}, "best_mode: expected max or min"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        Checkpoints(**change)


def test_arrays_may_be_donated_while_they_are_saved(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda a: a * 0, tree), donate_argnums=0)
    state = make_state()
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, state, {})
        for _ in range(3):
            state = overwrite(state)
    assert_same_bits(newest(tmp_path)[1], make_state())


def test_restored_arrays_go_where_they_are_wanted(tmp_path):
    save(tmp_path, 1)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, state = newest(tmp_path, shardings={"params": wanted, "opt_state": wanted})
    assert all(leaf.sharding == wanted for leaf in jax.tree.leaves(state))
    assert_same_bits(state, make_state(1))


def test_what_a_killed_save_leaves_is_invisible_and_removed(tmp_path):
    save(tmp_path, 1)
    half = tmp_path / "2.orbax-checkpoint-tmp-7"
    (half / "state").mkdir(parents=True)
    (half / "state" / "manifest.ocdbt").write_bytes(b"half")
    assert newest(tmp_path)[0] == 1
    assert not half.exists()
    save(tmp_path, 2)
    assert newest(tmp_path)[0] == 2


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "missing": lambda path: path.unlink(),
    "flipped": flip_a_bit,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_moved_aside_and_the_one_before_used(tmp_path, damage):
    save(tmp_path, 6, 7)
    DAMAGES[damage](largest_file(tmp_path / "7" / "state"))
    with pytest.warns(UserWarning, match=rf"^{tmp_path / '7'}: .* moved to 7\.damaged, going on from"):
        step, state = newest(tmp_path)
    assert step == 6
    assert_same_bits(state, make_state(6))
    assert (tmp_path / "7.damaged").is_dir()
    save(tmp_path, 7)
    assert newest(tmp_path)[0] == 7
    gc.collect()  # orbax leaves coroutines of the failed read behind, which warn when they are collected


def test_changed_numbers_are_found_though_the_file_is_sound(tmp_path):
    """Another run's state under this run's fingerprints: every byte can be read, and is wrong."""
    save(tmp_path / "a", 6, 7)
    save(tmp_path / "b", 8)
    shutil.rmtree(tmp_path / "a/7/state")
    shutil.copytree(tmp_path / "b/8/state", tmp_path / "a/7/state")
    with pytest.warns(UserWarning, match=r"/a/7: \['.*: expected fingerprint \d+; got \d+; moved to"):
        assert newest(tmp_path / "a")[0] == 6


def test_a_damaged_run_part_is_found(tmp_path):
    save(tmp_path, 7)
    (tmp_path / "7" / "run" / "metadata").write_text('{"step": ')
    with pytest.raises(
        InputError, match=r"/7: run: expected a whole checkpoint; .*; no checkpoint before it"
    ):
        newest(tmp_path)
    for run in ("[]", '{"step": 7}', '{"arrays": 3}', '{"arrays": {"x": 3}}'):
        (tmp_path / "7" / "run" / "metadata").write_text(run)
        with pytest.raises(InputError, match="/7: run: expected an object that describes arrays; got"):
            newest(tmp_path)


def test_a_run_is_not_begun_anew_over_damaged_checkpoints(tmp_path):
    save(tmp_path, 6, 7)
    for step in ("6", "7"):
        shutil.rmtree(tmp_path / step / "state")
    with pytest.raises(InputError, match=r"/7: state: .*; to begin anew, choose another folder$"):
        newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(InputError, match=r"/c: folder: expected a folder; got File exists"):
        CheckpointStore(tmp_path / "c", keep=1)


def test_other_arrays_are_refused_and_left_alone(tmp_path):
    save(tmp_path, 1)
    other = make_state()
    other["params"]["embed"] = jnp.zeros((32, 32))
    with pytest.raises(InputError, match=r"/1: \['params'\]\['embed'\]: .*\[32, 32\].*; got .*\[64, 32\]"):
        newest(tmp_path, other)
    del other["params"]["embed"]
    with pytest.raises(InputError, match=r"/1: \['params'\]\['embed'\]: expected none; got .*\[64, 32\]"):
        newest(tmp_path, other)
    assert newest(tmp_path)[0] == 1


def test_a_refusal_passes_through_and_changes_nothing(tmp_path):
    def refuse(step: int, run: dict) -> None:
        raise InputError("checkpoint", "seed", expected=0, actual=1)

    save(tmp_path, 1)
    with (
        CheckpointStore(tmp_path, keep=1) as store,
        pytest.raises(InputError, match=r"seed: .* got 1"),
    ):
        store.newest(make_state(), refuse)
    assert newest(tmp_path)[0] == 1


def test_relative_folders_are_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("runs/a"), 1)
    assert (tmp_path / "runs/a/1").is_dir()


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
