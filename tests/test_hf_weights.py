"""Weights in and out: what is read, where it is put, what is refused; folders are whole or absent."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from dta_jax import hf_weights, safetensors_folder
from dta_jax.errors import InputError
from dta_jax.hf_config import read_config
from dta_jax.hf_weights import load_model, load_params, save_folder

GOLDEN = Path(__file__).parent / "golden"
SINGLE, SHARDED = GOLDEN / "qwen3_tied", GOLDEN / "qwen3_yarn"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"


def stored_tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SINGLE, tmp_path / "hf")


@pytest.fixture
def sharded(tmp_path):
    return shutil.copytree(SHARDED, tmp_path / "hf")


def rewrite(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def test_layers_are_stacked_and_matrices_transposed():
    _, params = load_model(SHARDED)
    stored = stored_tensors(SHARDED)
    for layer in range(2):
        np.testing.assert_array_equal(
            params["layers"]["down_proj"]["kernel"][layer],
            stored[f"model.layers.{layer}.mlp.down_proj.weight"].T,
        )
        np.testing.assert_array_equal(
            params["layers"]["q_norm"]["scale"][layer],
            stored[f"model.layers.{layer}.self_attn.q_norm.weight"],
        )
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], stored["lm_head.weight"])
    np.testing.assert_array_equal(params["final"]["scale"], stored["model.norm.weight"])


def test_blocks_of_rows_make_no_difference(monkeypatch):
    _, whole = load_model(SHARDED)
    monkeypatch.setattr(safetensors_folder, "BLOCK_ROWS", 5)
    _, blocked = load_model(SHARDED)
    jax.tree.map(np.testing.assert_array_equal, whole, blocked)


def test_cast_rounds_to_nearest():
    _, params = load_model(SINGLE, dtype="bfloat16")
    stored = stored_tensors(SINGLE)[DOWN]
    np.testing.assert_array_equal(
        params["layers"]["down_proj"]["kernel"][1], stored.astype(ml_dtypes.bfloat16).T
    )
    _, params = load_model(SINGLE, dtype="bfloat16", param_dtype="float32")
    np.testing.assert_array_equal(params["layers"]["down_proj"]["kernel"][1], stored.T)


def test_one_sharding_or_a_prefix_tree():
    here = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec())
    config, plain = read_config(SHARDED), load_model(SHARDED)[1]
    tree = {"embed": None, "layers": {**dict.fromkeys(plain["layers"], here)}, "final": None, "head": here}
    for sharding in (here, tree):
        params = load_params(SHARDED, config, sharding=sharding)
        jax.tree.map(np.testing.assert_array_equal, plain, params)
        assert params["layers"]["q_proj"]["kernel"].sharding == here
        assert params["head"].sharding == here


def test_sharded_over_a_mesh_reads_each_slice_once():
    program = f"""
        import jax, numpy as np
        jax.config.update("jax_num_cpu_devices", 4)
        from jax.sharding import NamedSharding, PartitionSpec as P
        from dta_jax import hf_weights
        from dta_jax.hf_config import read_config
        read, asked = hf_weights._read, []
        def counting(plan, bounds, *rest):
            asked.append((plan.names[0], bounds))
            return read(plan, bounds, *rest)
        hf_weights._read = counting
        mesh = jax.make_mesh((2, 2), ("data", "tensor"))
        place = lambda *axes: NamedSharding(mesh, P(*axes))
        folder, config = {str(SHARDED)!r}, read_config({str(SHARDED)!r})
        layers = {{
            name: {{"kernel": place(None, "tensor", "data")}} if "proj" in name else {{"scale": place()}}
            for name in hf_weights.plan_tensors(config)["layers"]
        }}
        shardings = {{"embed": place("tensor"), "layers": layers, "final": place(), "head": place("tensor")}}
        params = hf_weights.load_params(folder, config, sharding=shardings)
        assert len(asked) == len(set(asked)) == 4 * 7 + 4 + 1 + 2 * 2, len(asked)
        jax.tree.map(np.testing.assert_array_equal, params, hf_weights.load_params(folder, config))
        kernel = params["layers"]["down_proj"]["kernel"]
        assert kernel.sharding == place(None, "tensor", "data")
        assert {{s.data.shape for s in kernel.addressable_shards}} == {{(2, 20, 12)}}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_tied_checkpoint_may_carry_an_equal_head(folder):
    plain = load_model(folder)[1]
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    jax.tree.map(np.testing.assert_array_equal, plain, load_model(folder)[1])


def test_derived_frequencies_in_old_checkpoints_are_ignored(folder):
    plain = load_model(folder)[1]
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, "f4")}))
    jax.tree.map(np.testing.assert_array_equal, plain, load_model(folder)[1])


# --- bad input


def refused(folder):
    with pytest.raises(InputError) as error:
        load_model(folder)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message.removeprefix(f"{folder}").lstrip("/:").strip()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"{DOWN}: expected a tensor of shape (24, 40); got no such tensor"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.copy()}),
            f"model.safetensors: {DOWN}: expected shape (24, 40); got (40, 24)",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t[DOWN]}),
            "model.safetensors: model.layers.2.mlp.down_proj.weight: "
            "expected only tensors of the model that the config describes; got a tensor (24, 40)",
        ),
        (
            lambda t: t.update({DOWN: t[DOWN].astype(np.int32)}),
            f"model.safetensors: {DOWN}: expected one of F64, F32, F16, BF16; got I32",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:-1]}),
            "model.safetensors: lm_head.weight: expected shape (48, 24); got (47, 24)",
        ),
        (
            lambda t: t.update({"lm_head.weight": changed_row(t["model.embed_tokens.weight"], 31)}),
            "model.safetensors: lm_head.weight: expected equal to model.embed_tokens.weight, "
            "as the config has tie_word_embeddings; got another row 31",
        ),
    ],
)
def test_wrong_tensors(change, message, folder):
    rewrite(folder, change)
    assert refused(folder) == message


