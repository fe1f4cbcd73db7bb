"""What `python -m dta_jax.inspect` counts, writes and refuses. `tests/browser` opens its page in Chromium."""

import base64
import json
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax import inspect, inspect_page, picture
from dta_jax.errors import InputError
from dta_jax.inspect_advice import advice
from dta_jax.inspect_page import inspection_page, operations_of_rows
from dta_jax.inspection import inspect_samples
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.rollouts import Rollouts, save_rollouts
from dta_jax.schedule_stats import stack_heights
from dta_jax.sharing import distinct_passing, mean_passing, runs_of, saved_tokens, tokens_by_depth
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from dta_jax.types import BACK, NO_PARENT, PUSH
from tests.chat_folder import write_chat_folder

SPEC = SyntheticRollouts(vocab_size=32, tasks=3, trials=2, system_tokens=20, completion_tokens=8)
KINDS = {"u1": "<u1", "u2": "<u2", "i4": "<i4", "f4": "<f4"}


def unpack(page: str) -> dict:
    """The page's data as its script reads it."""
    text = re.search(r'id="data">([^<]*)<', page).group(1)
    raw = zlib.decompress(base64.b64decode(text))
    (size,) = struct.unpack_from("<I", raw)
    data = json.loads(raw[4 : 4 + size])
    for name, kind, offset, count in data["columns"]:
        assert (4 + size + offset) % 8 == 0
        data[name] = np.frombuffer(raw, KINDS[kind], count, 4 + size + offset)
    return data


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "rollouts.npz"
    save_rollouts(path, generate_rollouts(SPEC))
    return path


@pytest.fixture(scope="module")
def found(file):
    return inspect_samples(inspect.target_of_file(file, None).subject, chunk_size=16, num_ranks=2)


