"""Drawing tokens: the distribution drawn from, its log-probabilities, and what a draw depends on."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.errors import InputError
from dta_jax.generation.sampling import draw, seed_words

VOCABULARY, ROWS = 7, 64
CASES = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 3, 1.0),
    (1.0, 0, 0.6),
    (1.3, 4, 0.7),
    (0.7, 1, 0.5),
    (1.0, 99, 0.01),
]
compiled_draw = jax.jit(draw)


def kept_logprobs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Log-probability of every token, -inf for those not kept; written from the definition, one at a time."""
    z = logits.astype(np.float64) / temperature
    likeliest_first = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if top_k:
        likeliest_first = likeliest_first[:top_k]
    p = np.exp(z[likeliest_first] - z.max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token, probability in zip(likeliest_first, p, strict=True):
        if mass >= top_p and top_p < 1:
            break
        kept.append(token)
        mass += probability
    result = np.full(len(z), -np.inf)
    result[kept] = z[kept] - np.logaddexp.reduce(z[kept])
    return result


def draw_rows(logits, cases, seeds=None, index=None):
    """One draw per row; logits [R, V], cases [R] of (temperature, top_k, top_p)."""
    count = len(logits)
    temperature, top_k, top_p = (np.array(column) for column in zip(*cases, strict=True))
    seeds = range(count) if seeds is None else seeds
    index = np.zeros(count, np.int32) if index is None else np.asarray(index, np.int32)
    token, logp = compiled_draw(
        np.asarray(logits, np.float32),
        np.stack([seed_words(seed) for seed in seeds]),
        index,
        temperature.astype(np.float32),
        top_k.astype(np.int32),
        top_p.astype(np.float32),
    )
    return np.asarray(token), np.asarray(logp)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_logprobs_are_of_the_kept_set(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)
    cases = [(rng.uniform(0.2, 3), rng.integers(0, VOCABULARY + 2), rng.uniform(0.05, 1)) for _ in logits]
    token, logp = draw_rows(logits, cases, seeds=rng.integers(0, 2**63, ROWS).tolist())
    want = np.array([kept_logprobs(row, *case)[t] for row, case, t in zip(logits, cases, token, strict=True)])
    np.testing.assert_allclose(logp, want, atol=1e-5)  # -inf where a token was drawn that is not kept


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_the_distribution(case, rng):
    logits = rng.normal(0, 1.5, VOCABULARY)
    count = 4096
    token, _ = draw_rows(np.tile(logits, (count, 1)), [case] * count)
    p = np.exp(kept_logprobs(logits, *case))
    error = np.bincount(token, minlength=VOCABULARY) / count - p
    assert (np.abs(error) <= 4.5 * np.sqrt(p * (1 - p) / count)).all()


def test_steps_of_one_request_are_independent(rng):
    """Pairs of subsequent draws have the product's frequencies."""
    count, logits = 4096, np.zeros((4096, 3))
    first, _ = draw_rows(logits, [(1.0, 0, 1.0)] * count)
    second, _ = draw_rows(logits, [(1.0, 0, 1.0)] * count, index=np.ones(count))
    pairs = np.bincount(3 * first + second, minlength=9) / count
    assert np.abs(pairs - 1 / 9).max() < 4.5 * np.sqrt(8 / 81 / count)


def test_a_draw_depends_on_seed_and_step_only(rng):
    logits, order = rng.normal(0, 2, (ROWS, VOCABULARY)), rng.permutation(ROWS)
    cases = [CASES[i % len(CASES)] for i in range(ROWS)]
    seeds, index = rng.integers(0, 2**63, ROWS).tolist(), rng.integers(0, 99, ROWS)
    token, logp = draw_rows(logits, cases, seeds, index)
    moved_token, moved_logp = draw_rows(
        logits[order], [cases[i] for i in order], [seeds[i] for i in order], index[order]
    )
    np.testing.assert_array_equal(moved_token, token[order])
    np.testing.assert_array_equal(moved_logp, logp[order])


def test_both_halves_of_a_seed_count():
    logits = np.zeros((3, 1000))
    token, _ = draw_rows(logits, [(1.0, 0, 1.0)] * 3, seeds=[5, 5 + 2**32, 2**64 - 1])
    assert len(set(token.tolist())) == 3


def test_temperature_zero_takes_the_likeliest_with_logprob_zero(rng):
    logits = rng.normal(0, 1, (ROWS, VOCABULARY))
    token, logp = draw_rows(logits, [(0.0, 0, 1.0)] * (ROWS - 1) + [(0.0, 2, 0.5)])
    np.testing.assert_array_equal(token, logits.argmax(axis=1))
    np.testing.assert_array_equal(logp, 0)


def test_of_equal_tokens_the_lower_id_is_kept():
    token, logp = draw_rows(np.zeros((ROWS, VOCABULARY)), [(1.0, 2, 1.0)] * ROWS)
    assert set(token.tolist()) == {0, 1}
    np.testing.assert_allclose(logp, -np.log(2), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_do_not_pass_for_a_draw(temperature):
    logits = np.zeros((2, VOCABULARY))
    logits[0, 3] = np.nan
    _, logp = draw_rows(logits, [(temperature, 0, 1.0)] * 2)
    np.testing.assert_array_equal(np.isfinite(logp), [False, True])


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(InputError, match=r"generate: seed: expected 0 to 2\^64 - 1"):
        seed_words(seed)
