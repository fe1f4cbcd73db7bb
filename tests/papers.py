"""Losses as the papers write them: numpy, one sequence after the other, loops and minima spelled out.

Nothing here is shared with the package. A batch is a list of sequences; each has arrays over its own
tokens with loss. Log-probabilities may be complex, and comparisons look at real parts, so that `gradient` can
take the complex step, which is exact to rounding. What a paper detaches is read from `logp_sg`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Sequence:
    """One sampled sequence o_i: arrays over its tokens; `advantage` may differ from token to token.

    `weight` is for sums that are no means; `value`, `target` and `old_value` (v, R and v_old) for critics.
    """

    logp: np.ndarray
    entropy: np.ndarray
    old: np.ndarray
    prox: np.ndarray
    ref: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray = field(default_factory=lambda: np.zeros(0))
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))
    target: np.ndarray = field(default_factory=lambda: np.zeros(0))
    old_value: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self.logp_sg = self.logp.copy()

    def __len__(self) -> int:
        return len(self.logp)


Batch = list[Sequence]
Loss = Callable[[Batch], complex]
Term = Callable[[Sequence, int], complex]  # of one token
RatioLoss = Callable[[complex, float], complex]  # of a ratio and an advantage


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


def token_mean(batch: Batch, term: Term) -> complex:
    return sum(term(o, t) for o in batch for t in range(len(o))) / sum(len(o) for o in batch)


def sequence_mean(batch: Batch, term: Term) -> complex:
    return sum(sum(term(o, t) for t in range(len(o))) / len(o) for o in batch) / len(batch)


def weighted(batch: Batch, term: Term) -> complex:
    return sum(o.weight[t] * term(o, t) for o in batch for t in range(len(o)))


def clipped_objective(r: complex, a: float, low: float, high: float) -> complex:
    """PPO, eq. 7, with the two bounds of DAPO, eq. 10."""
    return smaller(r * a, clip(r, 1 - low, 1 + high) * a)


def clipped(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> RatioLoss:
    """PPO's loss; with `dual`, Ye et al.'s: max(objective, c A) where A < 0."""

    def loss(r: complex, a: float) -> complex:
        objective = clipped_objective(r, a, low, high)
        return -(larger(objective, dual * a) if dual is not None and a < 0 else objective)

    return loss


def gated(tau_positive: float = 1.0, tau_negative: float = 1.05) -> RatioLoss:
    """SAPO's loss."""

    def loss(r: complex, a: float) -> complex:
        tau = tau_positive if a > 0 else tau_negative
        return -sigmoid(tau * (r - 1)) * 4 / tau * a

    return loss


def of_ratio(loss: RatioLoss, anchor: str = "old") -> Term:
    """`loss` of pi / pi_anchor; the anchor "logp_sg" is the policy itself."""
    return lambda o, t: loss(np.exp(o.logp[t] - getattr(o, anchor)[t]), o.advantage[t])


def negative_log(o: Sequence, t: int) -> complex:
    return -o.logp[t]


def policy_gradient(o: Sequence, t: int) -> complex:
    return -o.advantage[t] * o.logp[t]


def clipped_weight(low: float = 0.0, high: float = np.inf, anchor: str = "old") -> Term:
    """CISPO, MiniMax-M1: -sg(clip(ratio, low, high)) A log p."""

    def term(o: Sequence, t: int) -> complex:
        weight = clip(np.exp(o.logp_sg[t]) / np.exp(getattr(o, anchor)[t]), low, high)
        return -weight * o.advantage[t] * o.logp[t]

    return term


def divergence(kind: str, r: complex) -> complex:
    """Schulman's estimators of KL[q, p] at q's samples, r = p / q."""
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}[kind]


def from_reference(kind: str = "k3") -> Term:
    """KL[pi, pi_ref], estimated; k3 is GRPO's eq. 4."""
    return lambda o, t: divergence(kind, np.exp(o.ref[t] - o.logp[t]))


def behaviour(term: Term, bounded: Callable[[float], float], target: str = "prox") -> Term:
    """Hilton et al.: pi_target / pi_behaviour, `bounded`, times the token's loss."""
    return lambda o, t: bounded(np.exp(getattr(o, target)[t]) / np.exp(o.old[t])) * term(o, t)


def kept_within(low: float, high: float, metric: Callable[[float], float] = float) -> Callable:
    """IcePop's M: the weight where its metric is within bounds, else 0."""
    return lambda k: k if low <= metric(k) <= high else 0.0


def squared_error(eps: float | None = None, coef: float = 1.0) -> Term:
    """PPO's critic as implemented: the larger of two squares, in one of which v moves at most eps."""

    def term(o: Sequence, t: int) -> complex:
        v, v_old, target = o.value[t], o.old_value[t], o.target[t]
        plain = (v - target) ** 2
        if eps is None:
            return coef * plain / 2
        return coef * larger(plain, (v_old + clip(v - v_old, -eps, eps) - target) ** 2) / 2

    return term


def added(*terms: tuple[float, Term]) -> Term:
    return lambda o, t: sum(coef * term(o, t) for coef, term in terms)


