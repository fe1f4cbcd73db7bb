"""Which task is tried when, and with which seeds: functions of seed and place alone.

A *place* is (step, number). Numbers 0 ... batch_groups - 1 of step 1, 2, ... go through the tasks epoch by
epoch, every epoch a permutation of its own. Larger numbers of a step are replacements, for groups of that
step that were lost on the way. So who loses what never changes the tasks of another step, and a resumed run
repeats what an uninterrupted one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a group stands in the order: the step it was meant for (from 1), its number there (from 0)."""

    step: int
    number: int


@dataclass(frozen=True)
class TaskOrder:
    """The order of tasks.

    Attributes:
      num_tasks: tasks are 0 ... num_tasks - 1.
      batch_groups: groups per step. A batch that reaches into the next epoch may have a task twice.
      seed: of the permutations, at least 0.
    """

    num_tasks: int
    batch_groups: int
    seed: int

    def task(self, place: Place) -> int:
        """The task of a place. Replacements are other tasks than the step has, if there are any."""
        if place.number < self.batch_groups:
            return self._in_epoch((place.step - 1) * self.batch_groups + place.number)
        planned = [self.task(Place(place.step, number)) for number in range(self.batch_groups)]
        drawn = self._permutation(1, place.step)
        others = drawn[~np.isin(drawn, planned)]
        candidates = others if others.size else drawn
        return int(candidates[(place.number - self.batch_groups) % candidates.size])

    def episode_seed(self, place: Place, trial: int) -> int:
        """The seed of a group's episode."""
        return derived_seed(self.seed, place.step, place.number, self.task(place), trial)

    def _in_epoch(self, index: int) -> int:
        epoch, within = divmod(index, self.num_tasks)
        return int(self._permutation(0, epoch)[within])

    def _permutation(self, *key: int) -> np.ndarray:
        return np.random.default_rng([self.seed, *key]).permutation(self.num_tasks)


def derived_seed(*numbers: int) -> int:
    """A seed, 0 ... 2^31 - 1, made from numbers that are at least 0."""
    counted = [len(numbers), *numbers]  # zeros at the end would not count otherwise
    return int(np.random.SeedSequence(counted).generate_state(1)[0] >> 1)
