"""From an episode's model calls to rows of rollouts.

    thread main    prompt 0  COMPLETION 0
                   prompt 0  COMPLETION 0  new  COMPLETION 1        one row: every prompt extends the last
    thread main    prompt 2  COMPLETION 2                           context rewritten: another row
    thread helper  prompt 3  COMPLETION 3                           sub-agent: another row

A call whose prompt extends its thread's previous prompt and completion goes on with the row; any other call
begins a new one. Rows of one episode share `Rollouts.episode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from dta_jax.collect.order import Place
from dta_jax.episode_rows import episode_returns
from dta_jax.errors import InputError
from dta_jax.generation.protocol import Completion
from dta_jax.rollouts import Rollouts

SOURCE: Final = "collected rollouts"


@dataclass(frozen=True, eq=False)
class Call:
    """One model call.

    Attributes:
      thread: whose context it was.
      prompt: int32[p], all that the model was shown.
      completion: what it wrote.
      reward: earned by it.
    """

    thread: str
    prompt: np.ndarray
    completion: Completion
    reward: float


@dataclass(frozen=True, eq=False)
class Ending:
    """How an episode ended.

    Attributes:
      stop_reason: the environment's, or the limit that the episode ran into.
      unfinished: it ran into a limit before its environment judged it.
      info: the environment's numbers.
    """

    stop_reason: str
    unfinished: bool
    info: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class EpisodeRecord:
    """A whole episode.

    Attributes:
      task, trial: which.
      calls: in the order in which they were made.
      reward: the final reward.
      ending: why it ended.
    """

    task: int
    trial: int
    calls: tuple[Call, ...]
    reward: float
    ending: Ending

    @property
    def earned(self) -> float:
        """The final reward plus all that single completions earned."""
        return self.reward + sum(call.reward for call in self.calls)


@dataclass(frozen=True, eq=False)
class Group:
    """All episodes of one try at a task.

    Attributes:
      place: its place in the order of tasks.
      rollouts: their rows, by episode; `episode` is the index into `endings`.
      endings: one per episode.
    """

    place: Place
    rollouts: Rollouts
    endings: tuple[Ending, ...]

    @cached_property
    def oldest_version(self) -> int | None:
        """The oldest weights that drew one of its tokens; None if it has none."""
        versions = self.rollouts.require("versions")[self.rollouts.chosen()]
        return int(versions.min()) if versions.size else None

    @cached_property
    def returns(self) -> np.ndarray:
        """float64[episodes], the final reward plus all that single completions earned."""
        return episode_returns(self.rollouts)

    def to_json(self) -> dict[str, Any]:
        """All but the rollouts, of which `rows` says how many belong to it."""
        endings = [{**vars(ending), "info": dict(ending.info)} for ending in self.endings]
        return {"place": list(self.place), "rows": self.rollouts.num_rollouts, "endings": endings}


def groups_from_json(described: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> list[Group]:
    """Groups from what `Group.to_json` says of each, and their concatenated rollouts.

    Raises:
      InputError: the rollouts are not theirs.
    """
    rows = np.cumsum([0, *(group["rows"] for group in described)])
    if rows[-1] != rollouts.num_rollouts:
        raise InputError(rollouts.source, "rows", expected=int(rows[-1]), actual=rollouts.num_rollouts)
    return [
        Group(
            Place(*group["place"]),
            rollouts.take(range(start, end)),
            tuple(Ending(**ending) for ending in group["endings"]),
        )
        for group, start, end in zip(described, rows, rows[1:], strict=False)
    ]


def group_of_episodes(place: Place, records: Sequence[EpisodeRecord]) -> Group:
    """The group of some episodes of one task."""
    ordered = sorted(records, key=lambda record: record.trial)
    return Group(place, rollouts_from_episodes(ordered), tuple(record.ending for record in ordered))


def rollouts_from_episodes(records: Sequence[EpisodeRecord]) -> Rollouts:
    """The rows of some episodes, in their order; an episode without a call is one empty row.

    Returns:
      Rollouts with all optional arrays; `episode` is the index into `records`. `logprobs` and `versions` are
      0 outside of completions.
    """
    rows = [(index, row) for index, record in enumerate(records) for row in _rows(record.calls)]
    owners = [records[index] for index, _ in rows]
    tokens = _joined((part for _, row in rows for part in row.tokens), np.int32)
    return Rollouts(
        tokens=tokens,
        offsets=np.cumsum([0, *(row.length for _, row in rows)], dtype=np.int64),
        completion_spans=np.array(
            [(i, start, end) for i, (_, row) in enumerate(rows) for start, end in row.spans], np.int32
        ).reshape(-1, 3),
        task_id=np.array([owner.task for owner in owners], np.int32),
        trial=np.array([owner.trial for owner in owners], np.int32),
        reward=np.array([owner.reward for owner in owners], np.float32),
        logprobs=_joined((part for _, row in rows for part in row.logprobs), np.float32),
        versions=_joined((part for _, row in rows for part in row.versions), np.int32),
        episode=np.array([index for index, _ in rows], np.int32),
        step_reward=np.array([reward for _, row in rows for reward in row.rewards], np.float32),
        source=SOURCE,
    )


class _Row:
    """One row while it grows: parts of arrays, and the completions' places in it."""

    def __init__(self) -> None:
        self.length = 0
        self.tokens: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self.versions: list[np.ndarray] = []
        self.spans: list[tuple[int, int]] = []
        self.rewards: list[float] = []

    def extended_by(self, prompt: np.ndarray) -> bool:
        """Whether `prompt` begins with all that the row has."""
        if len(prompt) < self.length:
            return False
        return bool(np.array_equal(_joined(self.tokens, np.int32), prompt[: self.length]))

    def add(self, call: Call) -> None:
        new, made = call.prompt[self.length :], call.completion
        start, end = len(call.prompt), len(call.prompt) + len(made.tokens)
        self.tokens += [new, made.tokens]
        self.logprobs += [np.zeros(len(new), np.float32), made.logprobs]
        self.versions += [np.zeros(len(new), np.int32), made.versions]
        self.spans.append((start, end))
        self.rewards.append(call.reward)
        self.length = end


def _rows(calls: Iterable[Call]) -> list[_Row]:
    """An episode's rows, in the order in which they began."""
    rows: list[_Row] = []
    open_rows: dict[str, _Row] = {}
    for call in calls:
        row = open_rows.get(call.thread)
        if row is None or not row.extended_by(call.prompt):
            row = open_rows[call.thread] = _Row()
            rows.append(row)
        row.add(call)
    return rows or [_Row()]


def _joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
