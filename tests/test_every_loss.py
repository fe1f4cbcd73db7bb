"""Every loss that a config can name, over a tree: against the dense oracle, and against its paper in numpy.

Three answers to one random batch, in which each entry has values of its own:

    tree     `TreeEngine.value_and_grad`: chunks of 2 or 16 tokens, or all of them
    dense    `dta_jax.reference`: every sequence on its own, in float64; the loss's cotangents by `jax.grad`
    paper    `tests.papers`: the loss and its cotangents at the dense pass's numbers

A program of the tree engine takes seconds to compile and depends on the loss. So token losses run as one,
`Chosen`, which each entry tells which of them to take.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.composite_losses import AtProximal, BehaviourWeight, OffPolicy, Sum
from dta_jax.config import BUILDERS
from dta_jax.losses import (
    CISPO,
    NLL,
    SAPO,
    EntropyBonus,
    Entry,
    KLPenalty,
    PolicyGradient,
    PPOClip,
    TokenLoss,
    ValueClip,
)
from dta_jax.model import Numbers, Params
from dta_jax.reference import dense_value_and_grad
from dta_jax.sequence_losses import DPO, SequenceLoss, SequenceRatio, SequenceSum
from dta_jax.tree_engine import TreeEngine
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples
from dta_jax.value_model import ValueModel
from tests import papers
from tests.naive import random_sequences
from tests.papers import added, behaviour, clipped, gated, kept_within, of_ratio, squared_error
from tests.trees import CAPACITY, LONGEST, SLOTS, WHOLE, make_model

PROX = PPOClip(anchor="prox_logp")
FIRST = PPOClip(anchor="current")


def masked(metric: str, high: float, low: float | None = None) -> OffPolicy:
    return OffPolicy(PROX, BehaviourWeight(high, low, "mask", metric))


def masked_on_paper(kind: str, high: float, low: float = -np.inf) -> papers.Term:
    """Around KL(sampler || target): Schulman's ratio is target / sampler, the weight itself."""
    within = kept_within(low, high, lambda k: papers.divergence(kind, k))
    return behaviour(of_ratio(clipped(), "prox"), within)


def at_most(cap: float) -> Callable[[float], float]:
    return lambda k: min(k, cap)


