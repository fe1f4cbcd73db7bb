"""Parameters from and to Hugging Face folders: safetensors only, streamed, never twice in memory.

    folder  --load_params-->  params (stacked, cast, on their shardings)  --save_folder-->  folder

Every stacked parameter is filled from its layers' tensors one after the other, straight from the
memory-mapped files, and only the slices that this host's devices hold are read. So loading needs, above
the parameters themselves, host memory for one stacked parameter. All names and shapes are checked
before the first tensor is read. A saved folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Sharding
from safetensors.numpy import save_file

from dta_jax.errors import InputError
from dta_jax.hf_config import CONFIG_FILE, config_to_hf, read_config
from dta_jax.model import Params
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.safetensors_folder import (
    INDEX_FILE,
    WEIGHTS_FILE,
    Bounds,
    SafetensorsFolder,
    TensorReader,
    row_blocks,
)

GENERATION_FILE: Final = "generation_config.json"
COMPANION_FILES: Final = (
    GENERATION_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
DEFAULT_SHARD_BYTES: Final = 4 * 10**9
_DERIVED: Final = ".rotary_emb.inv_freq"  # old checkpoints carry this; it follows from the config
_EMBED: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_OUTER: Final = {"embed": _EMBED, "final": "model.norm.weight", "head": _HEAD}


@dataclass(frozen=True)
class TensorPlan:
    """Where one parameter lives in a checkpoint.

    Attributes:
      shape: the parameter's shape; the first axis is the layer if it is stacked.
      names: the checkpoint's tensor, or one per layer.
      stacked: whether the parameter has a layer axis.
      transposed: whether the checkpoint keeps the matrix as [out, in] (ours are [in, out]).
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the checkpoint."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape


def plan_tensors(config: Qwen3Config) -> Params:
    """The parameter tree of a config, with a `TensorPlan` in place of every array."""
    shapes = jax.eval_shape(Qwen3(config).init, jax.random.key(0))

    def plan(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> TensorPlan:
        keys = [entry.key for entry in path]
        if keys[0] != "layers":
            return TensorPlan(leaf.shape, (_OUTER[keys[0]],), stacked=False, transposed=False)
        _, module, kind = keys
        if module in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            module = f"self_attn.{module}"
        elif module in ("gate_proj", "up_proj", "down_proj"):
            module = f"mlp.{module}"
        suffix = "bias" if kind == "bias" else "weight"
        names = tuple(f"model.layers.{l}.{module}.{suffix}" for l in range(config.num_hidden_layers))
        return TensorPlan(leaf.shape, names, stacked=True, transposed=kind == "kernel")

    return jax.tree_util.tree_map_with_path(plan, shapes)


def load_model(folder: str | Path, *, sharding: Any = None, **changes: Any) -> tuple[Qwen3, Params]:
    """A Hugging Face folder as a model and its parameters.

    Args:
      folder: a folder with `config.json` and safetensors files.
      sharding: see `load_params`.
      **changes: config fields to replace, e.g. `dtype="float32"` or `param_dtype="float32"`.

    Raises:
      InputError: see `read_config` and `load_params`.
    """
    config = read_config(folder, **changes)
    return Qwen3(config), load_params(folder, config, sharding=sharding)


def load_params(folder: str | Path, config: Qwen3Config, *, sharding: Any = None) -> Params:
    """The parameters in a folder's safetensors files, in `config.storage_dtype`.

    Args:
      folder: the folder with `model.safetensors`, or its shards and their index.
      config: the model.
      sharding: a `jax.sharding.Sharding`, or a tree of them that is a prefix of the parameter tree;
        None for the default device. Each host reads only the slices that its devices hold.

    Raises:
      InputError: no safetensors file, a damaged one, or a tensor that is missing, unknown, in two files,
        of another shape or not a float; a tied model's head that differs from its embedding.
    """
    plans = plan_tensors(config)
    stored = SafetensorsFolder(Path(folder))
    shapes = {name: plan.stored_shape for plan in jax.tree.leaves(plans) for name in plan.names}
    tied_head = config.tie_word_embeddings and _HEAD in stored.tensors
    stored.check(shapes, lambda name: name.endswith(_DERIVED) or (tied_head and name == _HEAD))
    if tied_head:
        _check_tied_head(stored)
    dtype = jax.numpy.dtype(config.storage_dtype)
    shardings = jax.tree.broadcast(sharding, plans, is_leaf=lambda x: x is None)
    return jax.tree.map(lambda plan, place: _place(plan, place, stored, dtype), plans, shardings)


def _check_tied_head(stored: SafetensorsFolder) -> None:
    head, embed = stored.tensors[_HEAD], stored.tensors[_EMBED]
    if head.shape != embed.shape:
        raise InputError(head.file, _HEAD, expected=f"shape {embed.shape}", actual=head.shape)
    with stored.reading() as reader:
        row = reader.first_difference(_HEAD, _EMBED)
    if row is not None:
        expected = f"equal to {_EMBED}, as the config has tie_word_embeddings"
        raise InputError(head.file, _HEAD, expected=expected, actual=f"another row {row}")


def _place(
    plan: TensorPlan, sharding: Sharding | None, stored: SafetensorsFolder, dtype: np.dtype
) -> jax.Array:
    with stored.reading() as reader:
        blocks: dict[Bounds, np.ndarray] = {}  # devices that hold the same slice share one read

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            parts = index or (slice(None),) * len(plan.shape)
            bounds = tuple(part.indices(n)[:2] for part, n in zip(parts, plan.shape, strict=True))
            if bounds not in blocks:
                blocks[bounds] = _read(plan, bounds, reader, dtype)
            return blocks[bounds]

        if sharding is None:
            return jax.device_put(read(None))
        return jax.make_array_from_callback(plan.shape, sharding, read)


def _read(plan: TensorPlan, bounds: Bounds, reader: TensorReader, dtype: np.dtype) -> np.ndarray:
    """The part of a parameter within `bounds`."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    if not plan.stacked:
        reader.copy(plan.names[0], bounds, out)
        return out
    (first, last), *inner = bounds
    for layer, target in zip(range(first, last), out, strict=True):
        if plan.transposed:
            reader.copy(plan.names[layer], tuple(inner[::-1]), target.T)
        else:
            reader.copy(plan.names[layer], tuple(inner), target)
    return out


def check_new_folder(folder: Path) -> None:
    """Raises InputError if there is anything at or in `folder`."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise InputError(folder, "folder", expected="a place to write to", actual=error.strerror) from None
    if taken:
        raise InputError(folder, "folder", expected="no folder yet, or an empty one", actual="content")


def save_folder(
    folder: str | Path,
    config: Qwen3Config,
    params: Params,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    companions: str | Path | None = None,
) -> None:
    """Writes a folder that transformers, vLLM and SGLang load. It appears only when it is complete.

    Args:
      folder: a folder that does not exist yet, or an empty one.
      config: the model.
      params: its parameters, every one addressable from this process; fetched one shard at a time.
      dtype: the dtype to save; None for the parameters' own.
      max_shard_bytes: a new file is begun beyond this size; also the host memory that saving needs.
      companions: a folder whose tokenizer and generation config go along, if it has any.

    Raises:
      InputError: the folder exists and is not empty, or a parameter's shape is not the config's.
    """
    folder = Path(folder)
    check_new_folder(folder)
    plans = plan_tensors(config)
    _check_shapes(plans, params)
    dtype = dtype or str(params["embed"].dtype)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(folder, "folder", expected="a place to write to", actual=error.strerror) from None
    try:
        _write_weights(partial, list(_tensors(plans, params)), jax.numpy.dtype(dtype), max_shard_bytes)
        _write_companions(partial, config, None if companions is None else Path(companions))
        _write_json(partial / CONFIG_FILE, config_to_hf(config, dtype=dtype))
        mode = (partial / CONFIG_FILE).stat().st_mode  # safetensors writes files for its owner only
        for path in partial.iterdir():
            path.chmod(mode)
            _sync(path)
        _sync(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_shapes(plans: Params, params: Params) -> None:
    found = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): plan.shape for path, plan in jax.tree.leaves_with_path(plans)}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            expected = wanted.get(name, "no such parameter")
            raise InputError(
                "parameters", name, expected=expected, actual=found.get(name, "no such parameter")
            )