def entropy(o: Sequence, t: int) -> complex:
    return o.entropy[t]


def nll(batch: Batch) -> complex:
    return token_mean(batch, negative_log)


def reinforce(batch: Batch) -> complex:
    """Sampled E[A grad log p(o)], the probability of a sequence being the product of its tokens'."""
    return -sum(o.advantage[0] * sum(o.logp) for o in batch) / len(batch)


def ppo(batch: Batch) -> complex:
    return token_mean(batch, of_ratio(clipped()))


def ppo_dual_clip(batch: Batch, c: float = 1.5) -> complex:
    return token_mean(batch, of_ratio(clipped(dual=c)))


def grpo(batch: Batch) -> complex:
    """GRPO, eq. 3, beta 0.04."""
    return sequence_mean(batch, added((1, of_ratio(clipped())), (0.04, from_reference())))


def grpo_k1(batch: Batch) -> complex:
    return ppo(batch) + 0.3 * token_mean(batch, lambda o, t: o.logp[t] - o.ref[t])


def grpo_k2(batch: Batch) -> complex:
    return ppo(batch) + 0.3 * token_mean(batch, lambda o, t: 0.5 * (o.logp[t] - o.ref[t]) ** 2)


def dr_grpo(batch: Batch, budget: int = 16) -> complex:
    """GRPO without the length in the denominator; a fixed budget of tokens in its place."""
    term = of_ratio(clipped())
    return sum(term(o, t) / budget for o in batch for t in range(len(o))) / len(batch)


def dapo(batch: Batch) -> complex:
    """DAPO, eq. 8 with the bounds of eq. 10."""
    return token_mean(batch, of_ratio(clipped(high=0.28)))


def cispo(batch: Batch, cap: float = 1.5) -> complex:
    """MiniMax-M1: sg(clipped ratio) A log p; no lower bound."""
    return token_mean(batch, clipped_weight(high=cap))


def sapo(batch: Batch) -> complex:
    return sequence_mean(batch, of_ratio(gated()))


def decoupled_ppo(batch: Batch, cap: float = 1.2) -> complex:
    """Hilton et al.: pi_prox / pi_behaviour times PPO around pi_prox; the first factor capped."""
    return token_mean(batch, behaviour(of_ratio(clipped(), "prox"), lambda k: min(k, cap)))


def icepop(batch: Batch, low: float = 0.5, high: float = 1.5) -> complex:
    """A token takes part if pi_train / pi_infer is within bounds."""
    return token_mean(batch, behaviour(of_ratio(clipped(), "prox"), kept_within(low, high)))


def truncated_reinforce(batch: Batch, cap: float = 1.1) -> complex:
    """Yao et al.: min(pi_learner / pi_sampler, C) A grad log p, the learner being the current policy."""
    return token_mean(batch, behaviour(policy_gradient, lambda k: min(k, cap), "logp_sg"))


def truncated_importance_sampling(batch: Batch, cap: float) -> complex:
    """Yao et al.: min(pi_learner / pi_sampler, C) times PPO around the learner, at its first update."""
    first = of_ratio(clipped(), "logp_sg")
    return token_mean(batch, behaviour(first, lambda k: min(k, cap), "logp_sg"))


def ppo_entropy(batch: Batch) -> complex:
    return ppo(batch) - 0.01 * token_mean(batch, entropy)


def sequence_ratio(
    batch: Batch,
    loss: RatioLoss,
    average: Callable[[np.ndarray], complex] = np.mean,
    anchor: str = "old",
    per_token: bool = False,
) -> complex:
    """GSPO's ratios, under any loss of a ratio, and weighted: s_i, or `per_token` GSPO-token's s_it."""
    total = 0
    for o in batch:
        start = getattr(o, anchor)
        for t in range(len(o)):
            s = np.exp(average((o.logp_sg if per_token else o.logp) - start))
            if per_token:
                s = s * np.exp(o.logp[t]) / np.exp(o.logp_sg[t])
            total += o.weight[t] * loss(s, o.advantage[t])
    return total


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
    return -total / len(batch) + 0.05 * sequence_mean(batch, from_reference())


def preference(chosen: Sequence, rejected: Sequence, beta: float) -> complex:
    """DPO, eq. 7, of one pair."""
    up, down = sum(chosen.logp - chosen.ref), sum(rejected.logp - rejected.ref)
    return -np.log(sigmoid(beta * up - beta * down))


def dpo(batch: Batch, beta: float = 0.3) -> complex:
    """The mean over pairs; sequences 2i and 2i + 1 are chosen and rejected."""
    pairs = zip(batch[::2], batch[1::2], strict=True)
    return sum(preference(*pair, beta) for pair in pairs) / (len(batch) // 2)


def weighted_dpo(batch: Batch, beta: float = 0.3) -> complex:
    """A pair's weight is that of all its tokens."""
    pairs = zip(batch[::2], batch[1::2], strict=True)
    return sum((sum(a.weight) + sum(b.weight)) * preference(a, b, beta) for a, b in pairs)