# A loss of one token, and the paper's term.
OF_TOKENS: dict[str, tuple[TokenLoss, papers.Term]] = {
    "nll": (NLL(), papers.negative_log),
    "policy gradient": (PolicyGradient(), papers.policy_gradient),
    "ppo": (PPOClip(), of_ratio(clipped())),
    "ppo clip higher": (PPOClip(eps_high=0.28), of_ratio(clipped(0.2, 0.28))),
    "ppo dual clip": (PPOClip(dual_clip=1.5), of_ratio(clipped(dual=1.5))),
    "ppo unbounded": (PPOClip(1.0, np.inf), of_ratio(lambda r, a: -r * a)),
    "ppo prox": (PROX, of_ratio(clipped(), "prox")),
    "ppo current": (FIRST, of_ratio(clipped(), "logp_sg")),
    "cispo": (CISPO(eps_high=0.5), papers.clipped_weight(high=1.5)),
    "cispo both bounds": (CISPO(0.3, 0.2), papers.clipped_weight(0.7, 1.2)),
    "cispo prox": (CISPO(anchor="prox_logp"), papers.clipped_weight(high=5, anchor="prox")),
    "cispo current": (CISPO(anchor="current"), papers.policy_gradient),
    "sapo": (SAPO(), of_ratio(gated())),
    "sapo prox": (SAPO(0.5, 3.0, "prox_logp"), of_ratio(gated(0.5, 3.0), "prox")),
    "sapo current": (SAPO(anchor="current"), of_ratio(gated(), "logp_sg")),
    "kl k1": (KLPenalty(0.3, "k1"), added((0.3, papers.from_reference("k1")))),
    "kl k2": (KLPenalty(0.3, "k2"), added((0.3, papers.from_reference("k2")))),
    "kl k3": (KLPenalty(0.3), added((0.3, papers.from_reference("k3")))),
    "entropy bonus": (EntropyBonus(0.1), added((-0.1, papers.entropy))),
    "decoupled ppo": (
        OffPolicy(PROX, BehaviourWeight(1.2)),
        behaviour(of_ratio(clipped(), "prox"), at_most(1.2)),
    ),
    "decoupled ppo, no bound": (
        OffPolicy(PROX, BehaviourWeight(None)),
        behaviour(of_ratio(clipped(), "prox"), float),
    ),
    "decoupled cispo, two caps": (
        OffPolicy(CISPO(eps_high=0.5, anchor="prox_logp"), BehaviourWeight(1.4, 0.7)),
        behaviour(papers.clipped_weight(high=1.5, anchor="prox"), lambda k: max(min(k, 1.4), 0.7)),
    ),
    "decoupled sapo": (
        OffPolicy(SAPO(anchor="prox_logp"), BehaviourWeight(1.2)),
        behaviour(of_ratio(gated(), "prox"), at_most(1.2)),
    ),
    "truncated reinforce": (
        OffPolicy(PolicyGradient(), BehaviourWeight(1.1), "current"),
        behaviour(papers.policy_gradient, at_most(1.1), "logp_sg"),
    ),
    "truncated ppo": (
        OffPolicy(FIRST, BehaviourWeight(1.1), "current"),
        behaviour(of_ratio(clipped(), "logp_sg"), at_most(1.1), "logp_sg"),
    ),
    "icepop": (masked("ratio", 1.5, 0.5), behaviour(of_ratio(clipped(), "prox"), kept_within(0.5, 1.5))),
    "masked by k1": (masked("k1", 0.3), masked_on_paper("k1", 0.3)),
    "masked by k1, both sides": (masked("k1", 0.3, -0.3), masked_on_paper("k1", 0.3, -0.3)),
    "masked by k2": (masked("k2", 0.1), masked_on_paper("k2", 0.1)),
    "masked by k3": (masked("k3", 0.1), masked_on_paper("k3", 0.1)),
    "grpo": (
        Sum((PPOClip(), KLPenalty(0.04))),
        added((1, of_ratio(clipped())), (0.04, papers.from_reference())),
    ),
    "sum of everything": (
        Sum(
            (NLL(), PolicyGradient(), PPOClip(), CISPO(), SAPO(), masked("ratio", 1.5), KLPenalty(0.1),
             EntropyBonus(0.1), ValueClip(coef=0.5))
        ),
        added(
            (1, papers.negative_log), (1, papers.policy_gradient), (1, of_ratio(clipped())),
            (1, papers.clipped_weight(high=5)), (1, of_ratio(gated())),
            (1, behaviour(of_ratio(clipped(), "prox"), kept_within(0, 1.5))),
            (0.1, papers.from_reference()), (-0.1, papers.entropy), (1, squared_error(0.2, 0.5)),
        ),
    ),
    "value clip": (ValueClip(0.3, 0.5), squared_error(0.3, 0.5)),
    "value, no clip": (ValueClip(None), squared_error()),
    "first update of ppo": (AtProximal(PROX), of_ratio(clipped(), "logp_sg")),
    "first update of decoupled ppo": (
        AtProximal(OffPolicy(PROX, BehaviourWeight(1.2))),
        behaviour(of_ratio(clipped(), "logp_sg"), at_most(1.2), "logp_sg"),
    ),
    "first update of a sum": (
        AtProximal(Sum((masked("k2", 0.1), KLPenalty(0.2)))),
        added(
            (1, behaviour(of_ratio(clipped(), "logp_sg"),
                          kept_within(0, 0.1, lambda k: papers.divergence("k2", k)), "logp_sg")),
            (0.2, papers.from_reference()),
        ),
    ),
}  # fmt: skip
CRITICS = ["value clip", "value, no clip"]


def ratio(loss: papers.RatioLoss, **how: Any) -> papers.Loss:
    return partial(papers.sequence_ratio, loss=loss, **how)


def summed(*parts: papers.Loss) -> papers.Loss:
    return lambda batch: sum(part(batch) for part in parts)


def weighted(term: papers.Term) -> papers.Loss:
    return partial(papers.weighted, term=term)


