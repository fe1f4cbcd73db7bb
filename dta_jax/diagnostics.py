"""What one step's arrays say about the training: numbers for `metrics.jsonl`, what is not finite.

All is computed on the host, in float64, from arrays that a step returns anyway. An entry counts once per
sequence that it has loss in; entries whose weight is 0 do not count. Divergences are k3 estimates (never
negative, see `losses.KLPenalty`) at tokens that the sampler drew.

    r   the ratio that the loss clips, exp(l - anchor); of the whole unit for a sequence ratio
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dta_jax.composite_losses import OffPolicy, Sum
from dta_jax.errors import writing
from dta_jax.losses import CISPO, SAPO, PolicyLoss, PPOClip, TokenLoss
from dta_jax.mesh_plan import MeshPlan
from dta_jax.sequence_losses import SequenceLoss, SequenceRatio, SequenceSum
from dta_jax.types import Samples, Schedule

EXP_LIMIT = 50.0  # exponents are capped, so that every number stays finite
STALENESS_BINS = 8  # versions 0 .. 6 behind, and all that are further


def policy_diagnostics(
    loss: TokenLoss | SequenceLoss,
    logp: np.ndarray,
    entropy: np.ndarray,
    values: Mapping[str, np.ndarray],
    unit: np.ndarray | None = None,
) -> dict[str, float]:
    """How far the policy is from where the step began, from its sampler and from its reference.

    Args:
      loss: the run's loss; its policy part says which ratio is clipped, and where.
      logp, entropy: float[E], under the weights before the update.
      values: the entries' values; those that are there decide what is reported.
      unit: int[E], what a sequence loss couples.

    Returns:
      always: `logp_mean`, `entropy_mean`.
      a loss with a ratio: `ratio_mean`, `ratio_max`.
      PPO's clip: `clip_fraction_low`, `_high`, `_dual`, the entries that a bound stops (A < 0 and r below, A
      > 0 and r above, A < 0 and r past the dual clip).
      old_logp: `kl_behaviour`, of the sampler from the policy.
      ref_logp: `kl_reference`, of the policy from the reference.
      prox_logp and old_logp: `mismatch_mean`, `mismatch_max` of |prox - old|, and `kl_mismatch`.
      a behaviour weight: `behaviour_weight_mean`, and `behaviour_bounded_fraction`, the entries whose weight
      was capped or masked.
    """
    live = np.asarray(values["weight"]) > 0 if "weight" in values else np.ones(len(logp), bool)
    if not live.any():
        return {}
    l, h = (np.asarray(x, np.float64)[live] for x in (logp, entropy))
    v = {name: np.asarray(x, np.float64)[live] for name, x in values.items()}
    metrics = {"logp_mean": l.mean(), "entropy_mean": h.mean()}
    policy, correction, sequence_ratio = _parts(loss)
    if isinstance(policy, PPOClip | CISPO | SAPO):
        log_ratio = np.zeros_like(l) if policy.anchor == "current" else l - v[policy.anchor]
        if sequence_ratio is not None:
            assert unit is not None
            log_ratio = _per_unit(log_ratio, np.asarray(unit)[live], sequence_ratio.reduce)
        ratio = _exp(log_ratio)
        metrics |= {"ratio_mean": ratio.mean(), "ratio_max": ratio.max()}
        metrics |= _clip_fractions(policy, ratio, v["advantage"])
    if "old_logp" in v:
        metrics["kl_behaviour"] = _k3(v["old_logp"] - l)
    if "ref_logp" in v:
        metrics["kl_reference"] = _k3(l - v["ref_logp"])
    if "prox_logp" in v and "old_logp" in v:
        mismatch = v["prox_logp"] - v["old_logp"]
        metrics |= {"mismatch_mean": np.abs(mismatch).mean(), "mismatch_max": np.abs(mismatch).max()}
        metrics["kl_mismatch"] = _k3(-mismatch)
    if correction is not None:
        target = l if correction.target == "current" else v["prox_logp"]
        d = target - v["old_logp"]
        weight = correction.weight.sequence_weights(d, np.arange(len(d)))
        metrics["behaviour_weight_mean"] = weight.mean()
        metrics["behaviour_bounded_fraction"] = (~np.isclose(weight, _exp(d), rtol=1e-9)).mean()
    return {name: float(x) for name, x in metrics.items()}


def reward_diagnostics(
    rewards: np.ndarray, advantages: np.ndarray, group_ids: np.ndarray
) -> dict[str, float]:
    """Mean, deviation and extremes of rewards [R] and advantages [R or E]; groups without signal."""
    metrics = {}
    for name, x in (("reward", rewards), ("advantage", advantages)):
        x = np.asarray(x, np.float64)
        for what, reduced in (("mean", x.mean()), ("std", x.std()), ("min", x.min()), ("max", x.max())):
            metrics[f"{name}_{what}"] = float(reduced)
    metrics["advantage_zero_fraction"] = float(np.mean(np.asarray(advantages) == 0))
    order = np.argsort(group_ids, kind="stable")
    starts = np.flatnonzero(np.diff(np.asarray(group_ids)[order], prepend=np.nan))
    spread = np.maximum.reduceat(rewards[order], starts) - np.minimum.reduceat(rewards[order], starts)
    metrics["uniform_group_fraction"] = float(np.mean(spread == 0))
    return metrics


def staleness_diagnostics(versions: np.ndarray, current: int) -> dict[str, Any]:
    """How many updates old each entry's sampler was: `current - versions`.

    Args:
      versions: int[E], the weights' version that sampled each entry's token.
      current: the version that is being updated.

    Returns:
      `staleness_mean`, `staleness_max`, and `staleness_histogram`: entries of age 0, 1, ...; the last bin
      also holds everything older.
    """
    age = current - np.asarray(versions, np.int64)
    bins = np.bincount(np.clip(age, 0, STALENESS_BINS - 1), minlength=STALENESS_BINS)
    return {
        "staleness_mean": float(age.mean()),
        "staleness_max": int(age.max()),
        "staleness_histogram": bins.tolist(),
    }


def token_diagnostics(samples: Samples, schedule: Schedule | MeshPlan) -> dict[str, int]:
    """Tokens counted four ways: in all sequences, in their tree, executed (padding too), with loss."""
    return {
        "flat_tokens": sum(len(s) for s in samples.sequences),
        "tree_tokens": schedule.trie.num_rows,
        "executed_tokens": schedule.backward_tokens_executed + schedule.forward_tokens_executed,
        "loss_tokens": len(samples.sequence),
    }


@dataclass(frozen=True)
class NonFinite:
    """What is not finite in a step.

    Attributes:
      tensors: names of scalars, entries' arrays and gradients.
      sequences: those whose entries are not.
    """

    tensors: list[str]
    sequences: list[int]

    def __str__(self) -> str:
        where = f"sequences {_few(self.sequences)}" if self.sequences else "no single sequence's entries"
        return f"not finite: {_few(self.tensors)}; seen in {where}"


def find_non_finite(
    samples: Samples, *, scalars: Mapping[str, float], entries: Mapping[str, np.ndarray], grads: Any
) -> NonFinite | None:
    """What is not finite if one of `scalars` is not; None if all are.

    Gradients and entries are looked at only when a scalar (the loss, the gradient's norm) says so.

    Args:
      samples: what the numbers are of.
      scalars: the step's loss and gradient norm, by name.
      entries: arrays [E] of the step, such as logp, entropy and each entry's loss.
      grads: the gradients, any pytree.
    """
    bad = [name for name, value in scalars.items() if not np.isfinite(value)]
    if not bad:
        return None
    wrong = np.zeros(len(samples.sequence), bool)
    for name, array in entries.items():
        here = ~np.isfinite(array)
        wrong |= here
        bad += [name] if here.any() else []
    bad += non_finite_tensors(grads)
    return NonFinite(bad, np.unique(samples.sequence[wrong]).tolist())


def non_finite_tensors(tree: Any) -> list[str]:
    """Paths of the leaves of a pytree that hold NaN or infinity."""
    finite = jax.device_get(jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))
    return [jax.tree_util.keystr(path) for path, good in jax.tree.leaves_with_path(finite) if not good]


def save_replay(path: Path, samples: Samples) -> None:
    """Writes a batch to an `.npz`, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.asarray(s, np.int32) for s in samples.sequences]),
        "lengths": np.array([len(s) for s in samples.sequences], np.int64),
        "sequence": samples.sequence,
        "position": samples.position,
    } | {f"values/{name}": value for name, value in samples.values.items()}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, path)


