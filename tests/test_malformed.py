"""Malformed input, command by command: one line on stderr, exit status 2, and nothing of the user's touched.

Each case breaks one thing in something that works, and names a part of the line that must come.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dta_jax import convert, evaluate, export, inspect, train
from dta_jax.errors import run_command
from dta_jax.loop import run_training
from dta_jax.prepare import prepare
from dta_jax.rollouts import save_rollouts
from dta_jax.synthetic import generate_rollouts
from tests.chat_folder import write_chat_folder
from tests.test_train import ROLLOUTS, SFT

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "golden" / "qwen3_tied"
SHARDED = ROOT / "tests" / "golden" / "qwen3_yarn"


def ends(main: Callable, arguments: list[str], capsys) -> tuple[int, str]:
    """Status and stderr of a command."""
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: main(arguments))
    return stopped.value.code, capsys.readouterr().err


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(main: Callable, arguments: list[str], words: str, inputs: Path, out: Path, capsys) -> None:
    """The command ends in one line that has `words`; inputs are as before, and there is no output."""
    before = contents(inputs)
    status, text = ends(main, arguments, capsys)
    assert status == 2, text
    assert text.startswith("error: "), text
    assert text.endswith("\n"), text
    assert text.count("\n") == 1, text
    assert words in text, text
    assert contents(inputs) == before
    assert not out.exists() or not contents(out)


# configs

CONFIGS = {
    "a name that does not exist": ("Trian.steps = 5", "did you mean Train?"),
    "a field that does not exist": ("Train.step = 5", "did you mean steps?"),
    "text for a number": ("Train.steps = 'many'", "Train.steps"),
    "a fraction for a count": ("Train.steps = 2.5", "Train.steps"),
    "a truth for a count": ("Train.steps = True", "Train.steps"),
    "no steps": ("Train.steps = 0", "Train.steps: expected at least 1"),
    "a negative seed": ("Train.seed = -1", "Train.seed"),
    "a seed too large": ("Train.seed = 4294967296", "Train.seed"),
    "half a binding": ("Train.steps =", "Train.steps ="),
    "no binding at all": ("Train", "Train"),
    "a builder that is not called": ("Train.model = @Qwen3Config", "Train.model"),
    "the wrong builder": ("Train.model = @AdamW()", "Train.model"),
    "an unknown builder": ("Train.model = @GPT9()", "GPT9"),
    "an unknown macro": ("Train.steps = %NOWHERE", "NOWHERE"),
    "a chunk that does not fit": ("Planner.chunk_size = 1000", "Planner.chunk_size"),
    "an unknown strategy": ("Planner.strategy = 'fastest'", "Planner.strategy: expected one of"),
    "a budget without a choice": ("Planner.memory_budget = 4.0", "None without 'auto'"),
    "a learning rate of nothing": ("AdamW.learning_rate = 0.0", "AdamW.learning_rate"),
    "a learning rate without end": ("AdamW.learning_rate = 1e999", "AdamW.learning_rate"),
    "an odd number of heads": ("Qwen3Config.num_attention_heads = 3", "num_key_value_heads"),
    "an unknown dtype": ("Qwen3Config.dtype = 'float8'", "dtype"),
    "advantages that nothing reads": ("Train.loss = @NLL()", "does not read advantages"),
    "a critic that nothing asks for": ("Train.critic = @Critic()", "Train.critic"),
    "more groups than there are": ("Train.batch_groups = 99", "batch_groups: expected at most 7"),
    "a vocabulary too small for the data": ("Qwen3Config.vocab_size = 100", "below the vocabulary's 100"),
    "a context too short for the data": (
        "Qwen3Config.max_position_embeddings = 64",
        "max_position_embeddings",
    ),
    "sequences longer than allowed": ("Train.max_length = 100", "at most 100 tokens"),
    "a mesh larger than the machine": ("MeshShape.data = 1024", "1024"),
    "evaluation without an environment": ("Train.evaluate = @Evaluate()", "Train.evaluate"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case, tmp_path, capsys):
    binding, words = CONFIGS[case]
    config = ROOT / "configs" / "offline.gin"
    extra = ["--gin", "Train.mesh = @MeshShape()"] if "MeshShape" in binding else []
    arguments = [str(config), *extra, "--gin", binding, "--out", str(tmp_path / "out")]
    refused(train.main, arguments, words, config.parent, tmp_path / "out", capsys)


FILES = {
    "no such file": (None, "No such file"),
    "an empty file": (b"", "Train"),
    "not text": (b"\xff\xfe\x00binary", "text"),
    "a file that includes what is not there": (b"include 'nowhere.gin'\n", "nowhere.gin"),
    "a string without an end": (b"Train.seed = 'abc\n", "run.gin:1: syntax"),
}


@pytest.mark.parametrize("case", FILES)
def test_config_files(case, tmp_path, capsys):
    data, words = FILES[case]
    file = tmp_path / "in" / "run.gin"
    file.parent.mkdir()
    if data is not None:
        file.write_bytes(data)
    refused(
        train.main, [str(file), "--out", str(tmp_path / "out")], words, file.parent, tmp_path / "out", capsys
    )


# recorded rollouts


def good() -> dict[str, np.ndarray]:
    """Two rollouts of one task, 5 tokens each, loss on the last two."""
    return {
        "tokens": np.arange(10, dtype=np.int32),
        "offsets": np.array([0, 5, 10]),
        "completion_spans": np.array([[0, 3, 5], [1, 3, 5]], np.int32),
        "task_id": np.zeros(2, np.int32),
        "reward": np.array([0, 1], np.float32),
    }


ROLLOUT_FILES: dict[str, tuple[dict, str]] = {
    "no tokens": ({"tokens": None}, "tokens"),
    "no spans": ({"completion_spans": None}, "completion_spans"),
    "tokens that are text": ({"tokens": np.array(["a", "b"])}, "tokens"),
    "tokens that are fractions": ({"tokens": np.ones(10, np.float32)}, "tokens"),
    "a negative token": ({"tokens": np.arange(-1, 9, dtype=np.int32)}, "tokens"),
    "tokens in a square": ({"tokens": np.zeros((2, 5), np.int32)}, "tokens"),
    "offsets that go back": ({"offsets": np.array([0, 7, 5, 10])}, "offsets"),
    "offsets beyond the tokens": ({"offsets": np.array([0, 5, 11])}, "offsets"),
    "offsets that do not begin at 0": ({"offsets": np.array([1, 5, 10])}, "offsets"),
    "no offsets at all": ({"offsets": np.zeros(0, np.int64)}, "offsets"),
    "a span of no rollout": ({"completion_spans": np.array([[2, 3, 5]], np.int32)}, "completion_spans"),
    "a span beyond its rollout": ({"completion_spans": np.array([[0, 3, 6]], np.int32)}, "completion_spans"),
    "a span that ends before it begins": (
        {"completion_spans": np.array([[0, 4, 3]], np.int32)},
        "completion_spans",
    ),
    "spans of two numbers": ({"completion_spans": np.array([[0, 3]], np.int32)}, "completion_spans"),
    "a reward that is no number": ({"reward": np.array([0, np.nan], np.float32)}, "reward"),
    "a reward too few": ({"reward": np.zeros(1, np.float32)}, "reward"),
    "a task too many": ({"task_id": np.zeros(3, np.int32)}, "task_id"),
    "objects": ({"reward": np.array([{"a": 1}, None], object)}, "file: expected a whole .npz"),
}


def rollouts_command(path: Path, out: Path) -> list[str]:
    config = ROOT / "configs" / "tau_airline_offline.gin"
    return [str(config), "--gin", f"ROLLOUTS = '{path}'", "--out", str(out)]


@pytest.mark.parametrize("command", ["train", "inspect"])
@pytest.mark.parametrize("case", ROLLOUT_FILES)
def test_rollouts(case, command, tmp_path, capsys):
    changes, words = ROLLOUT_FILES[case]
    arrays = {name: array for name, array in {**good(), **changes}.items() if array is not None}
    file, out = tmp_path / "in" / "rollouts.npz", tmp_path / "out"
    file.parent.mkdir()
    np.savez(file, **arrays)
    if command == "train":
        refused(train.main, rollouts_command(file, out), words, file.parent, out, capsys)
    else:
        refused(inspect.main, [str(file), "--out", str(out)], words, file.parent, out, capsys)


BYTES: dict[str, tuple[bytes | None, str]] = {
    "no file": (None, "no such file"),
    "an empty file": (b"", "file"),
    "text": (b"tokens: 1 2 3", "file"),
    "the head of an archive": (b"PK\x03\x04", "file"),
}


@pytest.mark.parametrize("case", BYTES)
def test_rollout_bytes(case, tmp_path, capsys):
    data, words = BYTES[case]
    file, out = tmp_path / "in" / "rollouts.npz", tmp_path / "out"
    file.parent.mkdir()
    if data is not None:
        file.write_bytes(data)
    refused(train.main, rollouts_command(file, out), words, file.parent, out, capsys)


def test_rollouts_without_differences(tmp_path, capsys):
    file, out = tmp_path / "in" / "rollouts.npz", tmp_path / "out"
    file.parent.mkdir()
    np.savez(file, **{**good(), "reward": np.ones(2, np.float32)})
    refused(train.main, rollouts_command(file, out), "rewards", file.parent, out, capsys)


# model folders


def edit_json(name: str, **changes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(values))

    return edit


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: overwrite(name, (folder / name).read_bytes()[:keep])(folder)


def headed(size: int, text: bytes) -> bytes:
    return struct.pack("<Q", size) + text


def redirect(to: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        index["weight_map"] = dict.fromkeys(index["weight_map"], to)
        file.write_text(json.dumps(index))

    return edit


WEIGHTS = "model.safetensors"
FOLDERS: dict[str, tuple[Path, Callable[[Path], object], str]] = {
    "no config": (MODEL, lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a config that is no JSON": (MODEL, overwrite("config.json", b"{"), "config.json"),
    "a config that is a list": (MODEL, overwrite("config.json", b"[]"), "config.json"),
    "another family": (MODEL, edit_json("config.json", model_type="mamba"), "model_type"),
    "no layers": (MODEL, edit_json("config.json", num_hidden_layers=0), "num_hidden_layers"),
    "more layers than weights": (MODEL, edit_json("config.json", num_hidden_layers=9), "layers"),
    "a width of text": (MODEL, edit_json("config.json", hidden_size="wide"), "hidden_size"),
    "another width": (MODEL, edit_json("config.json", intermediate_size=48), "shape"),
    "an activation that is not ours": (MODEL, edit_json("config.json", hidden_act="relu"), "hidden_act"),
    "no weights": (MODEL, lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
    "weights of nothing": (MODEL, overwrite(WEIGHTS, b""), WEIGHTS),
    "weights cut off": (MODEL, cut(WEIGHTS, 3000), WEIGHTS),
    "a header longer than the file": (MODEL, overwrite(WEIGHTS, headed(2**40, b"{}")), WEIGHTS),
    "a header that is no JSON": (MODEL, overwrite(WEIGHTS, headed(2, b"}{")), WEIGHTS),
    "a pickle for weights": (MODEL, overwrite(WEIGHTS, b"\x80\x04N."), WEIGHTS),
    "an index that leaves the folder": (SHARDED, redirect("../stolen.safetensors"), "index"),
    "an index with an absolute path": (SHARDED, redirect("/etc/passwd"), "index"),
    "an index to what is not there": (SHARDED, redirect("model-00009-of-00003.safetensors"), "00009"),
    "an index that is no JSON": (SHARDED, overwrite("model.safetensors.index.json", b"{"), "index"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_model_folders(case, tmp_path, capsys):
    source, damage, words = FOLDERS[case]
    folder, out = shutil.copytree(source, tmp_path / "in" / "model"), tmp_path / "out"
    damage(folder)
    arguments = [str(ROOT / "configs" / "offline.gin"), "--out", str(out)]
    for binding in (
        "Train.model = @HuggingFaceModel()",
        f"HuggingFaceModel.path = '{folder}'",
        "HuggingFaceModel.dtype = 'float32'",
        "SyntheticRollouts.vocab_size = 48",
        "SyntheticRollouts.system_tokens = 8",
        "SyntheticRollouts.completion_tokens = 4",
        "SyntheticRollouts.tool_tokens = 4",
        "SyntheticRollouts.turns = 1",
    ):
        arguments += ["--gin", binding]
    before = contents(folder)
    status, text = ends(train.main, arguments, capsys)
    last = [line for line in text.splitlines() if line.startswith("error: ")]
    assert status == 2, text
    assert len(last) == 1, text
    assert words in last[0], text
    assert contents(folder) == before
    assert not [path for path in (out / "checkpoints").rglob("*") if path.is_file()]


# tokenizers and message logs

TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "a tokenizer that is no JSON": (overwrite("tokenizer.json", b"{"), "tokenizer.json"),
    "a tokenizer of another kind": (overwrite("tokenizer.json", b'{"model": 7}'), "tokenizer.json"),
    "settings that are no JSON": (overwrite("tokenizer_config.json", b"{"), "tokenizer_config.json"),
    "no chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), "template"),
    "a template that is not jinja": (overwrite("chat_template.jinja", b"{% if %}"), "template"),
    "a template that looks around": (
        overwrite("chat_template.jinja", b"{{ ''.__class__.__mro__ }}{{ messages[0].content }}"),
        "template",
    ),
    "a template that divides by nothing": (overwrite("chat_template.jinja", b"{{ 1 // 0 }}"), "template"),
    "a template that is too long for memory": (
        overwrite("chat_template.jinja", b"{{ 'x' * 10**15 }}"),
        "template",
    ),
    "a template that never ends": (
        overwrite("chat_template.jinja", b"{% for i in range(10**9) %}x{% endfor %}"),
        "template",
    ),
}

LOG = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "ok"}],
    "reward": 1.0,
}


def conversion(tmp_path: Path) -> tuple[list[str], Path, Path]:
    """Arguments that work, the folder of inputs, and the file to be written."""
    inputs, out = tmp_path / "in", tmp_path / "out" / "rollouts.npz"
    inputs.mkdir()
    out.parent.mkdir()
    write_chat_folder(inputs)
    (inputs / "log.jsonl").write_text(json.dumps(LOG) + "\n")
    return [str(inputs / "log.jsonl"), "--tokenizer", str(inputs), "--out", str(out)], inputs, out


def test_the_conversion_that_the_cases_break_works(tmp_path, capsys):
    arguments, _, out = conversion(tmp_path)
    convert.main(arguments)
    assert out.exists()


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(case, tmp_path, capsys):
    damage, words = TOKENIZERS[case]
    arguments, inputs, out = conversion(tmp_path)
    damage(inputs)
    refused(convert.main, arguments, words, inputs, out.parent, capsys)


LOGS: dict[str, tuple[object, str]] = {
    "no conversation": (b"", "at least one conversation"),
    "no JSON": (b"{", "line 1"),
    "a list": ([1, 2], "line 1"),
    "no messages": ({"reward": 1.0}, "messages"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    "a message of numbers": ({"messages": [{"role": "user", "content": 5}]}, "content"),
    "a reward of text": (LOG | {"reward": "good"}, "reward"),
    "a reward without end": (b'{"messages": [], "reward": Infinity}', "line 1"),
}


@pytest.mark.parametrize("case", LOGS)
def test_message_logs(case, tmp_path, capsys):
    data, words = LOGS[case]
    arguments, inputs, out = conversion(tmp_path)
    (inputs / "log.jsonl").write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")
    refused(convert.main, arguments, words, inputs, out.parent, capsys)


# runs and checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("malformed") / "run"
    run_training(prepare(SFT), folder, "")
    return folder


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))


def flip_bytes(run: Path) -> None:
    """Flips the middle of every file with arrays."""
    for path in (newest(run) / "state").rglob("*"):
        if path.is_file() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)


def rewrite_record(data: bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for path in (newest(run) / "run").iterdir():
            path.write_bytes(data)

    return damage


RUNS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no run": (shutil.rmtree, "checkpoint"),
    "no checkpoint": (lambda run: shutil.rmtree(newest(run)), "checkpoint"),
    "arrays with flipped bytes": (flip_bytes, "checkpoints"),
    "no arrays": (lambda run: shutil.rmtree(newest(run) / "state"), "checkpoints"),
    "no record": (lambda run: shutil.rmtree(newest(run) / "run"), "checkpoints"),
    "an empty record": (rewrite_record(b""), "checkpoints"),
    "a record that is no JSON": (rewrite_record(b"{"), "checkpoints"),
    "a record of something else": (rewrite_record(b'{"a": 1}'), "checkpoints"),
    "a record that is a list": (rewrite_record(b"[1]"), "checkpoints"),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(case, trained, tmp_path, capsys):
    damage, words = RUNS[case]
    run, out = shutil.copytree(trained, tmp_path / "in" / "run"), tmp_path / "out"
    damage(run)
    refused(export.main, [str(run), "--hf", str(out)], words, tmp_path / "in", out, capsys)


def test_a_step_that_is_not_there(trained, tmp_path, capsys):
    step = str(trained / "checkpoints" / "77")
    refused(export.main, [step, "--hf", str(tmp_path / "out")], "77", trained, tmp_path / "out", capsys)


def test_a_run_that_is_not_there(tmp_path, capsys):
    refused(evaluate.main, [str(tmp_path / "nowhere")], "nowhere", tmp_path, tmp_path / "out", capsys)


def test_a_folder_that_is_a_file(tmp_path, capsys):
    file = tmp_path / "in" / "out"
    file.parent.mkdir()
    file.write_text("mine")
    config = str(ROOT / "configs" / "offline.gin")
    status, text = ends(train.main, [config, "--out", str(file)], capsys)
    assert status == 2
    assert "expected a folder" in text
    assert file.read_text() == "mine"


def test_the_rollouts_that_the_cases_break_work(tmp_path):
    save_rollouts(tmp_path / "rollouts.npz", generate_rollouts(ROLLOUTS))
    inspect.main([str(tmp_path / "rollouts.npz"), "--out", str(tmp_path / "pages")])
    assert (tmp_path / "pages" / "index.html").exists()
