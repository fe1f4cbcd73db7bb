"""Each row of docs/algorithms.md: its config lines make the loss, advantages and mean of its paper."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.advantages import group_normalized
from dta_jax.aggregation import aggregation_weights
from dta_jax.config import load_config
from dta_jax.losses import PPOClip
from dta_jax.model import Params
from dta_jax.objective import GAE, GroupNormalized, PreferencePairs, Returns
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.reference import dense_logits
from dta_jax.sequence_losses import DPO, SequenceLoss, entry_cotangents
from dta_jax.settings import Train
from dta_jax.tree_engine import TreeEngine
from dta_jax.types import Samples
from tests import papers
from tests.naive import random_sequences
from tests.test_losses import entries_of, total

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([^|]+) \| (`Train\.loss[^|]*) \|", re.MULTILINE)
LINES = {
    name: re.findall(r"`([^`]+)`", cell)
    for name, cell in ROW.findall((ROOT / "docs/algorithms.md").read_text())
}

# Rows that begin with how rewards are credited: what a token is worth differs, or there are no advantages.
CREDITED = {
    name: re.findall(r"`([^`]+)`", cell)
    for name, cell in re.findall(
        r"^\| ([^|]+) \| (`Train\.advantages[^|]*) \|",
        (ROOT / "docs/algorithms.md").read_text(),
        re.MULTILINE,
    )
}

Advantage = Callable[[np.ndarray], np.ndarray]  # of one group's rewards


def group_mean_and_std(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def group_mean(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


def others_mean(rewards: np.ndarray) -> np.ndarray:
    return np.array([r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)])


PAPERS: dict[str, tuple[papers.Loss, Advantage | None]] = {
    "SFT": (papers.nll, None),
    "REINFORCE": (papers.reinforce, group_mean),
    "RLOO": (papers.reinforce, others_mean),
    "PPO": (functools.partial(papers.ppo_dual_clip, c=3.0), group_mean_and_std),
    "decoupled PPO": (functools.partial(papers.decoupled_ppo, cap=5.0), group_mean_and_std),
    "GRPO": (papers.grpo, group_mean_and_std),
    "Dr. GRPO": (functools.partial(papers.dr_grpo, budget=4096), group_mean),
    "DAPO": (papers.dapo, group_mean_and_std),
    "GSPO": (functools.partial(papers.gspo, low=3e-4, high=4e-4), group_mean_and_std),
    "CISPO": (functools.partial(papers.cispo, cap=5.0), group_mean_and_std),
    "SAPO": (papers.sapo, group_mean_and_std),
    "truncated importance sampling": (
        functools.partial(papers.truncated_importance_sampling, cap=2.0),
        group_mean_and_std,
    ),
    "IcePop": (functools.partial(papers.icepop, low=0.5, high=5.0), group_mean_and_std),
    "entropy bonus": (papers.ppo_entropy, group_mean_and_std),
}
SHAPE = {
    "vocab_size": 7,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
WHOLE_BATCH = {"REINFORCE", "PPO"}  # one baseline for all groups
GROUPS = np.array([3, 8, 3, 8, 3, 8, 8])


@functools.cache
def settings(name: str) -> Train:
    return load_config(ROOT / "configs/offline.gin", LINES[name])


def rewarded_batch(name: str, rng: np.random.Generator) -> tuple[papers.Batch, np.ndarray]:
    """Ratios on both sides of this algorithm's bounds, and advantages as its paper makes them."""
    spread = 1e-3 if name == "GSPO" else 1.5
    batch, rewards = papers.random_batch(rng, (4, 1, 7, 2, 5, 6, 3)), rng.normal(size=7)
    advantage_of = PAPERS[name][1]
    for o in batch:
        o.old, o.prox, o.ref = (o.logp + spread * (x - o.logp) for x in (o.old, o.prox, o.ref))
    if advantage_of is not None:
        for group in [np.arange(7)] if name in WHOLE_BATCH else [np.flatnonzero(g == GROUPS) for g in (3, 8)]:
            for i, advantage in zip(group, advantage_of(rewards[group]), strict=True):
                batch[i].advantage = np.full(len(batch[i]), advantage)
    return batch, rewards


def test_the_table_and_the_papers_list_the_same_algorithms() -> None:
    assert list(LINES) == list(PAPERS)


@pytest.mark.parametrize(
    ("name", "loss", "credit"),
    [("PPO with a critic", PPOClip, GAE), ("REINFORCE++", PPOClip, Returns), ("DPO", DPO, PreferencePairs)],
)
def test_config_lines_make_the_credit(name: str, loss: type, credit: type) -> None:
    train = load_config(ROOT / "configs/offline.gin", CREDITED[name])
    assert (type(train.loss), type(train.advantages)) == (loss, credit)
    assert (train.critic is not None) == (credit is GAE)
    assert len(CREDITED) == 3