def changed_row(matrix, row):
    matrix = matrix.copy()
    matrix[row, 3] += 1e-6
    return matrix


def test_untied_needs_a_head(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop("lm_head.weight")
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    rewrite(sharded, lambda t: t.pop("lm_head.weight"), file)
    assert refused(sharded) == "lm_head.weight: expected a tensor of shape (48, 24); got no such tensor"


def test_no_weights_and_pickles(folder):
    (folder / "model.safetensors").unlink()
    wanted = "weights: expected model.safetensors or model.safetensors.index.json; got neither"
    assert refused(folder) == wanted
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert refused(folder) == f"{wanted}, but pytorch_model.bin (pickles are never read)"


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_truncated_file(keep, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(folder).startswith("model.safetensors: expected a whole safetensors file; got ")


def test_index_that_does_not_fit(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    embed = "model.embed_tokens.weight"

    def message(weight_map):
        path.write_text(json.dumps({"weight_map": weight_map}))
        return refused(sharded)

    prefix = f"model.safetensors.index.json: weight_map[{embed}]: expected the name of a file in the folder"
    assert message(index["weight_map"] | {embed: "gone.safetensors"}) == f"{prefix}; got gone.safetensors"
    outside = f"../{sharded.name}/{FIRST}"
    assert message(index["weight_map"] | {embed: outside}) == f"{prefix}; got {outside}"
    assert message(index["weight_map"] | {embed: SECOND}) == (
        f"model.safetensors.index.json: {embed}: expected a tensor in {SECOND}; got it is in {FIRST}"
    )
    assert message(index["weight_map"] | {"other": SECOND}) == (
        f"model.safetensors.index.json: other: expected a tensor in {SECOND}; got no such tensor there"
    )
    assert message([1]) == (
        "model.safetensors.index.json: weight_map: "
        "expected an object of tensor names and file names; got list"
    )


def test_tensor_in_two_files(sharded):
    embed = load_file(sharded / FIRST)["model.embed_tokens.weight"]
    rewrite(sharded, lambda t: t.update({"model.embed_tokens.weight": embed}), SECOND)
    assert refused(sharded) == (
        f"{SECOND}: model.embed_tokens.weight: expected each tensor once; got also in {FIRST}"
    )


# --- saving


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/config.json")))
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_round_trip_is_bit_identical(name, max_shard_bytes, tmp_path):
    model, params = load_model(GOLDEN / name)
    save_folder(tmp_path / "out", model.config, params, max_shard_bytes=max_shard_bytes)
    before, after = stored_tensors(GOLDEN / name), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert load_model(tmp_path / "out")[0] == model
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_shards_keep_to_their_limit_and_the_index_is_right(tmp_path):
    model, params = load_model(SHARDED)
    save_folder(tmp_path / "out", model.config, params, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) for file in files]
    assert max(sizes) <= 20_000
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert index["metadata"] == {"total_size": 4 * count, "total_parameters": count}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)


def test_save_in_another_dtype(tmp_path):
    model, params = load_model(SINGLE)
    save_folder(tmp_path / "out", model.config, params, dtype="bfloat16")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["dtype"], values["torch_dtype"]) == ("bfloat16", "bfloat16")
    again = load_model(tmp_path / "out")[1]
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, rounded, again)


def test_companions_go_along(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (source / "optimizer.bin").write_text("")
    model, params = load_model(SINGLE)
    save_folder(tmp_path / "out", model.config, params, companions=source)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'


def test_generation_config_from_the_model_config(tmp_path):
    model, params = load_model(SINGLE)
    config = dataclasses.replace(model.config, bos_token_id=3, eos_token_id=(4, 5))
    save_folder(tmp_path / "out", config, params)
    values = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert values == {"bos_token_id": 3, "eos_token_id": [4, 5]}


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    model, params = load_model(SINGLE)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(hf_weights, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_folder(tmp_path / "out", model.config, params)
    assert list(tmp_path.iterdir()) == []


def test_killed_save_leaves_no_folder_that_looks_whole(tmp_path):
    program = f"""
        import os, signal
        from dta_jax import hf_weights
        model, params = hf_weights.load_model({str(SINGLE)!r})
        hf_weights.config_to_hf = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        hf_weights._write_companions = lambda *_: None
        hf_weights.save_folder({str(tmp_path / "out")!r}, model.config, params)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == -9
    (partial,) = tmp_path.iterdir()
    assert partial.name == ".out.partial"
    assert [path.name for path in partial.iterdir()] == ["model.safetensors"]  # no config: nothing loads it
    model, params = load_model(SINGLE)
    save_folder(tmp_path / "out", model.config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_save_refuses(tmp_path):
    model, params = load_model(SINGLE)
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    def message(folder, params):
        with pytest.raises(InputError) as error:
            save_folder(folder, model.config, params)
        return str(error.value)

    assert message(out, params) == f"{out}: folder: expected no folder yet, or an empty one; got content"
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    short = params | {"embed": params["embed"][1:]}
    assert message(new, short) == "parameters: ['embed']: expected (48, 24); got (47, 24)"
    untied = params | {"head": params["embed"]}
    assert message(new, untied) == "parameters: ['head']: expected no such parameter; got (48, 24)"
    assert not new.exists()
