"""Our way to distribute a tree's leaves over ranks: whole subtrees first, then exchanges, then repairs.

1. `place_subtrees` cuts the tree into the largest subtrees that are not too large and places them, the most
   expensive first, where the load grows least far. Few cuts keep sharing, small pieces even out the loads:
   several piece sizes are tried, and the contiguous parts of `dfs_contiguous`.
2. `descend` repeats the best exchange of two subtrees (or one for nothing) between the heaviest rank and
   another, as long as both end up below the heaviest.
3. Repairs take the heaviest rank with one to three light ones, distribute their leaves anew among them by
   1. and 2., and keep what is better, until nothing is.
4. `search` does all this again from somewhat random orders, until the lower bound or the effort's end.

Everything is deterministic and depends on the tree alone; effort is counted, never timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, combinations, cycle
from typing import Final

import numpy as np

from dta_jax.balance_baselines import dfs_contiguous
from dta_jax.balance_tree import CostTree, running_sum
from dta_jax.types import NO_PARENT

CLOSE_ENOUGH: Final = 1e-3  # above the lower bound, relative: no search goes on below this
_GAIN: Final = 1e-9  # the least relative gain that is worth a change; above rounding
_PIECES: Final = (1.0, 0.5, 0.25, 0.0)  # largest subtree placed whole, relative to the lower bound
_SHUFFLE: Final = 0.2  # spread of the factors on sizes by which a restart orders them, log-normal
_DESCENTS: Final = 2  # how many of the best starts are descended from, where the tree is large
_LARGE: Final = 256  # leaves
_PARTNERS: Final = 8  # lightest ranks that an exchange is sought with
_CANDIDATES: Final = 128  # subtrees of one rank that an exchange chooses from
_LIGHT: Final = 6  # ranks that repairs combine
_EFFORT: Final = (200_000, 60_000_000)  # array elements visited: per leaf, and at most; about 1 s
_REFINEMENTS: Final = 4  # exchanges by measured costs, per rank
_PROPOSALS: Final = 8  # exchanges measured before the heaviest rank counts as done
_CALL: Final = 3_000  # array elements whose visit costs as much as the numpy calls around them


@dataclass(frozen=True)
class Exchange:
    """Subtree `give` goes from rank `a` to rank `b`, and `take` (or nothing) the other way."""

    a: int
    b: int
    give: int
    take: int | None
    worst: float  # the larger of the two loads afterwards


class Effort:
    """Counts the work done, in array elements visited, so that a search ends at the same point everywhere."""

    def __init__(self, limit: float = math.inf):
        self._left = limit

    def spend(self, elements: int, calls: int = 1) -> None:
        self._left -= elements + calls * _CALL

    @property
    def spent(self) -> bool:
        return self._left <= 0


class Share:
    """What one rank runs: its segments, and the subtrees that it can give away.

    A subtree is named by its topmost segment that is in no other leaf's path: taking it away saves
    all that the rank runs under that segment, and nothing above.
    """

    def __init__(self, tree: CostTree, count: np.ndarray, num_leaves: int):
        self.segment = np.flatnonzero(count)
        self._stop = np.searchsorted(self.segment, tree.end[self.segment])
        parent = tree.parent[self.segment]
        above = np.where(parent == NO_PARENT, num_leaves, count[parent])
        self._top = np.flatnonzero(above > count[self.segment])
        self._ended = np.argsort(self._stop, kind="stable")
        self._ended_before = np.searchsorted(self._stop[self._ended], self._top, side="right")
        self._cost = tree.cost[self.segment]
        self.subtree = self.segment[self._top]
        total = running_sum(self._cost)
        self.saved = total[self._stop[self._top]] - total[self._top]

    def added(self, present: np.ndarray) -> np.ndarray:
        """What each subtree would cost other ranks: bool[B, P], which of the segments they run already
        -> float64[B, subtrees]. Its own rows and those above it, where they are missing."""
        missing = np.where(present, 0.0, self._cost)
        total = running_sum(missing)
        ended = running_sum(missing[:, self._ended])
        return total[:, self._stop[self._top]] - ended[:, self._ended_before]


class Partition:
    """A distribution of leaves over ranks that can be changed, with all sums kept up to date.

    Attributes:
      owner: int64[J], the rank of each leaf.
      count: int32[K, M], leaves of each rank under each segment.
      load: float64[K], cost of each rank.
      scale: float64[K], true cost over `load`, where costs are not additive; 1 elsewhere.
    """

    def __init__(self, tree: CostTree, owner: np.ndarray, num_ranks: int, effort: Effort | None = None):
        self.tree = tree
        self.effort = effort or Effort()
        self.owner = owner.copy()
        self.count = np.zeros((num_ranks, len(tree.cost)), np.int32)
        self.load = np.zeros(num_ranks)
        self.scale = np.ones(num_ranks)
        self.share: list[Share] = [Share(tree, self.count[0], 0)] * num_ranks
        self.give_out(np.arange(len(owner)), owner, range(num_ranks))

    def give_out(self, leaves: np.ndarray, owner: np.ndarray, ranks: Iterable[int]) -> None:
        """Gives `leaves` to `owner`; `ranks` are all that gain or lose some."""
        self.owner[leaves] = owner
        for r in ranks:
            mine = self.owner == r
            self.count[r] = self.tree.leaf_counts(mine)
            self.load[r] = self.tree.cost[self.count[r] > 0].sum()
            self.share[r] = Share(self.tree, self.count[r], int(mine.sum()))
            self.effort.spend(len(self.owner) + len(self.tree.cost))

    @property
    def heaviest(self) -> int:
        return int((self.load * self.scale).argmax())

    def key(self) -> tuple[float, float]:
        """Smaller is better: the largest load, then the sum."""
        return float(self.load.max(initial=0)), float(self.load.sum())

    def leaves_under(self, rank: int, segment: int) -> np.ndarray:
        """The rank's leaves in a subtree."""
        first, stop = (int(bound[segment]) for bound in self.tree.leaves)
        return first + np.flatnonzero(self.owner[first:stop] == rank)

    def apply(self, exchange: Exchange) -> None:
        """Carries out an exchange."""
        leaves = self.leaves_under(exchange.a, exchange.give)
        owner = np.full(len(leaves), exchange.b)
        if exchange.take is not None:
            back = self.leaves_under(exchange.b, exchange.take)
            leaves, owner = np.append(leaves, back), np.append(owner, np.full(len(back), exchange.a))
        self.give_out(leaves, owner, (exchange.a, exchange.b))

    def exchanges(self, a: int) -> list[Exchange]:
        """The best exchange of rank `a` with each partner, those that lower the worse of the two; best
        first. Partners are the lightest ranks and the one that a gift suits best."""
        gifts = self.share[a]
        if not len(gifts.subtree):
            return []
        limit = self.load[a] * self.scale[a] * (1 - _GAIN)
        added = gifts.added(self.count[:, gifts.segment] > 0)
        after = self.scale[:, None] * (self.load[:, None] + added)
        after[a] = np.inf
        suits = np.maximum(after, self.scale[a] * (self.load[a] - gifts.saved)).min(axis=1).argmin()
        lightest = np.argsort(self.load * self.scale, kind="stable")[:_PARTNERS]
        partners = dict.fromkeys([int(suits), *lightest.tolist()])
        found = [self._best(a, b, added[b]) for b in partners if b != a]
        self.effort.spend(3 * added.size)
        return sorted((e for e in found if e.worst < limit), key=lambda e: e.worst)

    def _best(self, a: int, b: int, cost_to_b: np.ndarray) -> Exchange:
        """The exchange of ranks `a` and `b` with the smallest larger load.

        Loads are exact: what one subtree saves and the other adds is independent as long as neither
        lies inside the other, and such pairs are left out.
        """
        gifts, returns = self.share[a], self.share[b]
        i, j = _spread(gifts.saved), _spread(returns.saved)
        cost_to_a = returns.added(self.count[a, returns.segment][None] > 0)[0, j]
        give, take = gifts.subtree[i, None], returns.subtree[j]
        after_a = self.load[a] - gifts.saved[i, None] + np.append(cost_to_a, 0)
        after_b = self.load[b] + cost_to_b[i, None] - np.append(returns.saved[j], 0)
        worst = np.maximum(self.scale[a] * after_a, self.scale[b] * after_b)
        end = self.tree.end
        nested = ((give <= take) & (take < end[give])) | ((take <= give) & (give < end[take]))
        worst[:, :-1][nested] = np.inf
        x, y = np.unravel_index(worst.argmin(), worst.shape)
        self.effort.spend(worst.size)
        taken = int(take[y]) if y < len(take) else None
        return Exchange(a, b, int(give[x, 0]), taken, float(worst[x, y]))