GSPO = PPOClip(0.1, 0.15)
# A loss of whole sequences, or of pairs, and the paper's.
OF_SEQUENCES: dict[str, tuple[SequenceLoss, papers.Loss]] = {
    "gspo": (SequenceRatio(GSPO), ratio(clipped(0.1, 0.15))),
    "gspo token": (SequenceRatio(GSPO, credit="token"), ratio(clipped(0.1, 0.15), per_token=True)),
    "sequence ppo": (SequenceRatio(PPOClip(dual_clip=2.0), "sum"), ratio(clipped(dual=2.0), average=np.sum)),
    "sequence ppo, token credit": (
        SequenceRatio(PROX, "sum", "token"),
        ratio(clipped(), average=np.sum, anchor="prox", per_token=True),
    ),
    "sequence ppo, first update": (SequenceRatio(FIRST), ratio(clipped(), anchor="logp_sg")),
    "sequence sapo": (SequenceRatio(SAPO()), ratio(gated())),
    "sequence sapo, token credit": (
        SequenceRatio(SAPO(anchor="prox_logp"), credit="token"),
        ratio(gated(), anchor="prox", per_token=True),
    ),
    "dpo": (DPO(0.3), partial(papers.weighted_dpo, beta=0.3)),
    "dpo and sft": (
        SequenceSum((DPO(0.1), NLL())),
        summed(partial(papers.weighted_dpo, beta=0.1), weighted(papers.negative_log)),
    ),
    "gspo and everything": (
        SequenceSum(
            (SequenceRatio(GSPO), PolicyGradient(), PPOClip(), CISPO(), SAPO(), masked("ratio", 1.5),
             KLPenalty(0.1, "k2"), EntropyBonus(0.2))
        ),
        summed(
            ratio(clipped(0.1, 0.15)),
            weighted(added(
                (1, papers.policy_gradient), (1, of_ratio(clipped())), (1, papers.clipped_weight(high=5)),
                (1, of_ratio(gated())), (1, behaviour(of_ratio(clipped(), "prox"), kept_within(0, 1.5))),
                (0.1, papers.from_reference("k2")), (-0.2, papers.entropy),
            )),
        ),
    ),
}  # fmt: skip
LOSSES: dict[str, TokenLoss | SequenceLoss] = {n: l for n, (l, _) in (OF_TOKENS | OF_SEQUENCES).items()}
PAPERS: dict[str, papers.Loss] = {name: weighted(term) for name, (_, term) in OF_TOKENS.items()}
PAPERS |= {name: paper for name, (_, paper) in OF_SEQUENCES.items()}