@dataclass(frozen=True)
class _Part:
    """One tensor of the checkpoint to be: a parameter, or a layer of one."""

    name: str
    plan: TensorPlan
    leaf: Any
    layer: int

    def fetch(self, dtype: np.dtype) -> np.ndarray:
        value = np.asarray(self.leaf[self.layer] if self.plan.stacked else self.leaf)
        if not self.plan.transposed:
            return np.ascontiguousarray(value, dtype)
        out = np.empty(self.plan.stored_shape, dtype)
        for rows in row_blocks(0, len(out)):
            out[rows] = value.T[rows]
        return out


def _tensors(plans: Params, params: Params) -> Iterator[_Part]:
    """The tensors in the model's order: embedding, layer by layer, last norm, head."""
    pairs = list(zip(jax.tree.leaves(plans), jax.tree.leaves(params), strict=True))
    outer = {plan.names[0]: _Part(plan.names[0], plan, leaf, 0) for plan, leaf in pairs if not plan.stacked}
    yield outer.pop(_EMBED)
    layers = next(len(plan.names) for plan, _ in pairs if plan.stacked)
    for layer in range(layers):
        for plan, leaf in pairs:
            if plan.stacked:
                yield _Part(plan.names[layer], plan, leaf, layer)
    yield from outer.values()


def _write_weights(folder: Path, parts: list[_Part], dtype: np.dtype, max_shard_bytes: int) -> None:
    shards: list[list[_Part]] = [[]]
    size = 0
    for part in parts:
        nbytes = math.prod(part.plan.stored_shape) * dtype.itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = WEIGHTS_FILE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({part.name: part.fetch(dtype) for part in shard}, folder / name, {"format": "pt"})
        index |= dict.fromkeys((part.name for part in shard), name)
    if len(shards) > 1:
        total = sum(math.prod(part.plan.stored_shape) for part in parts)
        metadata = {"total_size": total * dtype.itemsize, "total_parameters": total}
        _write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": index})


def _write_companions(folder: Path, config: Qwen3Config, source: Path | None) -> None:
    for name in COMPANION_FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not (folder / GENERATION_FILE).exists():
        values = config_to_hf(config)
        ids = {name: values[name] for name in ("bos_token_id", "eos_token_id") if values[name] is not None}
        _write_json(folder / GENERATION_FILE, ids)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