def _spread(saved: np.ndarray) -> np.ndarray:
    """Indices of at most `_CANDIDATES` subtrees, of all sizes."""
    if len(saved) <= _CANDIDATES:
        return np.arange(len(saved))
    chosen = np.linspace(0, len(saved) - 1, _CANDIDATES).round().astype(np.int64)
    return np.sort(np.argsort(saved, kind="stable")[chosen])


def place_subtrees(
    tree: CostTree,
    num_ranks: int,
    largest: float,
    effort: Effort,
    shuffle: np.random.Generator | None = None,
) -> np.ndarray:
    """Places subtrees of at most `largest` cost (or single leaves), the most expensive first, each where
    the load with it is smallest. `shuffle` makes the order somewhat random.

    Returns:
      int64[J], the rank of each leaf.
    """
    splits = (tree.subtree_cost > largest) & (tree.end > np.arange(len(tree.end)) + 1)
    above_splits = (tree.parent == NO_PARENT) | splits[tree.parent]
    pieces = np.flatnonzero(above_splits & ~splits)
    first, stop = tree.leaves
    owner = np.zeros(len(tree.leaf), np.int64)
    load = np.zeros(num_ranks)
    present = np.zeros((num_ranks, len(tree.cost)), bool)
    size = tree.subtree_cost[pieces]
    if shuffle is not None:
        size = size * np.exp(_SHUFFLE * shuffle.standard_normal(len(pieces)))
    for m in pieces[np.argsort(-size, kind="stable")].tolist():
        path = tree.ancestors(m)
        with_it = load + tree.subtree_cost[m] + ~present[:, path] @ tree.cost[path]
        rank = int(with_it.argmin())
        load[rank] = with_it[rank]
        present[rank, path] = True
        owner[first[m] : stop[m]] = rank
        effort.spend(2 * num_ranks * len(path))
    return owner