def options(hint: Any) -> Iterator[Any]:
    """What a field may be, as far as it is countable: names, None, and classes."""
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in (tuple, typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from options(part)
    elif isinstance(hint, type):
        yield hint


def chosen_options(settings: Any) -> Iterator[tuple[type, str, Any]]:
    """(class, field, option) of a loss and of everything inside it."""
    if dataclasses.is_dataclass(settings):
        for f in dataclasses.fields(settings):
            value = getattr(settings, f.name)
            for one in value if isinstance(value, tuple) else [value]:
                yield type(settings), f.name, one if isinstance(one, str) else type(one)
                yield from chosen_options(one)


def test_every_loss_and_every_option_of_one_is_listed() -> None:
    """A loss is what says which values it reads."""
    losses = {c for c in BUILDERS.values() if isinstance(getattr(c, "required", None), property)}
    assert losses | {AtProximal} == {type(loss) for loss in LOSSES.values()}
    assert len(losses) > 10
    possible = {
        (cls, name, option)
        for cls in losses | {BehaviourWeight}
        for name, hint in typing.get_type_hints(cls).items()
        for option in options(hint)
        if option is not Ellipsis
    }
    assert possible <= {found for loss in LOSSES.values() for found in chosen_options(loss)}


@dataclass(frozen=True)
class Chosen:
    """For each entry, one of several token losses: the one that its `which` says."""

    losses: tuple[TokenLoss, ...]

    @property
    def required(self) -> tuple[str, ...]:
        return ("which", *(name for loss in self.losses for name in loss.required))

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return jax.lax.switch(entry["which"], self.losses, logp, entropy, entry)


@dataclass(frozen=True)
class Linear:
    """A loss of three given slopes."""

    def __call__(self, logp: jax.Array, entropy: jax.Array, entry: Entry) -> jax.Array:
        return entry["by_logp"] * logp + entry["by_entropy"] * entropy + entry["by_value"] * entry["value"]


class Dense(NamedTuple):
    """Loss, its cotangents [E] of every number, and its gradient."""

    loss: float
    cotangents: Numbers
    grads: Params


@functools.cache
def weights() -> Params:
    """A policy with a value head on its trunk, of which all other models here take their parts."""
    decoder, policy = make_model("float32", **SHAPE)
    model = ValueModel(decoder, with_policy=True)
    value = jax.random.normal(jax.random.key(1), (decoder.hidden_size,), jnp.float32)
    return jax.tree.map(np.asarray, model.from_policy(policy) | {"value": value})


SEEDS = 9, 56, 88  # their plans need few programs
SEED = {name: SEEDS[i % len(SEEDS)] for i, name in enumerate(LOSSES)}
ENTRIES = 48
SHAPE = {"vocab_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": False}
Trained = Literal["policy", "critic", "both"]


def model_and_params(trained: Trained, dtype: str) -> tuple[Any, Params]:
    decoder, policy = make_model(dtype, **SHAPE)
    model = decoder if trained == "policy" else ValueModel(decoder, with_policy=trained == "both")
    own = set(policy if trained == "policy" else model.from_policy(policy))
    parts = {name: part for name, part in weights().items() if name in own}
    return model, jax.tree.map(lambda a: jnp.asarray(a, dtype), parts)


@functools.cache
def batch(seed: int) -> Samples:
    """Ten sequences: some fork off others, two are duplicates, one is a prefix of another.

    Every entry has values of its own, near what the policy says, and a fifth have weight 0. All numbers are
    float32, so that both dtypes compute the same.
    """
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, 7, LONGEST, vocab=5)
    sequences.append(np.append(sequences[0][:1], rng.integers(0, 16, LONGEST - 1)).astype(np.int32))
    sequences += [sequences[-1], sequences[-1][: LONGEST // 2]]
    sequences = [s if len(s) > 1 else np.append(s, s).astype(np.int32) for s in sequences]
    places = np.array([(i, p) for i, s in enumerate(sequences) for p in range(1, len(s))], np.int32)
    first = places[:, 1] == 1  # no sequence without a loss
    sequence, position = places[np.argsort(rng.random(len(places)) + first)[-ENTRIES:]].T
    count = len(sequence)
    live = (rng.random(count) < 0.8) | (position == 1)
    values: dict[str, np.ndarray] = {
        "temperature": rng.uniform(0.6, 1.4, count),
        "weight": live * rng.uniform(0.1, 1, count) / count,
        "advantage": rng.normal(0, 1.5, count),
        "preference": np.where(sequence % 2 == 0, 1.0, -1.0),
    }
    samples = Samples(sequences, sequence, position, rounded(values))
    numbers = dense_pass(samples, Numbers(*np.zeros((3, count)))).numbers
    near = {f"{name}_logp": numbers.logp + rng.normal(0, 0.5, count) for name in ("old", "prox", "ref")}
    near |= {"return": numbers.value + rng.normal(0, 1, count)}
    near |= {"old_value": numbers.value + rng.normal(0, 0.5, count)}
    return dataclasses.replace(samples, values=samples.values | rounded(near))


def rounded(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32).astype(np.float64) for name, value in values.items()}


def dense_pass(samples: Samples, slopes: Numbers) -> Any:
    """The oracle's numbers, and the gradient of `sum_e slopes_e . numbers_e`."""
    values = {f"by_{name}": value for name, value in slopes._asdict().items()}
    values |= {"weight": np.ones(len(samples.sequence)), "temperature": samples.values["temperature"]}
    with jax.enable_x64(True):
        model, params = model_and_params("both", "float64")
        given = dataclasses.replace(samples, values=values)
        return dense_value_and_grad(model, params, given, Linear(), pad_to=16)


@functools.cache
def dense_numbers(seed: int) -> Numbers:
    samples = batch(seed)
    return dense_pass(samples, Numbers(*np.zeros((3, len(samples.sequence))))).numbers


def unit_of(loss: TokenLoss | SequenceLoss, samples: Samples) -> np.ndarray:
    """Sequences 2i and 2i + 1 are a pair."""
    return samples.sequence // 2 if "preference" in loss.required else samples.sequence


@functools.cache
def dense(name: str) -> Dense:
    loss, samples = LOSSES[name], batch(SEED[name])
    with jax.enable_x64(True):
        values = {field: jnp.asarray(value) for field, value in samples.values.items()}
        numbers = jax.tree.map(jnp.asarray, dense_numbers(SEED[name]))
        if isinstance(loss, TokenLoss):
            which = jnp.full(ENTRIES, list(OF_TOKENS).index(name), jnp.int32)
            found, slopes = sum_of_tokens(numbers, values | {"which": which})
        else:
            found, slopes = of_sequences(loss, numbers, values, jnp.asarray(unit_of(loss, samples)))
        slopes = jax.tree.map(np.asarray, slopes)
        return Dense(float(found), slopes, dense_pass(samples, slopes).grads)


@jax.jit
@jax.value_and_grad
def sum_of_tokens(numbers: Numbers, values: dict[str, jax.Array]) -> jax.Array:
    loss = Chosen(tuple(LOSSES[name] for name in OF_TOKENS))
    losses = jax.vmap(loss)(numbers.logp, numbers.entropy, values | {"value": numbers.value})
    return jnp.sum(values["weight"] * losses)


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1)
def of_sequences(loss: SequenceLoss, numbers: Numbers, values: dict, unit: jax.Array) -> jax.Array:
    return loss.batch_loss(numbers.logp, numbers.entropy, values, unit)