def by_prefix(sequences: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Which sequences pass every prefix."""
    passing: dict[tuple[int, ...], list[int]] = {}
    for i, sequence in enumerate(sequences):
        for stop in range(1, len(sequence) + 1):
            passing.setdefault(tuple(sequence[:stop]), []).append(i)
    return passing


small_sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(small_sequences, st.data())
def test_runs_and_savings_equal_a_count_over_all_prefixes(sequences, data):
    count = len(sequences)
    rollout = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    task = np.array([0, 0, 1, 1])[rollout]
    trie = build_trie(sequences)
    runs = runs_of(trie)
    tail_run = runs.of_rows(trie.tail)
    rollouts, tasks = (distinct_passing(runs, tail_run, label) for label in (rollout, task))
    passing = by_prefix(sequences)
    assert runs.length.sum() == trie.num_rows == len(passing)

    paths: list[tuple[int, ...]] = []  # by row
    for row in range(trie.num_rows):
        above = () if trie.parent[row] == NO_PARENT else paths[trie.parent[row]]
        paths.append((*above, int(trie.token[row])))
    for u in range(len(runs.start)):
        rows = range(runs.start[u], runs.start[u] + runs.length[u])
        assert len({tuple(passing[paths[row]]) for row in rows}) == 1
        through = passing[paths[rows[0]]]
        assert runs.sequences[u] == len(through)
        assert rollouts[u] == len(set(rollout[through]))
        assert tasks[u] == len(set(task[through]))
        assert runs.depth[u] == len(paths[rows[0]]) - 1
        assert mean_passing(trie, runs, rollout)[u] == pytest.approx(np.mean(rollout[through]))
        parent = runs.parent[u]
        assert parent < u
        assert parent == NO_PARENT or runs.start[parent] + runs.length[parent] - 1 == trie.parent[rows[0]]
        assert runs.end[u] == np.searchsorted(runs.start, trie.subtree_end[rows[0]])

    lengths = np.array([len(s) for s in sequences])
    saved = saved_tokens(runs, rollouts, tasks)
    assert sum(saved.values()) == lengths.sum() - trie.num_rows
    assert saved["turns"] == sum(len(who) - len(set(rollout[who])) for who in passing.values())
    assert saved["tasks"] == sum(len(set(task[who])) - 1 for who in passing.values())
    edges, flat, tree = tokens_by_depth(trie, lengths, 3)
    assert len(flat) <= 3
    assert edges[-1] >= trie.longest_path
    assert (flat.sum(), tree.sum()) == (lengths.sum(), trie.num_rows)


def test_figures_of_a_tree_drawn_by_hand():
    """Two rollouts of one task: 0 1 2 then 3, and 0 1 then 5; turns end after 0 1 and at the ends."""
    tokens = np.array([0, 1, 2, 3, 0, 1, 5], np.int32)
    spans = np.array([[0, 1, 2], [0, 2, 4], [1, 1, 2], [1, 2, 3]], np.int32)
    rollouts = Rollouts(tokens, np.array([0, 4, 7]), spans, task_id=np.zeros(2, np.int32))
    found = inspect_samples(inspect.subject_of(rollouts, "hand"), chunk_size=2)
    assert found.runs.length.tolist() == [2, 2, 1]
    assert found.runs.sequences.tolist() == [4, 1, 1]
    assert (found.flat_tokens, found.trie.num_rows) == (2 + 4 + 2 + 3, 5)
    assert found.saved == {"turns": 4, "rollouts": 2, "tasks": 0}
    dense, leafized = found.strategies[:2]
    assert (dense.name, dense.work) == ("dense", 11 / 5)
    assert (leafized.name, leafized.work) == ("leafized", 7 / 5)
    said = "\n".join(advice(found))
    assert "Dedupe 2.2 x: the 11 tokens of 4 sequences are 5 distinct prefixes." in said
    assert "1 sequences are equal to another one" in said


def test_plans_are_those_of_the_planner(found):
    stats = found.plan.stats
    assert found.plan in found.strategies
    assert found.plan in found.chunks
    assert [plan.chunk for plan in found.chunks] == [4, 8, 16, 32, 64]
    assert found.plan.work == (3 * stats.backward_tokens_executed + stats.forward_tokens_executed) / (
        3 * found.trie.num_rows
    )
    assert all(plan.work >= plan.bound for plan in [*found.strategies, *found.chunks])
    assert found.assignment.report.num_ranks == 2
    assert [a.report.num_ranks for a in found.ranks] == [2, 4, 8, 16]


def test_the_page_holds_the_trie_and_the_schedule(found):
    data = unpack(inspection_page(found))
    runs, schedule, trie = found.runs, found.schedule, found.trie
    np.testing.assert_array_equal(data["runLength"], runs.length)
    np.testing.assert_array_equal(data["runSequences"], runs.sequences)
    rows = np.concatenate(
        [np.arange(a, a + n) for a, n in zip(data["lossStart"], data["lossLength"], strict=True)]
    )
    np.testing.assert_array_equal(rows, np.unique(schedule.entry_row))
    for u in range(len(runs.start)):
        mine = slice(data["lossOffset"][u], data["lossOffset"][u + 1])
        stop = runs.start[u] + runs.length[u]
        assert (data["lossStart"][mine] >= runs.start[u]).all()
        assert (data["lossStart"][mine] + data["lossLength"][mine] <= stop).all()
    np.testing.assert_array_equal(data["ids"][data["token"]], trie.token)  # all of them are kept
    np.testing.assert_array_equal(data["opKind"] == 1, schedule.kind == BACK)
    np.testing.assert_array_equal(data["opHeight"], stack_heights(schedule))
    lengths = np.diff(np.append(data["pieceStart"], trie.num_rows))
    backward, pushed = operations_of_rows(schedule)
    np.testing.assert_array_equal(np.repeat(data["pieceBack"], lengths), backward)
    np.testing.assert_array_equal(np.repeat(data["piecePush"], lengths), pushed)
    for o in range(schedule.num_ops):
        own = np.sort(schedule.row[schedule.offset[o] : schedule.offset[o + 1]])
        which = backward if schedule.kind[o] == BACK else pushed
        np.testing.assert_array_equal(np.flatnonzero(which == o), own)
    assert (backward >= 0).all()
    assert (schedule.kind[pushed[pushed >= 0]] == PUSH).all()
    np.testing.assert_array_equal(data["sequenceTail"], np.sort(trie.tail))


def test_the_page_needs_nothing_from_outside(found):
    page = inspection_page(found)
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|import)\s*\(", page)
    assert "<!--" not in page
    for sentence in advice(found):
        assert sentence in page


def test_long_runs_lose_the_ends_of_their_tokens(found, monkeypatch):
    monkeypatch.setattr(inspect_page, "TOKENS_KEPT", 60)
    data = unpack(inspection_page(found))
    kept = np.minimum(found.runs.length, data["keptPerRun"])
    assert kept.sum() == len(data["token"]) <= 60
    first = np.cumsum(kept) - kept
    np.testing.assert_array_equal(data["ids"][data["token"][first]], found.trie.token[found.runs.start])


def test_text_is_shown_where_there_is_a_tokenizer(tmp_path, file):
    folder = write_chat_folder(tmp_path / "chat")
    out = tmp_path / "out"
    inspect.main([str(file), "--out", str(out), "--chunk", "16", "--tokenizer", str(folder)])
    data = unpack((out / "index.html").read_text())
    assert "ids" not in data
    assert all(isinstance(text, str) for text in data["texts"])
    assert len(data["texts"]) == data["token"].max() + 1


def test_names_from_files_are_escaped(file, found):
    subject = inspect.subject_of(generate_rollouts(SPEC), "<script>alert(1)</script>.npz")
    page = inspection_page(inspect_samples(subject, chunk_size=16))
    assert "<script>alert" not in page


def test_bytes_are_counted_for_a_model(file):
    model = Qwen3(Qwen3Config(vocab_size=32, hidden_size=16, num_attention_heads=2, num_key_value_heads=1))
    subject = inspect.target_of_file(file, None).subject
    found = inspect_samples(subject, chunk_size=16, model=model)
    # keys, values and the hidden state, each with its cotangent, in float32
    assert found.row_bytes.stack == 2 * 4 * (2 * 2 * 16 + 16)
    # inputs, attention outputs and log-sum-exps of two layers, and the last layer's output
    assert found.row_bytes.residuals == 4 * (2 * (16 + 2 * 16 + 2) + 16)
    sizes = [plan.peak_bytes for plan in found.chunks]
    assert sizes == sorted(sizes)
    assert any("iB" in sentence for sentence in advice(found))
    assert unpack(inspection_page(found))["rowBytes"] == found.row_bytes.stack


def test_the_command_writes_page_and_pictures(tmp_path, file, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a" / "b"
    inspect.main([str(file), "--out", str(out), "--chunk", "16", "--ranks", "3", "--tasks", "0-1"])
    assert {path.name for path in out.iterdir()} == {
        "index.html", "trie.svg", "trie.png", "schedule.svg", "schedule.png", "ranks.svg", "ranks.png",
    }  # fmt: skip
    assert "Dedupe" in capsys.readouterr().out
    for path in out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "rollouts.npz, tasks 0-1" in (out / "trie.svg").read_text()


def test_without_matplotlib_there_are_no_png_and_a_line_says_so(tmp_path, file, capsys, monkeypatch):
    for module in (picture, inspect):
        monkeypatch.setattr(module, "can_write_png", lambda: False)
    inspect.main([str(file), "--out", str(tmp_path), "--chunk", "16"])
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / "trie.svg").exists()
    assert "pip install 'dta_jax[plots]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="matplotlib"):
        picture.Picture(1, 1, "").write_png(tmp_path / "x.png")


def test_a_run_folder_shows_the_batch_of_a_step(tmp_path, capsys):
    config = tmp_path / "operative_config.gin"
    config.write_text(
        "Train.rollouts = @SyntheticRollouts()\nTrain.model = @Qwen3Config()\nTrain.loss = @NLL()\n"
        "Train.batch_groups = 2\nTrain.max_length = 1000\nPlanner.chunk_size = 32\n"
        "SyntheticRollouts.tasks = 4\nSyntheticRollouts.trials = 2\n"
    )
    targets = [inspect.target_of_run(tmp_path, step, None) for step in (1, 2)]
    assert [target.chunk_size for target in targets] == [32, 32]
    tasks = [set(target.subject.task.tolist()) for target in targets]
    assert len(tasks[0]) == len(tasks[1]) == 2
    assert tasks[0] | tasks[1] == {0, 1, 2, 3}
    inspect.main([str(tmp_path), "--out", str(tmp_path / "out"), "--step", "2"])
    assert "needs" in capsys.readouterr().out  # the run's model is known, so bytes are


def test_of_a_run_that_makes_its_rollouts_the_newest_saved_batch_is_shown(tmp_path, file):
    (tmp_path / "operative_config.gin").write_text(
        "Train.rollouts = @LiveRollouts()\nTrain.model = @Qwen3Config()\nTrain.loss = @NLL()\n"
        "LiveRollouts.environment = @Bandit()\n"
    )
    with pytest.raises(InputError, match="rollouts: steps: expected the rollouts of a step; got none"):
        inspect.target_of_run(tmp_path, None, None)
    (tmp_path / "rollouts").mkdir()
    for step in (2, 10):
        save_rollouts(tmp_path / "rollouts" / f"{step}.npz", generate_rollouts(SPEC))
    assert inspect.target_of_run(tmp_path, None, None).subject.name == f"{tmp_path}, step 10"
    assert inspect.target_of_run(tmp_path, 2, None).subject.name == f"{tmp_path}, step 2"
    with pytest.raises(InputError, match=r"expected those of step 3; got 2, 10; LiveRollouts\.save_every"):
        inspect.target_of_run(tmp_path, 3, None)


EMPTY = Rollouts(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros((0, 3), np.int32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chunk", "0"), "--chunk: value: expected 1 to 512, or a multiple of 128; got 0"),
        (("--chunk", "-5"), "--chunk: value: expected 1 to 512, or a multiple of 128; got -5"),
        (("--chunk", "700"), "--chunk: value: expected 1 to 512, or a multiple of 128; got 700"),
        (("--ranks", "0"), "--ranks: value: expected 1 to "),
        (("--ranks", "999"), "the sequences of rollouts.npz; got 999"),
        (("--strategy", "fast"), "strategy: expected one of packed, "),
        (("--tasks", "a-b"), "--tasks: value: expected like 0-3 or 0,2,5; got 'a-b'"),
        (("--tasks", "70"), "task_id: expected rollouts of task 70; got tasks 0 .. 2"),
        (("--model", "giant"), "model preset: name: expected one of "),
        (("--tokenizer", "absent"), "absent: tokenizer.json: expected a tokenizer; got no such file"),
    ],
)
def test_bad_arguments_are_one_clear_line(tmp_path, file, arguments, message):
    with pytest.raises(InputError) as error:
        inspect.main([str(file), "--out", str(tmp_path / "out"), *arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_bad_files_are_one_clear_line(tmp_path, file):
    damaged, empty = tmp_path / "damaged.npz", tmp_path / "empty.npz"
    damaged.write_bytes(file.read_bytes()[:-200])
    save_rollouts(empty, EMPTY)
    (tmp_path / "taken").write_text("")
    out = str(tmp_path / "out")
    for arguments, message in (
        (
            [str(tmp_path / "absent.npz"), "--out", out],
            "absent.npz: file: expected an .npz file; got no",
        ),
        ([str(damaged), "--out", out], "damaged.npz: file: expected a whole .npz archive; got "),
        ([str(empty), "--out", out], "completion_spans: expected tokens with loss; got none"),
        ([str(tmp_path), "--out", out], "operative_config.gin: file: expected a readable .gin file"),
        ([str(tmp_path), "--out", out, "--step", "0"], "--step: value: expected at least 1; got 0"),
        ([str(tmp_path), "--out", out, "--tasks", "1"], "--tasks: value: expected no --tasks with a run"),
        ([str(file), "--chunk", "16", "--out", str(tmp_path / "taken")], "taken: expected a folder to write"),
    ):
        with pytest.raises(InputError) as error:
            inspect.main(arguments)
        assert message in str(error.value)