def descend(partition: Partition, bound: float) -> None:
    """Best exchanges of the heaviest rank until there is none, or `bound` is close enough."""
    while partition.load.max() > bound * (1 + CLOSE_ENOUGH) and not partition.effort.spent:
        exchanges = partition.exchanges(partition.heaviest)
        if not exchanges:
            return
        partition.apply(exchanges[0])


def distribute(tree: CostTree, num_ranks: int, effort: Effort) -> Partition:
    """The best of several starts, each followed by `descend`."""
    bound = tree.lower_bound(num_ranks)
    owners = [dfs_contiguous(tree, num_ranks)]
    for piece in _PIECES:
        if not effort.spent:
            owners.append(place_subtrees(tree, num_ranks, piece * bound, effort))
    if len(tree.leaf) > _LARGE:
        owners.sort(key=lambda owner: float(tree.loads(owner, num_ranks).max()))
        del owners[_DESCENTS:]
    best: Partition | None = None
    for owner in owners:
        partition = Partition(tree, owner, num_ranks, effort)
        descend(partition, bound)
        if best is None or partition.key() < best.key():
            best = partition
        if best.load.max() <= bound * (1 + CLOSE_ENOUGH):
            break
    assert best is not None
    return best


def search(tree: CostTree, num_ranks: int) -> np.ndarray:
    """Distributes the leaves; see the top of this file. Returns int64[J], the rank of each leaf."""
    if not len(tree.leaf):
        return np.zeros(0, np.int64)
    effort = Effort(min(_EFFORT[0] * len(tree.leaf), _EFFORT[1]))
    bound = tree.lower_bound(num_ranks)
    partition = distribute(tree, num_ranks, effort)
    _repair_all(partition, bound)
    rng, pieces = np.random.default_rng(0), cycle(_PIECES)
    while partition.load.max() > bound * (1 + CLOSE_ENOUGH) and not effort.spent:
        owner = place_subtrees(tree, num_ranks, next(pieces) * bound, effort, shuffle=rng)
        other = Partition(tree, owner, num_ranks, effort)
        descend(other, bound)
        _repair_all(other, bound)
        partition = min(partition, other, key=Partition.key)
    return partition.owner


