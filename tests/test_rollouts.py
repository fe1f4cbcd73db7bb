"""Recorded rollouts: files in and out, training sequences, the generator, and what is refused."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.rollouts import (
    Rollouts,
    concatenate_rollouts,
    load_rollouts,
    samples_from_rollouts,
    save_rollouts,
)
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts

ARRAYS = {
    "tokens": np.array([5, 6, 7, 8, 9, 5, 6, 4, 3], np.int32),
    "offsets": np.array([0, 5, 9], np.int64),
    "completion_spans": np.array([[0, 1, 2], [0, 3, 5], [1, 2, 4]], np.int32),
    "task_id": np.array([7, 3], np.int32),
    "trial": np.array([0, 1], np.int32),
    "reward": np.array([1.0, 0.5], np.float32),
    "logprobs": np.array([np.nan, -1, np.nan, -2, -3, np.nan, np.nan, -4, -5], np.float32),
    "versions": np.array([0, 1, 0, 2, 3, 0, 0, 4, 5], np.int32),
    "episode": np.array([4, 2], np.int32),
    "step_reward": np.array([0.1, 0.2, 0.3], np.float32),
}


def write(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {name: array for name, array in {**ARRAYS, **changes}.items() if array is not None}
    np.savez(path, **arrays)
    return path


def test_one_sequence_per_completion_with_loss_on_it():
    samples = samples_from_rollouts(Rollouts(**ARRAYS))
    assert [s.tolist() for s in samples.sequences] == [[5, 6], [5, 6, 7, 8, 9], [5, 6, 4, 3]]
    assert samples.sequence.tolist() == [0, 1, 1, 2, 2]
    assert samples.position.tolist() == [1, 3, 4, 2, 3]
    values = {name: value.tolist() for name, value in samples.values.items()}
    assert values == {
        "completion": [0, 1, 1, 2, 2],
        "rollout": [0, 0, 0, 1, 1],
        "reward": [1.0, 1.0, 1.0, 0.5, 0.5],
        "old_logp": [-1.0, -2.0, -3.0, -4.0, -5.0],
        "version": [1, 2, 3, 4, 5],
    }


def test_sequences_are_views():
    rollouts = Rollouts(**ARRAYS)
    assert all(np.shares_memory(s, rollouts.tokens) for s in samples_from_rollouts(rollouts).sequences)


def test_every_token_of_a_completion_has_loss():
    """A prompt of 3 with completions of 2 and 4 tokens: six terms."""
    rollouts = Rollouts(
        tokens=np.arange(12, dtype=np.int32),
        offsets=np.array([0, 5, 12]),
        completion_spans=np.array([[0, 3, 5], [1, 3, 7]], np.int32),
    )
    samples = samples_from_rollouts(rollouts)
    assert list(zip(samples.sequence.tolist(), samples.position.tolist(), strict=True)) == [
        (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (1, 6),
    ]  # fmt: skip


def test_a_first_token_has_no_loss_and_empty_completions_no_sequence():
    spans = np.array([[0, 0, 1], [0, 2, 2], [0, 0, 3], [1, 4, 4]], np.int32)
    changes = {"completion_spans": spans, "logprobs": None, "step_reward": None}
    samples = samples_from_rollouts(Rollouts(**{**ARRAYS, **changes}))
    assert [s.tolist() for s in samples.sequences] == [[5, 6, 7]]
    assert samples.position.tolist() == [1, 2]
    assert samples.values["completion"].tolist() == [2, 2]


def test_modulo_keeps_shared_prefixes_shared():
    samples = samples_from_rollouts(Rollouts(**ARRAYS), vocab_mod=4, vocab_size=4)
    assert [s.tolist() for s in samples.sequences] == [[1, 2], [1, 2, 3, 0, 1], [1, 2, 0, 3]]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_samples_equal_the_loop(data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    spans = []
    for i, n in enumerate(lengths):
        for _ in range(data.draw(st.integers(0, 3))):
            start, end = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
            spans.append((i, start, end))
    tokens = np.arange(sum(lengths), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rollouts = Rollouts(tokens, offsets, np.array(spans, np.int32).reshape(-1, 3))
    expected = [
        (tokens[offsets[i] : offsets[i] + end].tolist(), list(range(max(start, 1), end)))
        for i, start, end in spans
        if end > max(start, 1)
    ]
    samples = samples_from_rollouts(rollouts)
    assert [
        (s.tolist(), samples.position[samples.sequence == n].tolist())
        for n, s in enumerate(samples.sequences)
    ] == expected


def test_taken_rollouts_keep_all_that_is_theirs():
    whole = Rollouts(**ARRAYS)
    assert_equal(whole.take([0, 1]), whole)
    swapped = whole.take([1, 0])
    assert swapped.tokens.tolist() == [5, 6, 4, 3, 5, 6, 7, 8, 9]
    assert swapped.offsets.tolist() == [0, 4, 9]
    assert swapped.completion_spans.tolist() == [[0, 2, 4], [1, 1, 2], [1, 3, 5]]
    assert swapped.task_id.tolist() == [3, 7]
    assert swapped.versions.tolist() == [0, 0, 4, 5, 0, 1, 0, 2, 3]
    assert swapped.episode.tolist() == [2, 4]
    np.testing.assert_array_equal(swapped.step_reward, np.float32([0.3, 0.1, 0.2]))
    np.testing.assert_array_equal(whole.take([1]).step_reward, np.float32([0.3]))
    assert_equal(whole.select([3]), whole.take([1]))


def test_saved_rollouts_are_loaded_as_they_were(tmp_path):
    whole = Rollouts(**ARRAYS)
    save_rollouts(tmp_path / "all.npz", whole)
    assert_equal(load_rollouts(tmp_path / "all.npz"), whole)
    plain = Rollouts(whole.tokens, whole.offsets, whole.completion_spans)
    save_rollouts(tmp_path / "plain.npz", plain)
    assert_equal(load_rollouts(tmp_path / "plain.npz"), plain)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.npz", "plain.npz"]


def test_the_digest_tells_rollouts_apart():
    whole = Rollouts(**ARRAYS)
    assert Rollouts(**ARRAYS, source="elsewhere").digest() == whole.digest()
    digests = {whole.digest()}
    for name in ("task_id", "trial", "reward", "logprobs", "versions", "episode", "step_reward"):
        digests.add(dataclasses.replace(whole, **{name: None}).digest())
        digests.add(
            dataclasses.replace(whole, **{name: getattr(whole, name) + ARRAYS[name].dtype.type(1)}).digest()
        )
    assert len(digests) == 15


def test_rollouts_without_episodes_keep_the_digest_of_stored_runs():
    plain = {name: array for name, array in ARRAYS.items() if name not in ("episode", "step_reward")}
    assert Rollouts(**plain).digest().startswith("b5d490b2c642798c")


def test_parts_are_put_together_and_their_episodes_stay_apart():
    one = Rollouts(**ARRAYS)
    both = concatenate_rollouts([one, one.take([1, 0])])
    assert_equal(both.take([0, 1]), dataclasses.replace(one, episode=np.array([0, 1], np.int32)))
    assert both.tokens.tolist() == [*one.tokens.tolist(), 5, 6, 4, 3, 5, 6, 7, 8, 9]
    assert both.offsets.tolist() == [0, 5, 9, 13, 18]
    assert both.completion_spans[:, 0].tolist() == [0, 0, 1, 2, 3, 3]
    assert both.episode.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(both.step_reward, np.float32([0.1, 0.2, 0.3, 0.3, 0.1, 0.2]))
    same_task = {
        "task_id": np.full(2, 7, np.int32),
        "trial": np.zeros(2, np.int32),
        "reward": np.ones(2, np.float32),
    }
    shared = dataclasses.replace(one, episode=np.full(2, 9, np.int32), **same_task)
    plain = dataclasses.replace(one, episode=None, step_reward=None)
    mixed = concatenate_rollouts([shared, plain, shared])
    assert mixed.episode.tolist() == [0, 0, 2, 3, 4, 4]
    np.testing.assert_array_equal(mixed.step_reward, np.float32([0.1, 0.2, 0.3, 0, 0, 0, 0.1, 0.2, 0.3]))
    assert concatenate_rollouts([plain, plain]).episode is None
    assert_equal(concatenate_rollouts([plain]), plain)


def test_parts_that_do_not_fit_are_refused():
    one = Rollouts(**ARRAYS, source="a.npz")
    other = dataclasses.replace(one, reward=None, source="b.npz")
    with pytest.raises(InputError, match=r"b\.npz: reward: expected an array named 'reward', as others have"):
        concatenate_rollouts([one, other])
    with pytest.raises(InputError, match="parts: expected at least one"):
        concatenate_rollouts([])


def test_other_widths_are_converted_and_other_arrays_ignored(tmp_path):
    changes = {
        "tokens": ARRAYS["tokens"].astype(np.uint16),
        "offsets": ARRAYS["offsets"].astype(np.int32),
        "reward": np.array([1, 0]),
        "extra": np.zeros(3),
    }
    loaded = load_rollouts(write(tmp_path / "r.npz", **changes))
    assert_equal(loaded, Rollouts(**{**ARRAYS, "reward": np.array([1, 0], np.float32)}))


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path / "r.npz")
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space left"):
        save_rollouts(path, Rollouts(**ARRAYS))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.npz"]


@pytest.mark.parametrize(
    ("changes", "field", "actual"),
    [
        ({"tokens": None}, "tokens", "arrays ["),
        ({"completion_spans": None}, "completion_spans", "arrays ["),
        ({"tokens": ARRAYS["tokens"].astype(np.float32)}, "tokens", "float32"),
        ({"tokens": ARRAYS["tokens"].astype(np.int64) << 40}, "tokens", "3298534883328 .. 9895604649984"),
        ({"tokens": ARRAYS["tokens"] - 4}, "tokens[8]", "-1"),
        ({"tokens": ARRAYS["tokens"].reshape(3, 3)}, "tokens", "(3, 3)"),
        ({"offsets": np.array([0, 5, 8])}, "offsets", "0 .. 8"),
        ({"offsets": np.array([1, 5, 9])}, "offsets", "1 .. 9"),
        ({"offsets": np.array([0, 10, 9])}, "offsets", "falling after index 1"),
        ({"offsets": np.array([], np.int64)}, "offsets", "(0,)"),
        ({"completion_spans": np.array([[0, 1]], np.int32)}, "completion_spans", "(1, 2)"),
        ({"completion_spans": np.array([[2, 0, 1]], np.int32)}, "completion_spans[0]", "2"),
        ({"completion_spans": np.array([[-1, 0, 1]], np.int32)}, "completion_spans[0]", "-1"),
        ({"completion_spans": np.array([[0, 1, 2], [1, 2, 5]], np.int32)}, "completion_spans[1]", "end 5"),
        ({"completion_spans": np.array([[0, 3, 2]], np.int32)}, "completion_spans[0]", "start 3, end 2"),
        ({"completion_spans": np.array([[0, -1, 2]], np.int32)}, "completion_spans[0]", "start -1, end 2"),
        ({"reward": np.array([1.0, np.nan])}, "reward of rollout 1", "nan"),
        ({"reward": np.array([1.0, 1e300])}, "reward of rollout 1", "inf"),
        ({"reward": np.ones(3)}, "reward", "(3,)"),
        ({"reward": np.array(["a", "b"])}, "reward", "<U1"),
        ({"task_id": np.zeros((2, 1), np.int32)}, "task_id", "(2, 1)"),
        ({"logprobs": np.full(9, np.nan, np.float32)}, "logprobs of token 1", "nan"),
        ({"logprobs": np.zeros(8)}, "logprobs", "(8,)"),
        ({"versions": np.zeros(9)}, "versions", "float64"),
        ({"episode": np.zeros(3, np.int32)}, "episode", "(3,)"),
        ({"episode": np.zeros(2, np.int32)}, "task_id of rollout 1", "3"),
        ({"episode": np.zeros(2, np.int32), "task_id": None}, "trial of rollout 1", "1"),
        ({"episode": np.zeros(2, np.int32), "task_id": None, "trial": None}, "reward of rollout 1", "0.5"),
        ({"step_reward": np.zeros(2)}, "step_reward", "(2,)"),
        ({"step_reward": np.array([0, np.inf, 1])}, "step_reward of completion 1", "inf"),
    ],
)
def test_bad_arrays_are_refused_by_name(tmp_path, changes, field, actual):
    path = write(tmp_path / "bad.npz", **changes)
    with pytest.raises(InputError) as caught:
        load_rollouts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {field}: expected ")
    assert actual in message.split("; got ")[1]
    assert "\n" not in message


@pytest.mark.parametrize("kept", [0, 1, 30, 200, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = write(tmp_path / "r.npz")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(InputError, match=r"r\.npz: file: expected a whole \.npz archive; got"):
        load_rollouts(path)


def test_a_flipped_bit_is_refused(tmp_path):
    path = write(tmp_path / "r.npz")
    data = bytearray(path.read_bytes())
    data[data.index(ARRAYS["tokens"].tobytes()) + 2] ^= 8
    path.write_bytes(data)
    with pytest.raises(InputError, match="Bad CRC-32"):
        load_rollouts(path)


def test_files_that_are_no_archives_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.npz: file: expected an \.npz file; got no such file"):
        load_rollouts(tmp_path / "none.npz")
    with pytest.raises(InputError, match=r"file: expected a whole \.npz archive; got .*directory"):
        load_rollouts(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"file: expected an \.npz archive; got a single \.npy array"):
        load_rollouts(tmp_path / "one.npy")
    (tmp_path / "text.npz").write_text("tokens = 3")
    with pytest.raises(InputError, match=r"file: expected a whole \.npz archive"):
        load_rollouts(tmp_path / "text.npz")


def test_an_encrypted_archive_is_refused(tmp_path):
    path = write(tmp_path / "r.npz")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag in the central directory
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"r\.npz: file: expected a whole \.npz archive; got .*encrypted"):
        load_rollouts(path)


def test_pickled_objects_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    file = io.BytesIO()
    np.savez(file, **{**ARRAYS, "tokens": np.array([Bomb()], object)}, allow_pickle=True)
    (tmp_path / "bomb.npz").write_bytes(file.getvalue())
    with pytest.raises(InputError, match="Object arrays cannot be loaded"):
        load_rollouts(tmp_path / "bomb.npz")


def test_ids_lengths_and_tasks_are_checked():
    rollouts = Rollouts(**ARRAYS, source="r.npz")
    assert len(samples_from_rollouts(rollouts, vocab_size=10, max_length=5).sequences) == 3
    with pytest.raises(InputError, match=r"r\.npz: tokens\[4\]: .* below the vocabulary's 9; got 9"):
        samples_from_rollouts(rollouts, vocab_size=9)
    with pytest.raises(InputError, match=r"completion 1 of rollout 0: .* at most 4 tokens; got 5"):
        samples_from_rollouts(rollouts, max_length=4)
    with pytest.raises(InputError, match=r"task_id: expected rollouts of task 5; got tasks 3 \.\. 7"):
        rollouts.select([7, 5])
    for vocab_mod in (0, -3, 2**31):
        with pytest.raises(InputError, match=f"vocab_mod: expected 1 to 2147483647; got {vocab_mod}"):
            rollouts.modulo(vocab_mod)
    with pytest.raises(InputError, match="reward: expected an array named 'reward'"):
        dataclasses.replace(rollouts, reward=None).require("reward")


def test_generated_rollouts_follow_their_parameters():
    spec = SyntheticRollouts(vocab_size=64, tasks=5, trials=3, system_tokens=40, seed=3)
    rollouts = generate_rollouts(spec)
    assert rollouts.tokens.max() < 64
    assert rollouts.task_id.tolist() == [0, 1, 2, 3, 4] * 3
    assert rollouts.trial.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    starts = [rollouts.tokens[o : o + 40].tolist() for o in rollouts.offsets[:-1]]
    assert all(start == starts[0] for start in starts)
    assert_equal(generate_rollouts(spec), rollouts)
    other = generate_rollouts(dataclasses.replace(spec, seed=4))
    assert other.tokens[:40].tolist() != rollouts.tokens[:40].tolist()


def test_branching_decides_how_much_trials_share():
    def trials(branching: float) -> list[list[list[int]]]:
        made = generate_rollouts(SyntheticRollouts(tasks=3, trials=4, branching=branching))
        parts = [made.tokens[a:b].tolist() for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
        return [parts[task::3] for task in range(3)]

    assert all(len({tuple(trial) for trial in task}) == 1 for task in trials(0.0))
    assert all(len({tuple(trial) for trial in task}) == 4 for task in trials(1.0))


def test_generated_text_can_be_learned():
    """Inside completions most tokens have one usual successor; a uniform guess knows 1 in 512."""
    made = generate_rollouts(SyntheticRollouts(tasks=32))
    chosen = np.flatnonzero(made.chosen())
    pairs, counts = np.unique(
        np.stack([made.tokens[chosen - 1], made.tokens[chosen]]), axis=1, return_counts=True
    )
    best = {int(previous): 0 for previous in pairs[0]}
    for previous, count in zip(pairs[0].tolist(), counts.tolist(), strict=True):
        best[previous] = max(best[previous], count)
    assert sum(best.values()) / len(chosen) > 0.6
    by_task = made.reward.reshape(4, 32)
    assert (by_task.max(0) == 1).mean() > 0.9
    assert (by_task.min(0) == 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 8), ("trials", 0), ("turns", 0.5), ("branching", 1.5), ("branching", -0.1),
     ("tool_tokens", 2), ("turns", float("nan"))],
)  # fmt: skip
def test_the_generator_refuses_what_it_cannot_make(name, value):
    with pytest.raises(InputError, match=f"SyntheticRollouts: {name}: "):
        SyntheticRollouts(**{name: value})


def assert_equal(a: Rollouts, b: Rollouts) -> None:
    for field in dataclasses.fields(Rollouts):
        if field.name != "source":
            left, right = getattr(a, field.name), getattr(b, field.name)
            assert (left is None) == (right is None), field.name
            if left is not None:
                assert left.dtype == right.dtype, field.name
                np.testing.assert_array_equal(left, right, err_msg=field.name)
