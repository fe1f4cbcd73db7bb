"""Recorded rollouts: what was said, token by token, and which tokens the policy chose.

One rollout is one conversation. Its completions are spans of it; completion `k` of rollout `i` makes one
training sequence, everything from the rollout's first token to the completion's end:

    tokens   system  user  COMPLETION_0  tool  COMPLETION_1
    seq. 0   ---------------------[loss]
    seq. 1   ---------------------------------------[loss]

An episode whose context only ever grew is one rollout. One that rewrote its context, or ran sub-agents, is
several: rows that share `episode`, and with it task, trial and reward.

Token ids are kept as they were produced and shown, never rendered again from text. On disk a set of
rollouts is one `.npz` with the arrays of `Rollouts` under the same names; no pickle is read or written.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dta_jax.errors import InputError
from dta_jax.types import Samples

_REQUIRED = ("tokens", "offsets", "completion_spans")
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """R rollouts with M completions in flat arrays. Everything is checked when it is made.

    Attributes:
      tokens: int32[sum], the token ids of all rollouts, one after the other.
      offsets: int64[R+1], where each rollout starts in `tokens`.
      completion_spans: int32[M, 3], (rollout, start, end): tokens `start <= position < end` of that
        rollout were chosen by the policy.
      task_id: int32[R], the task that each rollout tried; rollouts of one task are one group.
      trial: int32[R], which try of its task a rollout is.
      reward: float32[R].
      logprobs: float32[sum], log-probability of each token under the policy that chose it; only read
        inside completions.
      versions: int32[sum], the weight version that chose each token; only read inside completions.
      episode: int32[R], rows of one episode: an episode that rewrote its context, or ran sub-agents, has
        several rows; they share task_id, trial and reward. None: every row is an episode.
      step_reward: float32[M], earned by each completion, besides `reward`. None: 0.
      source: where the rollouts come from, for error messages.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    completion_spans: np.ndarray
    task_id: np.ndarray | None = None
    trial: np.ndarray | None = None
    reward: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    episode: np.ndarray | None = None
    step_reward: np.ndarray | None = None
    source: str = "rollouts"

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            _check_dtype(self.source, name, getattr(self, name))
        _check_layout(self)
        for names, size in (
            (_PER_ROLLOUT, self.num_rollouts),
            (_PER_COMPLETION, len(self.completion_spans)),
            (_PER_TOKEN, self.tokens.size),
        ):
            for name in names:
                array = getattr(self, name)
                if array is not None and array.shape != (size,):
                    raise InputError(self.source, name, expected=f"shape ({size},)", actual=array.shape)
        for name, unit in (("reward", "rollout"), ("step_reward", "completion")):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                i = int(np.flatnonzero(~np.isfinite(array))[0])
                field = f"{name} of {unit} {i}"
                raise InputError(self.source, field, expected="a finite number", actual=array[i])
        if self.logprobs is not None:
            bad = np.flatnonzero(~np.isfinite(self.logprobs) & self.chosen())
            if bad.size:
                i = int(bad[0])
                raise InputError(
                    self.source,
                    f"logprobs of token {i}",
                    expected="a finite number inside a completion",
                    actual=self.logprobs[i],
                )
        _check_episodes(self)

    @property
    def num_rollouts(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64[R], tokens of each rollout."""
        return np.diff(self.offsets)

    def chosen(self) -> np.ndarray:
        """bool[sum], the tokens that are inside a completion."""
        rollout, start, end = self.completion_spans.T
        edges = np.zeros(self.tokens.size + 1, np.int64)
        np.add.at(edges, self.offsets[rollout] + start, 1)
        np.add.at(edges, self.offsets[rollout] + end, -1)
        return np.cumsum(edges[:-1]) > 0

    def digest(self) -> str:
        """SHA-256 over all arrays: equal rollouts, equal digest."""
        digest = hashlib.sha256()
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is None and name in _DIGESTED_IF_PRESENT:
                continue
            digest.update(f"{name} {None if array is None else array.shape} ".encode())
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def take(self, rollouts: Iterable[int]) -> Rollouts:
        """The given rollouts, in the given order, each at most once, as rollouts of their own."""
        chosen = np.fromiter(rollouts, np.int64)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        new_rollout = np.full(self.num_rollouts, -1, np.int32)
        new_rollout[chosen] = np.arange(len(chosen), dtype=np.int32)
        spans = self.completion_spans.copy()
        spans[:, 0] = new_rollout[spans[:, 0]]
        completions = np.flatnonzero(spans[:, 0] >= 0)
        completions = completions[np.argsort(spans[completions, 0], kind="stable")]
        parts: dict[str, Any] = {}
        for names, where in (
            (_PER_ROLLOUT, chosen),
            (_PER_COMPLETION, completions),
            (_PER_TOKEN, index),
        ):
            arrays = {name: getattr(self, name) for name in names}
            parts |= {name: array[where] for name, array in arrays.items() if array is not None}
        return Rollouts(self.tokens[index], offsets, spans[completions], **parts, source=self.source)

    def select(self, task_ids: Iterable[int]) -> Rollouts:
        """The rollouts of the given tasks, in the order in which they are stored.

        Raises:
          InputError: the rollouts have no `task_id`, or none of a given task.
        """
        present = self.require("task_id")
        wanted = np.fromiter(task_ids, np.int64)
        missing = np.setdiff1d(wanted, present)
        if missing.size:
            raise InputError(
                self.source,
                "task_id",
                expected=f"rollouts of task {missing[0]}",
                actual=f"tasks {present.min()} .. {present.max()}" if present.size else "no rollouts",
            )
        return self.take(np.flatnonzero(np.isin(present, wanted)).tolist())

    def modulo(self, vocab_size: int) -> Rollouts:
        """The same rollouts with token ids modulo `vocab_size`: real shapes for a small vocabulary.

        Raises:
          InputError: `vocab_size` is not a positive int32.
        """
        if not 1 <= vocab_size <= _INT32.max:
            raise InputError(self.source, "vocab_mod", expected=f"1 to {_INT32.max}", actual=vocab_size)
        return replace(self, tokens=self.tokens % np.int32(vocab_size))

    def require(self, name: str) -> np.ndarray:
        """An optional array that somebody needs now.

        Raises:
          InputError: the rollouts do not have it.
        """
        array = getattr(self, name)
        if array is None:
            raise InputError(self.source, name, expected=f"an array named {name!r}", actual="no such array")
        return array


_PER_ROLLOUT = ("task_id", "trial", "reward", "episode")
_PER_COMPLETION = ("step_reward",)
_PER_TOKEN = ("logprobs", "versions")
_FLOATS = ("reward", "logprobs", "step_reward")
_ARRAYS = tuple(f.name for f in fields(Rollouts) if f.name != "source")
_DIGESTED_IF_PRESENT = ("episode", "step_reward")  # so that digests that runs have stored stay what they are


def concatenate_rollouts(parts: Sequence[Rollouts], *, source: str = "rollouts") -> Rollouts:
    """Several sets of rollouts as one, in the given order.

    Episodes are numbered anew, so that those of different parts stay apart. Where only some parts have
    `episode` or `step_reward`, the others get what None means there.

    Args:
      parts: at least one.
      source: of the result.

    Raises:
      InputError: there is no part; or only some have `task_id`, `trial`, `reward`, `logprobs` or `versions`.
    """
    if not parts:
        raise InputError(source, "parts", expected="at least one set of rollouts", actual="none")
    tokens_before = np.cumsum([0, *(part.tokens.size for part in parts)])
    rows_before = np.cumsum([0, *(part.num_rollouts for part in parts)], dtype=np.int32)
    offsets = [part.offsets[:-1] + before for part, before in zip(parts, tokens_before, strict=False)]
    spans = [part.completion_spans.copy() for part in parts]
    for span, before in zip(spans, rows_before, strict=False):
        span[:, 0] += before
    arrays = {name: [getattr(part, name) for part in parts] for name in _PER_ROLLOUT + _PER_TOKEN}
    arrays["step_reward"] = [part.step_reward for part in parts]
    if any(array is not None for array in arrays["episode"]):
        numbered = map(_numbered_episodes, parts)
        arrays["episode"] = [own + before for own, before in zip(numbered, rows_before, strict=False)]
    if any(array is not None for array in arrays["step_reward"]):
        arrays["step_reward"] = [
            np.zeros(len(part.completion_spans), np.float32) if part.step_reward is None else part.step_reward
            for part in parts
        ]
    joined = {}
    for name, own in arrays.items():
        missing = [part.source for part, array in zip(parts, own, strict=True) if array is None]
        if 0 < len(missing) < len(parts):
            raise InputError(
                missing[0], name, expected=f"an array named {name!r}, as others have", actual="none"
            )
        if not missing:
            joined[name] = np.concatenate(own)
    return Rollouts(
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=np.concatenate([*offsets, tokens_before[-1:]]),
        completion_spans=np.concatenate(spans),
        **joined,
        source=source,
    )


def _numbered_episodes(rollouts: Rollouts) -> np.ndarray:
    """int32[R]: each row's episode, as the index of one of its rows."""
    if rollouts.episode is None:
        return np.arange(rollouts.num_rollouts, dtype=np.int32)
    _, first, inverse = np.unique(rollouts.episode, return_index=True, return_inverse=True)
    return first.astype(np.int32)[inverse]


def load_rollouts(path: str | os.PathLike[str]) -> Rollouts:
    """Reads rollouts from an `.npz` file.

    Args:
      path: the file. Integers and floats of other widths are converted if their values fit; arrays
        that `Rollouts` does not have are ignored.

    Raises:
      InputError: the file is missing, damaged or not an `.npz`, or an array breaks a rule of `Rollouts`.
    """
    source = os.fspath(path)
    try:
        with open(source, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(source, "file", expected="an .npz archive", actual="a single .npy array")
            names = archive.files
            arrays = {name: archive[name] for name in _ARRAYS if name in names}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(source, "file", expected="an .npz file", actual="no such file") from None
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(source, "file", expected="a whole .npz archive", actual=error) from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: encrypted
        raise InputError(
            source, "file", expected="a whole .npz archive", actual=f"a truncated or damaged one ({error})"
        ) from error
    for name in _REQUIRED:
        if name not in arrays:
            raise InputError(source, name, expected=f"an array named {name!r}", actual=f"arrays {names}")
    return Rollouts(**{n: _converted(source, n, a) for n, a in arrays.items()}, source=source)


def save_rollouts(path: str | os.PathLike[str], rollouts: Rollouts) -> None:
    """Writes rollouts to an `.npz` file: whole, or not at all."""
    target = Path(path)
    arrays = {n: getattr(rollouts, n) for n in _ARRAYS if getattr(rollouts, n) is not None}
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            np.savez_compressed(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def samples_from_rollouts(
    rollouts: Rollouts,
    *,
    vocab_mod: int | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
) -> Samples:
    """One training sequence per completion: the rollout up to its end, loss on the completion.

    A completion without a token that can have loss (an empty one, or a rollout's very first token)
    makes no sequence.

    Args:
      rollouts: R rollouts with M completions.
      vocab_mod: take token ids modulo this, so that a small vocabulary can run real rollouts.
      vocab_size: V; ids must be below it.
      max_length: the longest sequence allowed, tokens.

    Returns:
      Samples whose sequences are views, with these values per entry: `completion` int32[E] (row of
      `completion_spans`), `rollout` int32[E]; and where the rollouts have them, `reward` float32[E],
      `old_logp` float32[E], `version` int32[E].

    Raises:
      InputError: a token id is not below `vocab_size`, or a sequence is longer than `max_length`.
    """
    if vocab_mod is not None:
        rollouts = rollouts.modulo(vocab_mod)
    tokens = rollouts.tokens
    if vocab_size is not None and tokens.max(initial=0) >= vocab_size:
        i = int(np.argmax(tokens >= vocab_size))
        raise InputError(
            rollouts.source,
            f"tokens[{i}]",
            expected=f"an id below the vocabulary's {vocab_size}",
            actual=int(tokens[i]),
        )
    spans = rollouts.completion_spans.astype(np.int64)
    first = np.maximum(spans[:, 1], 1)
    completion = np.flatnonzero(spans[:, 2] > first)
    first, (rollout, _, end) = first[completion], spans[completion].T
    if max_length is not None and end.max(initial=0) > max_length:
        k = int(np.argmax(end > max_length))
        raise InputError(
            rollouts.source,
            f"completion {completion[k]} of rollout {rollout[k]}",
            expected=f"a sequence of at most {max_length} tokens",
            actual=int(end[k]),
        )
    base = rollouts.offsets[rollout]
    sequences = [tokens[b : b + e] for b, e in zip(base.tolist(), end.tolist(), strict=True)]

    count = end - first
    sequence = np.repeat(np.arange(len(count)), count)
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count - first, count)
    index = base[sequence] + position
    values: dict[str, np.ndarray] = {
        "completion": completion[sequence].astype(np.int32),
        "rollout": rollout[sequence].astype(np.int32),
    }
    if rollouts.reward is not None:
        values["reward"] = rollouts.reward[values["rollout"]]
    if rollouts.logprobs is not None:
        values["old_logp"] = rollouts.logprobs[index]
    if rollouts.versions is not None:
        values["version"] = rollouts.versions[index]
    return Samples(sequences, sequence.astype(np.int32), position.astype(np.int32), values)


def _check_dtype(source: str, name: str, array: np.ndarray | None) -> None:
    wanted = np.float32 if name in _FLOATS else np.int64 if name == "offsets" else np.int32
    if array is not None and array.dtype != wanted:
        raise InputError(source, name, expected=np.dtype(wanted), actual=array.dtype)


def _converted(source: str, name: str, array: np.ndarray) -> np.ndarray:
    """A file's array in the dtype that `Rollouts` wants, if no value changes by that."""
    if name in _FLOATS:
        if array.dtype.kind not in "fiu":
            raise InputError(source, name, expected="numbers", actual=array.dtype)
        with np.errstate(over="ignore"):  # what becomes infinite is refused by name
            return array.astype(np.float32, copy=False)
    if array.dtype.kind not in "iu":
        raise InputError(source, name, expected="integers", actual=array.dtype)
    if name == "offsets":
        return array.astype(np.int64, copy=False)
    if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise InputError(
            source, name, expected="values that fit int32", actual=f"{array.min()} .. {array.max()}"
        )
    return array.astype(np.int32, copy=False)


def _check_layout(rollouts: Rollouts) -> None:
    """Offsets cut the tokens into rollouts, and every completion lies inside its own."""
    source, tokens, offsets = rollouts.source, rollouts.tokens, rollouts.offsets
    if tokens.ndim != 1:
        raise InputError(source, "tokens", expected="shape [sum]", actual=tokens.shape)
    if tokens.size and tokens.min() < 0:
        i = int(np.argmax(tokens < 0))
        raise InputError(source, f"tokens[{i}]", expected="a token id, at least 0", actual=int(tokens[i]))
    if offsets.ndim != 1 or not offsets.size:
        raise InputError(source, "offsets", expected="shape [R+1]", actual=offsets.shape)
    if offsets[0] != 0 or offsets[-1] != tokens.size or (np.diff(offsets) < 0).any():
        falls = np.flatnonzero(np.diff(offsets) < 0)
        where = f", falling after index {falls[0]}" if falls.size else ""
        raise InputError(
            source,
            "offsets",
            expected=f"rising from 0 to {tokens.size}, the number of tokens",
            actual=f"{offsets[0]} .. {offsets[-1]}{where}",
        )
    spans = rollouts.completion_spans
    if spans.ndim != 2 or spans.shape[1] != 3:
        raise InputError(source, "completion_spans", expected="shape [M, 3]", actual=spans.shape)
    rollout, start, end = spans.T
    bad = np.flatnonzero((rollout < 0) | (rollout >= rollouts.num_rollouts))
    if bad.size:
        raise InputError(
            source,
            f"completion_spans[{bad[0]}]",
            expected=f"a rollout below {rollouts.num_rollouts}",
            actual=int(rollout[bad[0]]),
        )
    length = rollouts.lengths[rollout]
    bad = np.flatnonzero((start < 0) | (start > end) | (end > length))
    if bad.size:
        k = int(bad[0])
        raise InputError(
            source,
            f"completion_spans[{k}]",
            expected=f"0 <= start <= end <= {length[k]}, the length of rollout {rollout[k]}",
            actual=f"start {start[k]}, end {end[k]}",
        )


def _check_episodes(rollouts: Rollouts) -> None:
    """Rows of one episode have the same task, trial and reward."""
    if rollouts.episode is None:
        return
    first = _numbered_episodes(rollouts)
    for name in ("task_id", "trial", "reward"):
        array = getattr(rollouts, name)
        differs = np.flatnonzero(array != array[first]) if array is not None else np.zeros(0, np.int64)
        if differs.size:
            i = int(differs[0])
            raise InputError(
                rollouts.source,
                f"{name} of rollout {i}",
                expected=f"{array[first[i]]}, that of rollout {first[i]} of the same episode",
                actual=array[i],
            )