@pytest.mark.parametrize("name", PAPERS)
def test_config_lines_make_the_papers_loss_and_gradient(name: str, rng: np.random.Generator) -> None:
    train, (paper, advantage_of) = settings(name), PAPERS[name]
    batch, rewards = rewarded_batch(name, rng)
    samples, values, logp, entropy = entries_of(batch)
    assert (train.advantages is None) == (advantage_of is None)
    if isinstance(train.advantages, GroupNormalized):
        how = train.advantages
        advantages = group_normalized(
            rewards,
            GROUPS,
            mean=how.mean,
            std=how.std,
            leave_one_out=how.leave_one_out,
            unbiased=how.unbiased,
        )
        values["advantage"] = advantages[samples.sequence]
    weight = aggregation_weights(
        samples, train.aggregate.kind, divisor=train.aggregate.divisor, dtype=np.float64
    )
    expected = papers.gradient(paper, batch, "logp")
    with jax.enable_x64(True):
        if isinstance(train.loss, SequenceLoss):
            values["weight"] = weight
            value, slope, _ = entry_cotangents(train.loss, logp, entropy, values, samples.sequence)
        else:
            needed = {k: values[k] for k in train.loss.required}
            of_logp = functools.partial(
                total, train.loss, entropy=jnp.asarray(entropy), values=needed, weight=weight
            )
            value, slope = jax.value_and_grad(lambda logp: of_logp(logp))(jnp.asarray(logp))
    np.testing.assert_allclose(value, paper(batch).real, rtol=1e-10)
    np.testing.assert_allclose(slope, expected, rtol=1e-10, atol=1e-13)
    assert (expected != 0).any()


@functools.cache
def rollouts_on_a_tree() -> tuple[Qwen3, Params, Samples, list[np.ndarray], Callable]:
    """A tiny float64 model, eight sequences that share prefixes, and the dense pass through it.

    Each sequence has a temperature of its own; the last two are duplicates. The dense pass gives every
    entry's log-probability and entropy, and the vjp to the parameters.
    """
    rng = np.random.default_rng(3)
    model = Qwen3(Qwen3Config(**SHAPE, dtype="float64"))
    sequences = random_sequences(rng, 7, 12, vocab=4)
    sequences = [np.append(s, 1).astype(np.int32) for s in [*sequences, sequences[-1]]]
    chosen = [np.flatnonzero(rng.random(len(s) - 1) < 0.6) + 1 for s in sequences]
    chosen = [at if len(at) else np.array([1]) for at in chosen]
    temperature = np.repeat(rng.uniform(0.7, 1.3, 8), [len(at) for at in chosen])
    samples = Samples(
        sequences,
        np.repeat(np.arange(8), [len(at) for at in chosen]),
        np.concatenate(chosen),
        {"temperature": temperature},
    )
    padded = np.zeros((8, 13), np.int32)
    for row, s in zip(padded, sequences, strict=True):
        row[: len(s)] = s
    tokens = padded[samples.sequence, samples.position]

    def dense(params: Params) -> tuple[jax.Array, jax.Array]:
        logits = jax.vmap(lambda row: dense_logits(model, params, row))(jnp.asarray(padded))
        at = logits[samples.sequence, samples.position - 1] / jnp.asarray(temperature)[:, None]
        log_p = jax.nn.log_softmax(at)
        return log_p[np.arange(len(tokens)), tokens], -(jnp.exp(log_p) * log_p).sum(1)

    params = model.init(jax.random.key(0))
    (logp, entropy), to_params = jax.vjp(jax.jit(dense), params)
    return model, params, samples, [np.asarray(logp), np.asarray(entropy)], to_params


@pytest.mark.parametrize("name", PAPERS)
def test_tree_gradient_is_the_papers_on_every_sequence_alone(name: str) -> None:
    """Dense forward passes, the paper's loss and derivatives in numpy, dense backward; against the tree."""
    rng = np.random.default_rng(5)
    train, paper = settings(name), PAPERS[name][0]
    with jax.enable_x64(True):
        model, params, samples, (logp, entropy), to_params = rollouts_on_a_tree()
        spread = 1e-3 if name == "GSPO" else 0.5
        batch = []
        for i in range(8):
            l = logp[samples.sequence == i]
            near = [l + rng.normal(0, spread, len(l)) for _ in range(3)]
            batch.append(
                papers.Sequence(l, entropy[samples.sequence == i], *near, np.full(len(l), rng.normal()))
            )
        kind, divisor = train.aggregate.kind, train.aggregate.divisor
        values = dict(samples.values) | entries_of(batch)[1]
        values["weight"] = aggregation_weights(samples, kind, divisor=divisor, dtype=np.float64)
        engine = TreeEngine.for_batches(
            model, chunk_size=16, strategy="packed", longest=13, entries=len(logp)
        )
        found = engine.value_and_grad(
            params, dataclasses.replace(samples, values=values), train.loss, samples.sequence
        )
        cotangents = [jnp.asarray(papers.gradient(paper, batch, field)) for field in ("logp", "entropy")]
        (expected,) = to_params(tuple(cotangents))
        np.testing.assert_allclose(found.loss, paper(batch).real, rtol=1e-10)
        error = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found.grads, expected
        )
        assert max(jax.tree.leaves(error)) < 1e-10