def load_replay(path: str | os.PathLike[str]) -> Samples:
    """The batch that `save_replay` wrote."""
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        values = {name.removeprefix("values/"): file[name] for name in file if name.startswith("values/")}
        return Samples(np.split(file["tokens"], ends), file["sequence"], file["position"], values)


def _parts(
    loss: Any,
) -> tuple[PolicyLoss | None, OffPolicy | None, SequenceRatio | None]:
    """The first policy loss inside a loss, and the correction and the sequence ratio that it stands in."""
    if isinstance(loss, Sum | SequenceSum):
        found = (_parts(term) for term in loss.terms)
        return next((parts for parts in found if parts[0] is not None), (None, None, None))
    if isinstance(loss, OffPolicy):
        return loss.loss, loss, None
    if isinstance(loss, SequenceRatio):
        return loss.loss, None, loss
    return (loss if isinstance(loss, PolicyLoss) else None), None, None


def _clip_fractions(policy: PolicyLoss, ratio: np.ndarray, advantage: np.ndarray) -> dict[str, float]:
    if not isinstance(policy, PPOClip):
        return {}
    down, up = advantage < 0, advantage > 0
    past_dual = down & (ratio > policy.dual_clip) if policy.dual_clip is not None else np.zeros_like(down)
    return {
        "clip_fraction_low": (down & (ratio < 1 - policy.eps_low)).mean(),
        "clip_fraction_high": (up & (ratio > 1 + policy.eps_high)).mean(),
        "clip_fraction_dual": past_dual.mean(),
    }


def _per_unit(x: np.ndarray, unit: np.ndarray, reduce: str) -> np.ndarray:
    ids = np.unique(unit, return_inverse=True)[1]
    total = np.bincount(ids, x)
    return (total / np.bincount(ids) if reduce == "mean" else total)[ids]


def _k3(d: np.ndarray) -> float:
    return float((_exp(-d) - 1 + d).mean())


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(x, EXP_LIMIT))


def _few(items: list[Any], most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
