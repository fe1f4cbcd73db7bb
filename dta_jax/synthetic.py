"""Seeded rollouts in the shape of an agent's: one system prompt, tasks, trials that part on the way.

    system  user_0  COMPLETION  tool  COMPLETION  tool  COMPLETION      trial 0
                          |             `---------- COMPLETION          trial 1, leaves trial 0 at turn 2
                          `- COMPLETION  tool  COMPLETION               trial 2, leaves trial 0 at turn 1

Text is a walk over a random graph in which each token has one usual and a few unusual successors, so
a model can learn it: the entropy of the next token is far below that of the vocabulary. A rollout is
rewarded if its completions took the usual successor more often than the median trial of its task did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dta_jax.errors import InputError
from dta_jax.rollouts import Rollouts

_SYSTEM, _USER, _ASSISTANT, _TOOL, _END = range(5)  # ids of the markers that frame a message
_MARKERS = 5
_SUCCESSORS = 4  # of each token: one usual, the others unusual
_MOST_TURNS = 1_000_000
_SHORTEST = 3  # tokens of a message: its marker, one of its own, an end


@dataclass(frozen=True)
class SyntheticRollouts:
    """What to generate. Lengths are means in tokens; each message's own is drawn around its mean.

    Attributes:
      vocab_size: ids are below it.
      tasks: number of tasks (groups).
      trials: rollouts per task.
      turns: completions per rollout, on average.
      system_tokens: length of the system prompt that all rollouts share; exact.
      user_tokens: mean length of a task's opening message.
      completion_tokens: mean length of a completion.
      tool_tokens: mean length of what comes back after a completion.
      branching: probability, at each turn, that a trial leaves the earlier trial that it follows. 1:
        trials share the opening only; 0: all trials of a task are equal.
      seed: the same seed and parameters give the same rollouts on every machine.
    """

    vocab_size: int = 512
    tasks: int = 8
    trials: int = 4
    turns: float = 4.0
    system_tokens: int = 128
    user_tokens: int = 16
    completion_tokens: int = 16
    tool_tokens: int = 24
    branching: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = {"vocab_size": _MARKERS + _SUCCESSORS, "seed": 0, "branching": 0}
        for name, value in vars(self).items():
            low = smallest.get(name, _SHORTEST if name.endswith("_tokens") else 1)
            if not value >= low:
                raise InputError("SyntheticRollouts", name, expected=f"at least {low}", actual=value)
        if self.turns > _MOST_TURNS:
            raise InputError(
                "SyntheticRollouts", "turns", expected=f"at most {_MOST_TURNS}", actual=self.turns
            )
        if self.branching > 1:
            raise InputError("SyntheticRollouts", "branching", expected="at most 1", actual=self.branching)


def generate_rollouts(spec: SyntheticRollouts) -> Rollouts:
    """Generates `spec.tasks * spec.trials` rollouts, ordered by trial and then by task.

    Returns:
      Rollouts with task_id, trial and reward, without log-probabilities.
    """
    rng = np.random.default_rng([spec.seed, 0])
    graph = _graph(rng, spec.vocab_size)
    system, _ = _message(rng, graph, _SYSTEM, spec.system_tokens, usual=0.9)
    by_task = [_task(np.random.default_rng([spec.seed, 1, t]), graph, spec) for t in range(spec.tasks)]

    tokens: list[np.ndarray] = []
    spans: list[tuple[int, int, int]] = []
    usual = np.empty((spec.trials, spec.tasks))
    for i in range(spec.tasks * spec.trials):
        opening, trials = by_task[i % spec.tasks]
        messages = [system, opening]
        position = len(system) + len(opening)
        for turn in trials[i // spec.tasks]:
            # The marker that opens a completion is part of the prompt; the policy chooses the rest.
            spans.append((i, position + 1, position + len(turn.completion)))
            messages += [turn.completion, turn.reply]
            position += len(turn.completion) + len(turn.reply)
        tokens.append(np.concatenate(messages[:-1]))
        usual.flat[i] = np.concatenate([turn.usual for turn in trials[i // spec.tasks]]).mean()
    return Rollouts(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.cumsum([0] + [len(t) for t in tokens], dtype=np.int64),
        completion_spans=np.array(spans, np.int32),
        task_id=np.tile(np.arange(spec.tasks, dtype=np.int32), spec.trials),
        trial=np.repeat(np.arange(spec.trials, dtype=np.int32), spec.tasks),
        reward=(usual > np.median(usual, axis=0)).astype(np.float32).ravel(),
        source="synthetic rollouts",
    )


def _graph(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """int64[V, successors]; the usual successors (column 0) of the ordinary tokens form one cycle."""
    graph = rng.integers(_MARKERS, vocab_size, (vocab_size, _SUCCESSORS))
    cycle = rng.permutation(np.arange(_MARKERS, vocab_size))
    graph[cycle, 0] = np.roll(cycle, -1)
    return graph


@dataclass(frozen=True)
class _Turn:
    completion: np.ndarray
    usual: np.ndarray  # bool, which of the completion's tokens were the usual successor
    reply: np.ndarray


def _task(
    rng: np.random.Generator, graph: np.ndarray, spec: SyntheticRollouts
) -> tuple[np.ndarray, list[list[_Turn]]]:
    """A task's opening message and its trials, each of which follows an earlier one for a while."""
    opening, _ = _message(rng, graph, _USER, _length(rng, spec.user_tokens), usual=0.9)
    trials: list[list[_Turn]] = []
    for _ in range(spec.trials):
        shared: list[_Turn] = []
        turns = int(rng.poisson(spec.turns - 1)) + 1
        if trials:
            followed = trials[int(rng.integers(len(trials)))]
            leaves = int(rng.geometric(spec.branching)) - 1 if spec.branching > 0 else len(followed)
            shared = followed[:leaves]
            turns = len(shared) if leaves >= len(followed) else max(turns, leaves + 1)
        skill = rng.uniform(0.5, 1.0)
        trials.append(shared + [_turn(rng, graph, spec, skill) for _ in range(turns - len(shared))])
    return opening, trials


def _turn(rng: np.random.Generator, graph: np.ndarray, spec: SyntheticRollouts, skill: float) -> _Turn:
    completion, usual = _message(rng, graph, _ASSISTANT, _length(rng, spec.completion_tokens), skill)
    reply, _ = _message(rng, graph, _TOOL, _length(rng, spec.tool_tokens), usual=0.7)
    return _Turn(completion, usual, reply)


def _length(rng: np.random.Generator, mean: int) -> int:
    """Half the mean for certain and the other half spread out, as replies of agents are."""
    return max(_SHORTEST, round(mean / 2 + rng.exponential(mean / 2)))


def _message(
    rng: np.random.Generator, graph: np.ndarray, marker: int, length: int, usual: float
) -> tuple[np.ndarray, np.ndarray]:
    """`length` tokens: a marker, a walk over the graph, an end marker; and where the walk was usual."""
    rank = np.where(rng.random(length) < usual, 0, rng.integers(1, _SUCCESSORS, length))
    tokens = np.empty(length, np.int64)
    tokens[0] = marker
    for i in range(1, length):
        tokens[i] = graph[tokens[i - 1], rank[i]]
    tokens[-1] = _END
    return tokens, rank[1:-1] == 0
