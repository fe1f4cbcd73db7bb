"""What the benchmark runs: rollouts turned into samples, and the useful work in them.

`model_flops` counts the work that a perfect implementation of a method would do, so that a method's time
can be judged against its own work: no recomputation, no padding.
"""

from __future__ import annotations

import jax
import numpy as np

from dta_jax.errors import InputError
from dta_jax.model import DecoderModel, Params
from dta_jax.rollouts import Rollouts
from dta_jax.types import Samples, Trie

MOST_THINKING = 1_000_000  # tokens
RESERVED_IDS = 256  # ids that only inserted thinking uses


def with_thinking(
    samples: Samples, mean: float, first_id: int, *, seed: int = 0, sigma: float = 0.5
) -> Samples:
    """Inserts before every completion its own run of random ids, absent from later turns.

    That is the shape of rollouts whose earlier thinking is stripped from the prompt: every completion
    becomes a leaf of its own. Lengths are lognormal with the given mean; ids are drawn from
    `[first_id, first_id + RESERVED_IDS)`. The run has loss, as the model produced it.

    Args:
      samples: one completion per sequence: the entries of each are its last tokens.
      mean: mean length of a run, tokens, above 0.
      first_id: the first id that nothing else uses.
      seed: of lengths and ids.
      sigma: standard deviation of the logarithm of the lengths.

    Returns:
      Samples without values: every entry that is new would lack them.
    """
    if not 0 < mean <= MOST_THINKING:
        raise InputError("--thinking", "MEAN", expected=f"above 0, at most {MOST_THINKING}", actual=mean)
    rng = np.random.default_rng(seed)
    count = len(samples.sequences)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).round().clip(1).astype(np.int64)
    start = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(start, samples.sequence, samples.position.astype(np.int64))
    sequences = []
    for tokens, at, length in zip(samples.sequences, start.tolist(), lengths.tolist(), strict=True):
        run = rng.integers(first_id, first_id + RESERVED_IDS, length)
        sequences.append(np.concatenate([tokens[:at], run, tokens[at:]]).astype(np.int32))
    stop = np.array([len(s) for s in sequences])
    size = stop - start
    sequence = np.repeat(np.arange(count), size)
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(size) - size, size) + start[sequence]
    return Samples(sequences, sequence.astype(np.int32), position.astype(np.int32))


def rollouts_vocab(rollouts: Rollouts) -> int:
    """The smallest vocabulary that holds every id."""
    return int(rollouts.tokens.max(initial=0)) + 1


def sequence_work(lengths: np.ndarray) -> tuple[int, int]:
    """Tokens and visible query-key pairs of sequences that are computed one by one; lengths int[N]."""
    n = lengths.astype(np.int64)
    return int(n.sum()), int((n * (n + 1) // 2).sum())


def tree_work(trie: Trie) -> tuple[int, int]:
    """Tokens and visible query-key pairs of a trie: every row sees its ancestors and itself."""
    return trie.num_rows, int(trie.depth.sum(dtype=np.int64)) + trie.num_rows


def model_flops(model: DecoderModel, params: Params, tokens: int, pairs: int, loss_tokens: int) -> int:
    """Useful floating-point operations of a loss and its gradient.

    6 x matrix parameters of the layers x tokens, 12 x L x H x head_dim x visible pairs, and
    6 x D x V x loss tokens for the LM head.

    Args:
      model, params: shapes only are read.
      tokens: tokens that go through the layers.
      pairs: visible query-key pairs.
      loss_tokens: E.
    """
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if len(leaf.shape) >= 3)
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * pairs
    return 6 * matrices * tokens + attention + 6 * model.hidden_size * model.vocab_size * loss_tokens
