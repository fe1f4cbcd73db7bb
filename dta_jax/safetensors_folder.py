"""A folder of safetensors files, one or several with an index, read a part of a tensor at a time.

The files are memory-mapped while a `reading()` context is open, and unmapped after it. Pickled weights
are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open

from dta_jax.errors import InputError
from dta_jax.hf_config import read_json

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOATS: Final = ("F64", "F32", "F16", "BF16")
BLOCK_ROWS: Final = 64  # read at once: little memory, and in cache while they are cast and transposed

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) per axis."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, and what: `dtype` by the name that safetensors gives it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFolder:
    """The tensors of a folder.

    Args:
      folder: the folder with `model.safetensors`, or its shards and their index.

    Raises:
      InputError: no safetensors file, a damaged one, a tensor that is in two files, or an index that
        does not fit the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        files, index = _weight_files(folder)
        for file in files:
            with _open(file) as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    if name in self.tensors:
                        other = self.tensors[name].file.name
                        raise InputError(file, name, expected="each tensor once", actual=f"also in {other}")
                    part = reader.get_slice(name)
                    self.tensors[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
        for name, file_name in index.items():
            found = self.tensors.get(name)
            if found is None or found.file.name != file_name:
                actual = "no such tensor there" if found is None else f"it is in {found.file.name}"
                expected = f"a tensor in {file_name}"
                raise InputError(folder / INDEX_FILE, name, expected=expected, actual=actual)

    def check(self, shapes: Mapping[str, tuple[int, ...]], optional: Callable[[str], bool]) -> None:
        """Checks that the folder holds exactly the tensors of `shapes`, or `optional` ones beside them.

        Raises:
          InputError: a tensor is missing, unknown, of another shape or not a float.
        """
        for name, shape in shapes.items():
            stored = self.tensors.get(name)
            if stored is None:
                expected = f"a tensor of shape {shape}"
                raise InputError(self.folder, name, expected=expected, actual="no such tensor")
            if stored.shape != shape:
                raise InputError(stored.file, name, expected=f"shape {shape}", actual=stored.shape)
            if stored.dtype not in FLOATS:
                expected = f"one of {', '.join(FLOATS)}"
                raise InputError(stored.file, name, expected=expected, actual=stored.dtype)
        for name, stored in self.tensors.items():
            if name not in shapes and not optional(name):
                expected = "only tensors of the model that the config describes"
                raise InputError(stored.file, name, expected=expected, actual=f"a tensor {stored.shape}")

    @contextmanager
    def reading(self) -> Iterator[TensorReader]:
        """A context in which the folder's files are mapped as they are needed."""
        with ExitStack() as stack:
            yield TensorReader(self, stack)


class TensorReader:
    """Reads parts of a folder's tensors; made by `SafetensorsFolder.reading`."""

    def __init__(self, folder: SafetensorsFolder, stack: ExitStack):
        self._folder, self._stack, self._open = folder, stack, dict[Path, Any]()

    def copy(self, name: str, bounds: Bounds, out: np.ndarray) -> None:
        """Copies the part of tensor `name` within `bounds` into `out`, cast to its dtype."""
        source = self._slices(name)
        (first, last), *inner = bounds
        rest = tuple(slice(start, stop) for start, stop in inner)
        for rows in row_blocks(first, last):
            out[rows.start - first : rows.stop - first] = source[(rows, *rest)]

    def first_difference(self, name: str, other: str) -> int | None:
        """The first row in which two tensors of one shape differ."""
        one, two = self._slices(name), self._slices(other)
        shape = self._folder.tensors[name].shape
        for rows in row_blocks(0, shape[0]):
            differs = (one[rows] != two[rows]).any(axis=tuple(range(1, len(shape))))
            if differs.any():
                return rows.start + int(differs.argmax())
        return None

    def _slices(self, name: str) -> Any:
        file = self._folder.tensors[name].file
        if file not in self._open:
            self._open[file] = self._stack.enter_context(_open(file))
        return self._open[file].get_slice(name)


def row_blocks(first: int, last: int) -> Iterator[slice]:
    """Slices of [first, last) of at most `BLOCK_ROWS`."""
    for start in range(first, last, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, last))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(file.parent, file.name, expected="a whole safetensors file", actual=error) from None


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files, and the index's tensor -> file name (empty for a single file)."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE], {}
    if not (folder / INDEX_FILE).exists():
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
        actual = f"neither, but {', '.join(others)} (pickles are never read)" if others else "neither"
        raise InputError(folder, "weights", expected=f"{WEIGHTS_FILE} or {INDEX_FILE}", actual=actual)
    index = read_json(folder / INDEX_FILE, "an index of safetensors files").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        expected = "an object of tensor names and file names"
        raise InputError(folder / INDEX_FILE, "weight_map", expected=expected, actual=type(index).__name__)
    for name, file_name in index.items():
        if Path(file_name).name != file_name or not (folder / file_name).exists():
            field = f"weight_map[{name}]"
            expected = "the name of a file in the folder"
            raise InputError(folder / INDEX_FILE, field, expected=expected, actual=file_name)
    return [folder / file_name for file_name in sorted(set(index.values()))], index
