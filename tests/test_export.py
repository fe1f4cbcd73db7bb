"""From a run's checkpoint to a Hugging Face folder: the same tensors, or one line and nothing written."""

import dataclasses
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dta_jax.checkpoint import CheckpointStore
from dta_jax.errors import InputError
from dta_jax.export import export, find_step, main
from dta_jax.hf_config import config_from_hf, config_to_hf
from dta_jax.hf_weights import load_model
from dta_jax.loop import run_training
from dta_jax.prepare import prepare
from dta_jax.settings import AdamW, HuggingFaceModel
from tests.chat_folder import write_chat_folder
from tests.test_train import SFT

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps from a Hugging Face folder with a tokenizer, at a rate too small to change any weight."""
    root = tmp_path_factory.mktemp("export")
    source = shutil.copytree(GOLDEN / "qwen3_tied", root / "hf")
    write_chat_folder(source)
    train = dataclasses.replace(
        SFT,
        model=HuggingFaceModel(str(source), dtype="float32"),
        optimizer=AdamW(learning_rate=1e-30),
        steps=2,
        checkpoints=dataclasses.replace(SFT.checkpoints, every=1),
    )
    run_training(prepare(train), root / "run", "")
    return root / "run"


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_from_a_folder_through_training_and_back(run, tmp_path):
    source, out = run.parent / "hf", tmp_path / "out"
    before = sorted(str(path) for path in run.rglob("*"))
    line = export(run, out)
    assert line == f"{out}: step 2, 12,832 parameters in float32, tokenizer files of {source}"
    stored, written = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert stored.keys() == written.keys()
    jax.tree.map(np.testing.assert_array_equal, stored, written)
    assert load_model(out)[0] == load_model(source)[0]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert sorted(str(path) for path in run.rglob("*")) == before  # the run is only read


def test_options(run, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    export(run / "checkpoints" / "1", out, tokenizer=tokenizer, dtype="bfloat16", max_shard_bytes=10_000)
    assert files(out) == [
        "config.json",
        "generation_config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), load_model(GOLDEN / "qwen3_tied")[1])
    jax.tree.map(np.testing.assert_array_equal, rounded, load_model(out)[1])


def test_the_step_is_found(run):
    assert find_step(run) == find_step(run / "checkpoints") == run / "checkpoints" / "2"
    assert find_step(run / "checkpoints" / "1") == run / "checkpoints" / "1"


def refused(checkpoint, out, **options):
    with pytest.raises(InputError) as error:
        export(checkpoint, out, **options)
    assert not out.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input(run, tmp_path):
    out = tmp_path / "out"
    none, empty = tmp_path / "none", tmp_path / "empty"
    empty.mkdir()
    assert refused(none, out) == f"{none}: checkpoint: expected a folder; got no such folder"
    wanted = "expected a run's folder, its checkpoints, or one of them; got no checkpoint there"
    assert refused(empty, out) == f"{empty}: checkpoint: {wanted}"
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", Path("/proc/out")):
        assert refused(run, place).startswith(f"{place}: folder: expected a place to write to; got ")
    assert refused(run, out, tokenizer=none) == f"{none}: --tokenizer: expected a folder; got no such folder"


def test_a_run_of_another_kind(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints", keep=1) as store:
        store.save(3, {"params": {"embed": jnp.zeros((4, 2))}}, {"step": 3})
    step = tmp_path / "checkpoints" / "3"
    assert refused(tmp_path, tmp_path / "out") == f"{step}: model: expected the model's config; got none"
    config = load_model(GOLDEN / "qwen3_tied")[0].config
    with CheckpointStore(tmp_path / "checkpoints", keep=1) as store:
        store.save(4, {"params": {"embed": jnp.zeros((4, 2))}}, {"model": config_to_hf(config)})
    assert refused(tmp_path, tmp_path / "out") == (
        f"{tmp_path / 'checkpoints' / '4'}: ['params']['embed']: "
        "expected {'dtype': 'float32', 'shape': [48, 24]}; got {'dtype': 'float32', 'shape': [4, 2]}"
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint(run, tmp_path):
    damaged = shutil.copytree(run, tmp_path / "run")
    step = damaged / "checkpoints" / "2"
    description = json.loads((step / "run" / "metadata").read_text())
    assert config_from_hf(description["model"]).head_dim == 10
    name = "['params']['final']['scale']"
    description["arrays"][name]["fingerprint"] ^= 1
    (step / "run" / "metadata").write_text(json.dumps(description))
    assert refused(damaged, tmp_path / "out").startswith(f"{step}: {name}: expected fingerprint ")
    shutil.rmtree(step / "state" / "d")
    shutil.rmtree(step / "state" / "ocdbt.process_0")
    assert refused(damaged, tmp_path / "out").startswith(f"{step}: state: expected a whole checkpoint; got ")
    (step / "run" / "metadata").write_text("{")
    assert refused(damaged, tmp_path / "out").startswith(f"{step}: run: expected a whole checkpoint; got ")
    (step / "run" / "metadata").write_text("[]")
    assert refused(damaged, tmp_path / "out").startswith(f"{step}: run: expected an object that describes ")
    gc.collect()  # orbax leaves coroutines of the failed read behind, which warn when they are collected


def test_the_command(run, tmp_path, capsys):
    main([str(run), "--hf", str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: step 2, 12,832 parameters in bfloat16, ")
    command = [sys.executable, "-m", "dta_jax.export", str(run), "--hf", str(tmp_path / "out")]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    wanted = f"error: {tmp_path / 'out'}: folder: expected no folder yet, or an empty one; got content\n"
    assert again.stderr == wanted
    for size in ("0.0", "nan", "inf"):
        with pytest.raises(
            InputError, match=f"^export: --max-shard-gb: expected a positive size; got {size}$"
        ):
            main([str(run), "--hf", str(tmp_path / "new"), "--max-shard-gb", size])