def _repair_all(partition: Partition, bound: float) -> None:
    """Repairs until none helps, or `bound` is close enough."""
    tried: set[bytes] = set()
    while partition.load.max() > bound * (1 + CLOSE_ENOUGH):
        if not any(_repair(partition, ranks, tried) for ranks in _repair_groups(partition)):
            return
        descend(partition, bound)


def _repair_groups(partition: Partition) -> Iterable[tuple[int, ...]]:
    """The heaviest rank with one other, and with two or three of the lightest; lightest first. Never all
    ranks: that would be the first distribution again."""
    heaviest = partition.heaviest
    others = [int(r) for r in np.argsort(partition.load, kind="stable") if r != heaviest]
    groups = chain(((r,) for r in others), combinations(others[:_LIGHT], 2), combinations(others[:_LIGHT], 3))
    yield from ((heaviest, *group) for group in groups if len(group) < len(others))


def _repair(partition: Partition, ranks: tuple[int, ...], tried: set[bytes]) -> bool:
    """Distributes the ranks' leaves anew among them; whether their largest load has become smaller."""
    mine = np.isin(partition.owner, ranks)
    state = np.packbits(mine).tobytes() + bytes(len(ranks))
    limit = partition.load[list(ranks)].max() * (1 - _GAIN)
    if state in tried or partition.effort.spent:
        return False
    tried.add(state)
    tree = partition.tree.restricted(mine)
    if tree.lower_bound(len(ranks)) >= limit:
        return False
    better = distribute(tree, len(ranks), partition.effort)
    if better.load.max() >= limit:
        return False
    partition.give_out(np.flatnonzero(mine), np.array(ranks)[better.owner], ranks)
    return True


def refine(
    tree: CostTree,
    owner: np.ndarray,
    cost: np.ndarray,
    measure: Callable[[np.ndarray], float],
    effort: Effort | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Exchanges subtrees by costs that are not additive, but near a multiple of the additive ones.

    Exchanges are proposed by the additive costs, scaled on each rank so that they meet its measured cost.
    One is kept if the larger measured cost of its two ranks has become smaller.

    Args:
      tree: J leaves with additive costs.
      owner: int64[J], the rank of each leaf.
      cost: float64[K], measured cost of each rank.
      measure: the cost of a rank from its leaves, bool[J].
      effort: ends the search when it is spent; `measure` spends it. None for no end but the search's own.

    Returns:
      The new owners and their measured costs.
    """
    partition = Partition(tree, owner, len(cost))
    cost = cost.copy()
    for _ in range(_REFINEMENTS * len(cost)):
        heaviest = int(cost.argmax())
        usual = cost.sum() / max(partition.load.sum(), 1.0)
        loaded = partition.load > 0
        partition.scale = np.where(loaded, cost / np.where(loaded, partition.load, 1.0), usual)
        for exchange in partition.exchanges(heaviest)[:_PROPOSALS]:
            if effort is not None and effort.spent:
                return partition.owner, cost
            pair, before = [exchange.a, exchange.b], partition.owner.copy()
            partition.apply(exchange)
            measured = np.array([measure(partition.owner == r) for r in pair])
            if measured.max() < cost[heaviest] * (1 - _GAIN):
                cost[pair] = measured
                break
            partition.give_out(np.arange(len(before)), before, pair)
        else:
            break
    return partition.owner, cost