@functools.cache
def engine(trained: Trained, dtype: str, chunk_size: int) -> TreeEngine:
    return TreeEngine(model_and_params(trained, dtype)[0], chunk_size, "packed", SLOTS, CAPACITY)


def assert_tree_equals_dense(
    name: str, trained: Trained, dtype: str, chunk_size: int, *, relative: float
) -> None:
    loss = run = LOSSES[name]
    samples = batch(SEED[name])
    if isinstance(loss, TokenLoss):
        together = list(OF_TOKENS) if trained == "both" else CRITICS
        run = Chosen(tuple(LOSSES[other] for other in together))
        which = np.full(ENTRIES, together.index(name), np.int32)
        samples = dataclasses.replace(samples, values=samples.values | {"which": which})
    tree, params = engine(trained, dtype, chunk_size), model_and_params(trained, dtype)[1]
    found = tree.value_and_grad(params, samples, run, unit_of(loss, samples))
    expected, numbers = dense(name), dense_numbers(SEED[name])
    np.testing.assert_allclose(found.loss, expected.loss, rtol=relative, atol=relative)
    if trained != "critic":
        np.testing.assert_allclose(found.logp, numbers.logp, rtol=relative)
        np.testing.assert_allclose(found.entropy, numbers.entropy, rtol=relative)
    for part, grads in found.grads.items():
        for got, want in zip(*map(jax.tree.leaves, (grads, expected.grads[part])), strict=True):
            largest = np.abs(want).max()
            assert largest > 0 or part in ("value", "head")  # what the loss doesn't read
            assert np.abs(np.asarray(got, np.float64) - np.asarray(want)).max() <= relative * largest, part


CASES: list[tuple[str, Trained]] = [
    *((name, "both") for name in OF_TOKENS),
    *((name, "critic") for name in CRITICS),
    *((name, "policy") for name in OF_SEQUENCES),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_have_everything_that_a_tree_could_mix_up(seed: int) -> None:
    samples = batch(seed)
    trie = build_trie(samples.sequences)
    assert trie.num_rows < WHOLE
    rows = entry_rows(trie, samples.sequence, samples.position)
    shared = [np.flatnonzero(rows == row) for row in np.unique(rows) if (rows == row).sum() > 1]
    assert len(shared) > 5
    for name in ("advantage", "old_logp", "temperature", "weight"):
        assert all(
            len(np.unique(samples.values[name][at])) > 1
            for at in shared
            if samples.values["weight"][at].any()
        )
    assert len({tuple(s) for s in samples.sequences}) < len(samples.sequences)
    assert 0 < (samples.values["weight"] == 0).sum() < len(rows) / 2


@pytest.mark.parametrize("chunk_size", [2, 16, WHOLE])
@pytest.mark.parametrize(("name", "trained"), CASES)
def test_tree_equals_dense_in_float64(name: str, trained: Trained, chunk_size: int) -> None:
    with jax.enable_x64(True):
        assert_tree_equals_dense(name, trained, "float64", chunk_size, relative=1e-10)


@pytest.mark.parametrize(("name", "trained"), CASES)
def test_tree_equals_dense_in_float32(name: str, trained: Trained) -> None:
    dense(name)  # in float64
    assert_tree_equals_dense(name, trained, "float32", 16, relative=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_dense_equals_the_paper(name: str) -> None:
    """Loss and cotangents; a paper's batch has no tokens of weight 0."""
    samples, numbers = batch(SEED[name]), dense_numbers(SEED[name])
    live = samples.values["weight"] > 0
    given = {**samples.values, **numbers._asdict()}
    fields = ["logp", "entropy", "old_logp", "prox_logp", "ref_logp", "advantage", "weight"]
    fields += ["value", "return", "old_value"]
    of_sequence = [np.flatnonzero(live & (samples.sequence == i)) for i in range(len(samples.sequences))]
    of_paper = [papers.Sequence(*(given[field][at] for field in fields)) for at in of_sequence]
    order = np.concatenate(of_sequence)
    expected = dense(name)
    np.testing.assert_allclose(expected.loss, PAPERS[name](of_paper).real, rtol=1e-10)
    for number, slope in expected.cotangents._asdict().items():
        np.testing.assert_array_equal(slope[~live], 0)
        by_paper = papers.gradient(PAPERS[name], of_paper, number)
        np.testing.assert_allclose(slope[order], by_paper, rtol=1e-10, atol=1e-13, err_msg=number)
