"""What there is to see of a batch of sequences: sharing, plans, loads of ranks, and advice in words.

`inspect_samples` computes everything on the host, with numpy; `inspect_page` and `inspect_pictures` show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.balance import Assignment, balance
from dta_jax.errors import InputError
from dta_jax.model import DecoderModel
from dta_jax.schedule import STRATEGIES, compile_schedule
from dta_jax.schedule_stats import ScheduleStats, schedule_stats
from dta_jax.sharing import Runs, distinct_passing, runs_of, saved_tokens
from dta_jax.stack_bytes import RowBytes, row_bytes
from dta_jax.tree_inputs import CHUNK_MULTIPLE, MAX_ODD_CHUNK
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples, Schedule, Trie

NEIGHBOURS = (1 / 4, 1 / 2, 1, 2, 4)  # chunk sizes that are compared, over the one asked for
RANKS = (2, 4, 8, 16)  # numbers of ranks that are compared
MOST_COMPARED = 20_000  # sequences; of more, only the number of ranks asked for is balanced
BACK_WORK = 3  # of a row, in forward passes of a row, as in `ScheduleStats.work`


@dataclass(frozen=True, eq=False)
class Subject:
    """What is looked at.

    Attributes:
      name: where it comes from.
      samples: N sequences, E entries.
      rollout: int64[N], the rollout of each sequence: an index into the arrays below.
      completion: int64[N], which of its rollout's completions a sequence ends with.
      task, trial, reward: [R] each, where the rollouts have them.
    """

    name: str
    samples: Samples
    rollout: np.ndarray
    completion: np.ndarray
    task: np.ndarray | None = None
    trial: np.ndarray | None = None
    reward: np.ndarray | None = None


@dataclass(frozen=True)
class Plan:
    """One way to run the batch.

    Attributes:
      name: the method.
      chunk: C; None for methods without chunks.
      stats: of its schedule; None for methods without one.
      work: forward passes of a row, BACK counted as 3 (2 with kept residuals), over 3T.
      bound: what no plan of its kind can beat, in the same unit.
      padding: rows that are padding, over all rows that run.
      peak_bytes: stack, cotangents and residuals (`RowBytes.of`) for the model, if there is one.
    """

    name: str
    chunk: int | None
    stats: ScheduleStats | None
    work: float
    bound: float
    padding: float
    peak_bytes: int | None


@dataclass(frozen=True, eq=False)
class Inspection:
    """Everything that is shown.

    Attributes:
      subject: what is looked at.
      trie: T rows.
      lengths: int64[N].
      runs: U runs of the trie.
      rollouts, tasks: int64[U], how many of each pass a run; tasks None where they are not known.
      saved: `saved_tokens`.
      schedule: the plan that is shown operation by operation.
      plan: its figures.
      strategies: all methods at the same chunk size, the dense ones first.
      chunks: the shown strategy at other chunk sizes, ascending.
      assignment: the sequences over ranks.
      ranks: the same for other numbers of ranks.
      row_bytes: of the model whose bytes are counted, or None.
    """

    subject: Subject
    trie: Trie
    lengths: np.ndarray
    runs: Runs
    rollouts: np.ndarray
    tasks: np.ndarray | None
    saved: dict[str, int]
    schedule: Schedule
    plan: Plan
    strategies: list[Plan]
    chunks: list[Plan]
    assignment: Assignment
    ranks: list[Assignment]
    row_bytes: RowBytes | None

    @property
    def flat_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def dedupe(self) -> float:
        """Flat over tree tokens."""
        return self.flat_tokens / self.trie.num_rows


def inspect_samples(
    subject: Subject,
    *,
    chunk_size: int = 2048,
    strategy: str = "packed",
    num_ranks: int | None = None,
    model: DecoderModel | None = None,
) -> Inspection:
    """Plans a batch in every way and measures what sequences share.

    Args:
      subject: at least one sequence with loss.
      chunk_size: C, as in training.
      strategy: the one to show operation by operation.
      num_ranks: K to distribute over; None takes 4, or fewer if there are fewer sequences.
      model: whose bytes are counted.

    Raises:
      InputError: nothing with loss, a chunk size that training would not take, an unknown strategy, or ranks
        that are fewer than 1 or more than the sequences.
    """
    samples = subject.samples
    count = len(samples.sequences)
    if not len(samples.sequence):
        raise InputError(subject.name, "completion_spans", expected="tokens with loss", actual="none")
    if not allowed_chunk(chunk_size):
        allowed = f"1 to {MAX_ODD_CHUNK}, or a multiple of {CHUNK_MULTIPLE}"
        raise InputError("--chunk", "value", expected=allowed, actual=chunk_size)
    if num_ranks is not None and not 1 <= num_ranks <= count:
        expected = f"1 to {count}, the sequences of {subject.name}"
        raise InputError("--ranks", "value", expected=expected, actual=num_ranks)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    lengths = np.array([len(s) for s in samples.sequences], np.int64)
    runs = runs_of(trie)
    tail_run = runs.of_rows(trie.tail)
    rollouts = distinct_passing(runs, tail_run, subject.rollout)
    tasks = None
    if subject.task is not None:
        tasks = distinct_passing(runs, tail_run, subject.task[subject.rollout])

    per_row = None if model is None else row_bytes(model)

    def plan(name: str, chunk: int) -> tuple[Schedule, Plan]:
        schedule = compile_schedule(trie, rows, chunk_size=chunk, strategy=name)
        return schedule, _plan(schedule, name, chunk, per_row)

    assignment = balance(trie, num_ranks or min(4, count))
    compared = [k for k in RANKS if k <= count and count <= MOST_COMPARED]
    shown, figures = plan(strategy, chunk_size)
    chunks = {int(chunk_size * factor) for factor in NEIGHBOURS if chunk_size * factor >= 1}
    useful = [c for c in sorted(chunks) if allowed_chunk(c) and (c <= chunk_size or c < 2 * trie.num_rows)]
    others = [plan(name, chunk_size)[1] for name in STRATEGIES]
    return Inspection(
        subject=subject,
        trie=trie,
        lengths=lengths,
        runs=runs,
        rollouts=rollouts,
        tasks=tasks,
        saved=saved_tokens(runs, rollouts, tasks),
        schedule=shown,
        plan=figures,
        strategies=[*_dense_plans(trie, lengths), *others],
        chunks=[figures if c == chunk_size else plan(strategy, c)[1] for c in useful],
        assignment=assignment,
        ranks=[balance(trie, k) for k in compared] or [assignment],
        row_bytes=per_row,
    )


def allowed_chunk(chunk_size: int) -> bool:
    """Whether the engine takes chunks of this size."""
    return 1 <= chunk_size <= MAX_ODD_CHUNK or (chunk_size > 0 and chunk_size % CHUNK_MULTIPLE == 0)


def _plan(schedule: Schedule, name: str, chunk: int, per_row: RowBytes | None) -> Plan:
    stats = schedule_stats(schedule)
    executed = stats.backward_tokens_executed + stats.forward_tokens_executed
    return Plan(
        name=name,
        chunk=chunk,
        stats=stats,
        work=stats.work,
        bound=stats.work_bound,
        padding=1 - len(schedule.row) / executed,
        peak_bytes=None if per_row is None else per_row.of(schedule),
    )


def _dense_plans(trie: Trie, lengths: np.ndarray) -> list[Plan]:
    """Every sequence on its own, and only those that no other continues; without padding."""
    leaf_rows = np.flatnonzero(trie.subtree_end == np.arange(trie.num_rows) + 1)
    leaf_tokens = int((trie.depth[leaf_rows] + 1).sum())
    T = trie.num_rows
    return [
        Plan(name, None, None, tokens / T, 1.0, 0.0, None)
        for name, tokens in (("dense", int(lengths.sum())), ("leafized", leaf_tokens))
    ]
