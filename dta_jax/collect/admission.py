"""Which groups may start, and which are trained on: bookkeeping, without clocks, threads or tokens.

Counted in groups. With batch B, weights of version v and the bound n on staleness, so many may start:

    (n + v + 1) B - (running + accepted)

where `accepted` are all groups ever accepted, those that were trained on included. So nobody generates more
than the n + 1 batches that follow the newest weights. With n = 0, generation is synchronous: the groups of
step v + 1 start when version v is there. (AReaL counts episodes; groups are what is started and trained on
as a whole here.)

The bound at admission is on what was *started*: a group that takes long may still be too old when its batch
is made. So staleness is looked at again, token by token, at consumption: `stale` names the groups to drop. A
batch that waits for all groups that were meant for its step never has one: step s starts its groups no
earlier than with version s - 1 - n, and uses them with version s - 1.

A group that is lost (rejected, stale, or resampled since its rewards are all equal) gives its slot back, and
a replacement of the same step takes it. `max_resampled` bounds how many equal groups a step replaces. After
that they keep their slots, and when nothing of the step runs any more, those of its equal groups that come
first in order fill them. So which groups make a synchronous batch does not depend on who finished first.

Source: Fu et al. 2025, AReaL (arXiv 2505.24298), section 5.1, for the bound.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from dta_jax.collect.order import Place
from dta_jax.collect.records import Group


class Admission:
    """The groups of a run.

    Args:
      batch_groups: B, groups per batch.
      max_staleness: n, see the module.
      max_resampled: the most equal groups of a step that are replaced.
      version: of the weights that are there.
      step: the last step that was trained; nothing is running, nothing accepted.
    """

    def __init__(
        self, batch_groups: int, *, max_staleness: int, max_resampled: int, version: int = 0, step: int = 0
    ):
        self.batch_groups, self.max_staleness, self.max_resampled = batch_groups, max_staleness, max_resampled
        self.version, self.step = version, step
        self.running: set[Place] = set()
        self.ready: dict[Place, Group] = {}
        self._next = Place(step + 1, 0)
        self._waiting: deque[Place] = deque()
        self._replacements: Counter[int] = Counter()
        self._resampled: Counter[int] = Counter()
        self._equal: dict[Place, Group] = {}
        self._keeping_slot: set[Place] = set()
        self._chosen: list[Group] | None = None  # of the next batch, still among `ready`

    @property
    def capacity(self) -> int:
        """Groups that may start now."""
        accepted = self.step * self.batch_groups + len(self.ready) + len(self._keeping_slot)
        admitted = (self.max_staleness + self.version + 1) * self.batch_groups
        return admitted - (len(self.running) + accepted)

    def start(self) -> Place:
        """Takes a slot for the next group."""
        if self._waiting:
            place = self._waiting.popleft()
        else:
            place = self._next
            last = place.number + 1 == self.batch_groups
            self._next = Place(place.step + 1, 0) if last else Place(place.step, place.number + 1)
        self.running.add(place)
        return place

    def reject(self, place: Place) -> None:
        """A running group failed: it is replaced."""
        self.running.remove(place)
        self._replace(place)
        self._fill_with_equal(place.step)

    def accept(self, group: Group) -> None:
        """A running group is whole."""
        self.running.remove(group.place)
        self.ready[group.place] = group
        self._fill_with_equal(group.place.step)

    def set_equal(self, group: Group) -> bool:
        """A running group is whole, but all its episodes earned the same.

        Returns:
          Whether it is replaced. If not, it may still fill its step's batch.
        """
        place = group.place
        self.running.remove(place)
        self._equal[place] = group
        replaced = self._resampled[place.step] < self.max_resampled
        if replaced:
            self._resampled[place.step] += 1
            self._replace(place)
        else:
            self._keeping_slot.add(place)
        self._fill_with_equal(place.step)
        return replaced

    def stale(self, step: int) -> list[Place]:
        """Accepted groups with a token that is too old for a step: older than version step - 1 - n."""
        oldest = step - 1 - self.max_staleness
        return [
            place
            for place, group in sorted(self.ready.items())
            if group.oldest_version is not None and group.oldest_version < oldest
        ]

    def drop(self, place: Place) -> None:
        """An accepted group will not be trained on: it is replaced."""
        del self.ready[place]
        self._replace(place)

    def choose(self, step: int, *, wait: bool = False) -> list[Group] | None:
        """What `take` will give for the next step, whatever is accepted until then; None as there.

        The groups count as accepted, and not as trained on. Call it when stale ones are dropped.
        """
        if self._chosen is None:
            if len(self.ready) < self.batch_groups or (wait and self._unsettled(step)):
                return None
            self._chosen = [self.ready[place] for place in sorted(self.ready)[: self.batch_groups]]
        return self._chosen

    def take(self, step: int, *, wait: bool = False) -> list[Group] | None:
        """The batch of a step: the accepted groups that come first in order; None while there are too few.

        Args:
          step: the step.
          wait: also for groups that are still to come, if they were meant for this step or an earlier one.
        """
        chosen = self.choose(step, wait=wait)
        if chosen is None:
            return None
        for group in chosen:
            del self.ready[group.place]
        self._chosen, self.step = None, step
        self._forget_finished_steps()
        return chosen

    def state(self) -> dict[str, Any]:
        """What a run that is taken up again has to know, as JSON.

        `accepted` are the groups that are whole and were not trained on, by their places; `restart` are those
        that were to be made. Equal groups that were replaced are forgotten.
        """
        restart = sorted({*self.running, *self._waiting, *self._keeping_slot})
        return {
            "step": self.step,
            "version": self.version,
            "next": list(self._next),
            "restart": [list(place) for place in restart],
            "accepted": [list(place) for place in sorted(self.ready)],
            "replacements": {str(step): count for step, count in self._replacements.items()},
            "resampled": {str(step): count for step, count in self._resampled.items()},
        }

    def restore(self, state: Mapping[str, Any], accepted: Iterable[Group]) -> None:
        """Goes on from a state.

        Args:
          state: from `state`.
          accepted: those accepted groups that were kept; the others are made again.
        """
        self.step, self.version, self._next = state["step"], state["version"], Place(*state["next"])
        self.ready = {group.place: group for group in accepted}
        unfinished = {Place(*place) for place in (*state["restart"], *state["accepted"])}
        self._waiting = deque(sorted(unfinished - self.ready.keys()))
        self._replacements = Counter({int(step): count for step, count in state["replacements"].items()})
        self._resampled = Counter({int(step): count for step, count in state["resampled"].items()})

    def _replace(self, lost: Place) -> None:
        number = self.batch_groups + self._replacements[lost.step]
        self._replacements[lost.step] += 1
        self._waiting.append(Place(lost.step, number))

    def _unsettled(self, step: int) -> bool:
        """Whether groups that were meant for a step or an earlier one are still to come."""
        to_come = (*self.running, *self._waiting, *self._keeping_slot)
        return self._next.step <= step or any(place.step <= step for place in to_come)

    def _fill_with_equal(self, step: int) -> None:
        """When a step has nothing left to wait for, its first equal groups fill the slots that they kept."""
        if self._next.step <= step or any(place.step == step for place in (*self.running, *self._waiting)):
            return
        kept = {place for place in self._keeping_slot if place.step == step}
        equal = sorted(place for place in self._equal if place.step == step)
        self.ready |= {place: self._equal[place] for place in equal[: len(kept)]}
        self._keeping_slot -= kept
        for place in equal:
            del self._equal[place]

    def _forget_finished_steps(self) -> None:
        """Drops the counts of steps none of whose groups can be lost any more."""
        alive = {place.step for place in (*self.running, *self.ready, *self._waiting, *self._equal)}
        for counts in (self._replacements, self._resampled):
            for step in [step for step in counts if step < self._next.step and step not in alive]:
                del counts[step]
