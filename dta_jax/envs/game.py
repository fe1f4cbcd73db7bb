"""The quickstart's game: find the treasure on a grid, one move a turn, told by a compass where it lies.

    rules ... go
    you 4 1 treasure north east EAST
    you 4 2 treasure north NORTH
    you 3 2 treasure north ...

It speaks tokens, one per word, so a tiny model can learn it from random weights: no text, no tokenizer.
The rules come first and are the same in every episode, so all rollouts share them; rollouts of one task
share its first turn too, and part where they move differently.

A move that brings the treasure nearer pays `1 / distance at the start`, one that leads away from it costs as
much, so the rewards of an episode add up to 1 if the treasure is found. An answer's first move counts, and
an answer without a move loses the turn: `Sampling.max_new_tokens = 1` is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.errors import InputError

MOVES: Final = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""What a move does to (row, column)."""

RULES: Final = (
    "rules find the treasure . each turn says where you stand and where the treasure lies . "
    "answer with one move : north south west east . go"
)
MAX_SIZE: Final = 9
VOCABULARY: Final = tuple(dict.fromkeys([*MOVES, *map(str, range(1, MAX_SIZE + 1)), *RULES.split()]))
"""The words by id; moves come first, then numbers."""

_IDS: Final = {word: i for i, word in enumerate(VOCABULARY)}


def encode(text: str) -> np.ndarray:
    """The ids int32[n] of words that blanks separate.

    Raises:
      InputError: a word isn't in the vocabulary.
    """
    for word in text.split():
        if word not in _IDS:
            raise InputError("TreasureHunt", "word", expected="one of its vocabulary", actual=repr(word))
    return np.array([_IDS[word] for word in text.split()], np.int32)


def render(tokens: Sequence[int] | np.ndarray, chosen: Sequence[bool] | np.ndarray | None = None) -> str:
    """An episode for human eyes: a line per turn, the policy's own words in capitals.

    Args:
      tokens: int[n], the episode; ids outside the vocabulary are shown as numbers in angle brackets.
      chosen: bool[n], which of them the policy said.
    """
    said = np.zeros(len(tokens), bool) if chosen is None else np.asarray(chosen, bool)
    words: list[str] = []
    for token, own in zip(np.asarray(tokens).tolist(), said.tolist(), strict=True):
        word = VOCABULARY[token] if 0 <= token < len(VOCABULARY) else f"<{token}>"
        new_line = word == "you" and not own and words and words[-1] != "where"
        words += ["\n" + word if new_line else word.upper() if own else word]
    return " ".join(words).replace(" \n", "\n")


def oracle(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """The perfect answer, int32[1], to the last turn of an episode so far: the way the compass points."""
    words = [VOCABULARY[token] for token in np.asarray(tokens).tolist()]
    turn = words[max(i for i, word in enumerate(words) if word == "treasure") :]
    return encode(next(word for word in turn if word in MOVES))


@dataclass(frozen=True)
class TreasureHunt:
    """The game; a task is a pair of cells, where to start and where the treasure lies.

    Attributes:
      size: rows and columns of the grid.
      turns: moves in all; every treasure is within reach.
      nearest: the shortest distance to a treasure, in moves.
      tasks: how many pairs of cells are drawn.
      seed: of the pairs. Another seed gives tasks to evaluate on.
    """

    size: int = 5
    turns: int = 4
    nearest: int = 3
    tasks: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        most = min(self.turns, 2 * (self.size - 1))
        for name, good, expected in (
            ("size", 2 <= self.size <= MAX_SIZE, f"2 to {MAX_SIZE}"),
            ("turns", self.turns >= 1, "at least 1"),
            ("nearest", 1 <= self.nearest <= most, f"1 to {most} (no treasure is further away)"),
            ("tasks", self.tasks >= 1, "at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not good:
                raise InputError("TreasureHunt", name, expected=expected, actual=repr(getattr(self, name)))

    @property
    def num_tasks(self) -> int:
        """As many as were asked for."""
        return self.tasks

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return len(VOCABULARY)

    def cells(self, task: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(row, column) of the start and of the treasure, from 0.

        Raises:
          InputError: there is no such task.
        """
        if not 0 <= task < self.num_tasks:
            raise InputError("TreasureHunt", "task", expected=f"0 to {self.num_tasks - 1}", actual=task)
        rng = np.random.default_rng([self.seed, task])
        while True:
            row, column, goal_row, goal_column = (int(i) for i in rng.integers(self.size, size=4))
            if self.nearest <= abs(goal_row - row) + abs(goal_column - column) <= self.turns:
                return (row, column), (goal_row, goal_column)

    def episode(self, task: int, seed: int) -> Hunt:
        """A fresh episode; nothing in it is left to chance.

        Raises:
          InputError: there is no such task.
        """
        start, treasure = self.cells(task)
        return Hunt(start, treasure, size=self.size, turns=self.turns)


class Hunt:
    """One try at finding one treasure."""

    def __init__(self, start: tuple[int, int], treasure: tuple[int, int], *, size: int, turns: int):
        self._cell, self._treasure = start, treasure
        self._size, self._turns = size, turns
        self._moves = self._lost = 0
        self._first_distance = self._distance()

    async def start(self) -> Step:
        """The rules and the first turn."""
        return Step(Observation(tokens=np.concatenate([encode(RULES), self._report()])))

    async def step(self, answer: Answer) -> Step:
        """Moves; a move against the edge leaves the player where it is."""
        before = self._distance()
        move = next((VOCABULARY[t] for t in answer.tokens.tolist() if 0 <= t < len(MOVES)), None)
        self._moves += 1
        if move is None:
            self._lost += 1
        else:
            row, column = (
                min(max(a + b, 0), self._size - 1) for a, b in zip(self._cell, MOVES[move], strict=True)
            )
            self._cell = row, column
        reward = (before - self._distance()) / self._first_distance
        found = self._distance() == 0
        if not found and self._moves < self._turns:
            return Step(Observation(tokens=self._report()), reward=reward)
        info = {"found": float(found), "moves": float(self._moves), "lost_turns": float(self._lost)}
        return Step(None, reward=reward, info=info, stop_reason="done" if found else "out of turns")

    async def close(self) -> None:
        """Holds nothing."""

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self._cell, self._treasure, strict=True))

    def _report(self) -> np.ndarray:
        """What a turn says: where the player stands, and where the compass points."""
        (row, column), (goal_row, goal_column) = self._cell, self._treasure
        ways = (
            ("north", goal_row < row),
            ("south", goal_row > row),
            ("west", goal_column < column),
            ("east", goal_column > column),
        )
        compass = " ".join(way for way, right in ways if right)
        return encode(f"you {row + 1} {column + 1} treasure {compass}")
