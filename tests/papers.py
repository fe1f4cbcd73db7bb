"""Losses as the papers write them: numpy, one sequence after the other, loops and minima spelled out.

Nothing here is shared with the package. A batch is a list of sequences; each has arrays over its own
tokens. Log-probabilities may be complex, and comparisons look at real parts, so that `gradient` can take the
complex step, which is exact to rounding. What a paper detaches is read from `logp_sg`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Sequence:
    """One sampled sequence o_i: arrays over its tokens; `advantage` may differ from token to token."""

    logp: np.ndarray
    entropy: np.ndarray
    old: np.ndarray
    prox: np.ndarray
    ref: np.ndarray
    advantage: np.ndarray

    def __post_init__(self) -> None:
        self.logp_sg = self.logp.copy()

    def __len__(self) -> int:
        return len(self.logp)


Batch = list[Sequence]
Loss = Callable[[Batch], complex]


def random_batch(rng: np.random.Generator, lengths: tuple[int, ...] = (1, 4, 7, 2, 5)) -> Batch:
    """Ratios from about 0.3 to 3, so that every branch of every clip is taken."""
    batch = []
    for n in lengths:
        logp = -rng.exponential(1.5, n) - 0.05
        near = [logp + rng.normal(0, 0.5, n) for _ in range(3)]
        batch.append(Sequence(logp, rng.uniform(0, 3, n), *near, np.full(n, rng.choice([-1.3, 0.7, 2.0]))))
    return batch


def gradient(loss: Loss, batch: Batch, field: str) -> np.ndarray:
    """d loss / d field, all sequences' tokens one after the other."""
    h, derivatives = 1e-30, []
    for sequence in batch:
        plain = getattr(sequence, field)
        for t in range(len(plain)):
            moved = plain.astype(complex)
            moved[t] += 1j * h
            setattr(sequence, field, moved)
            derivatives.append(loss(batch).imag / h)
        setattr(sequence, field, plain)
    return np.array(derivatives)


def smaller(x: complex, y: complex) -> complex:
    return x if x.real <= y.real else y


def larger(x: complex, y: complex) -> complex:
    return x if x.real >= y.real else y


def clip(x: complex, low: float, high: float) -> complex:
    return larger(smaller(x, high), low)


def sigmoid(x: complex) -> complex:
    return 1 / (1 + np.exp(-x))


def token_mean(batch: Batch, term: Callable[[Sequence, int], complex]) -> complex:
    return sum(term(o, t) for o in batch for t in range(len(o))) / sum(len(o) for o in batch)


def sequence_mean(batch: Batch, term: Callable[[Sequence, int], complex]) -> complex:
    return sum(sum(term(o, t) for t in range(len(o))) / len(o) for o in batch) / len(batch)


def nll(batch: Batch) -> complex:
    return token_mean(batch, lambda o, t: -o.logp[t])


def reinforce(batch: Batch) -> complex:
    """Sampled E[A grad log p(o)], the probability of a sequence being the product of its tokens'."""
    return -sum(o.advantage[0] * sum(o.logp) for o in batch) / len(batch)


def clipped_objective(r: complex, a: float, low: float, high: float) -> complex:
    """PPO, eq. 7."""
    return smaller(r * a, clip(r, 1 - low, 1 + high) * a)


def ppo(batch: Batch) -> complex:
    return -token_mean(
        batch, lambda o, t: clipped_objective(np.exp(o.logp[t] - o.old[t]), o.advantage[t], 0.2, 0.2)
    )


def ppo_dual_clip(batch: Batch, c: float = 1.5) -> complex:
    def term(o: Sequence, t: int) -> complex:
        r, a = np.exp(o.logp[t] - o.old[t]), o.advantage[t]
        single = clipped_objective(r, a, 0.2, 0.2)
        return larger(single, c * a) if a < 0 else single

    return -token_mean(batch, term)


def k3(o: Sequence, t: int) -> complex:
    """GRPO, eq. 4."""
    return np.exp(o.ref[t] - o.logp[t]) - (o.ref[t] - o.logp[t]) - 1


def grpo(batch: Batch) -> complex:
    """GRPO, eq. 3, beta 0.04."""

    def term(o: Sequence, t: int) -> complex:
        r = np.exp(o.logp[t] - o.old[t])
        return clipped_objective(r, o.advantage[t], 0.2, 0.2) - 0.04 * k3(o, t)

    return -sequence_mean(batch, term)


def grpo_k1(batch: Batch) -> complex:
    return ppo(batch) + 0.3 * token_mean(batch, lambda o, t: o.logp[t] - o.ref[t])


def grpo_k2(batch: Batch) -> complex:
    return ppo(batch) + 0.3 * token_mean(batch, lambda o, t: 0.5 * (o.logp[t] - o.ref[t]) ** 2)


def dr_grpo(batch: Batch, budget: int = 16) -> complex:
    """GRPO without the length in the denominator; a fixed budget of tokens in its place."""
    total = 0
    for o in batch:
        for t in range(len(o)):
            total += clipped_objective(np.exp(o.logp[t] - o.old[t]), o.advantage[t], 0.2, 0.2) / budget
    return -total / len(batch)


def dapo(batch: Batch) -> complex:
    """DAPO, eq. 8 with the bounds of eq. 10."""
    return -token_mean(
        batch, lambda o, t: clipped_objective(np.exp(o.logp[t] - o.old[t]), o.advantage[t], 0.2, 0.28)
    )


def cispo(batch: Batch, cap: float = 1.5) -> complex:
    """MiniMax-M1: sg(clipped ratio) A log p; no lower bound."""

    def term(o: Sequence, t: int) -> complex:
        weight = min(np.exp(o.logp_sg[t] - o.old[t]), cap)
        return weight * o.advantage[t] * o.logp[t]

    return -token_mean(batch, term)


def sapo(batch: Batch) -> complex:
    def term(o: Sequence, t: int) -> complex:
        tau = 1.0 if o.advantage[t] > 0 else 1.05
        return sigmoid(tau * (np.exp(o.logp[t] - o.old[t]) - 1)) * 4 / tau * o.advantage[t]

    return -sequence_mean(batch, term)


def decoupled_ppo(batch: Batch, cap: float = 1.2) -> complex:
    """Hilton et al.: pi_prox / pi_behaviour times PPO around pi_prox; the first factor capped."""

    def term(o: Sequence, t: int) -> complex:
        behaviour = min(np.exp(o.prox[t]) / np.exp(o.old[t]), cap)
        return behaviour * clipped_objective(np.exp(o.logp[t] - o.prox[t]), o.advantage[t], 0.2, 0.2)

    return -token_mean(batch, term)


def icepop(batch: Batch, low: float = 0.5, high: float = 1.5) -> complex:
    """A token takes part if pi_train / pi_infer is within bounds."""

    def term(o: Sequence, t: int) -> complex:
        k = np.exp(o.prox[t]) / np.exp(o.old[t])
        masked = k if low <= k <= high else 0.0
        return masked * clipped_objective(np.exp(o.logp[t] - o.prox[t]), o.advantage[t], 0.2, 0.2)

    return -token_mean(batch, term)


def truncated_reinforce(batch: Batch, cap: float = 1.1) -> complex:
    """Yao et al.: min(pi_learner / pi_sampler, C) A grad log p, the learner being the current policy."""

    def term(o: Sequence, t: int) -> complex:
        return min(np.exp(o.logp_sg[t] - o.old[t]), cap) * o.advantage[t] * o.logp[t]

    return -token_mean(batch, term)


def truncated_importance_sampling(batch: Batch, cap: float) -> complex:
    """Yao et al.: min(pi_learner / pi_sampler, C) times PPO around the learner, at its first update."""

    def term(o: Sequence, t: int) -> complex:
        weight = min(np.exp(o.logp_sg[t]) / np.exp(o.old[t]), cap)
        return weight * clipped_objective(np.exp(o.logp[t] - o.logp_sg[t]), o.advantage[t], 0.2, 0.2)

    return -token_mean(batch, term)


def ppo_entropy(batch: Batch) -> complex:
    return ppo(batch) - 0.01 * token_mean(batch, lambda o, t: o.entropy[t])


def gspo(batch: Batch, low: float = 0.1, high: float = 0.15) -> complex:
    """GSPO, eqs. 5 and 7."""
    total = 0
    for o in batch:
        s = (np.exp(sum(o.logp)) / np.exp(sum(o.old))) ** (1 / len(o))
        total += clipped_objective(s, o.advantage[0], low, high)
    return -total / len(batch)


def gspo_token(batch: Batch) -> complex:
    """GSPO-token: s_it = sg[s_i] pi / sg[pi], advantages per token."""

    def term(o: Sequence, t: int) -> complex:
        s = np.exp(np.mean(o.logp_sg - o.old)) * np.exp(o.logp[t]) / np.exp(o.logp_sg[t])
        return clipped_objective(s, o.advantage[t], 0.1, 0.15)

    return -sequence_mean(batch, term)


def sequence_ppo(batch: Batch) -> complex:
    """PPO with a whole sequence as one action, and a KL penalty per token."""
    total = 0
    for o in batch:
        total += clipped_objective(np.exp(sum(o.logp - o.old)), o.advantage[0], 0.2, 0.2)
    return -total / len(batch) + 0.05 * sequence_mean(batch, k3)


def dpo(batch: Batch) -> complex:
    """DPO, eq. 7, beta 0.3; sequences 2i and 2i + 1 are chosen and rejected."""
    total = 0
    for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
        up, down = sum(chosen.logp - chosen.ref), sum(rejected.logp - rejected.ref)
        total += -np.log(sigmoid(0.3 * up - 0.3 * down))
    return total / (len(batch) // 2)
