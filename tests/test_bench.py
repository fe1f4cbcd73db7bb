"""The benchmark's contract: what it counts, what it prints, what it refuses."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import bench, workload
from dta_jax.errors import InputError
from dta_jax.lm_head import LMHead, evaluate_block, pull_block
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.reference import recomputed_numbers
from dta_jax.rollouts import save_rollouts
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from dta_jax.types import Samples

GOLDEN = Path(__file__).parent / "golden" / "qwen3_tied"
FIELDS = {
    "method", "chunk", "seconds", "model_flops", "sequences", "flat_tokens", "tree_tokens", "loss_tokens",
    "backward_tokens_executed", "forward_tokens_executed", "backs", "pushes", "peak_bytes",
}  # fmt: skip
MODEL = (
    '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,'
    ' "head_dim": 8, "intermediate_size": 16}'
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rollouts.npz"
    spec = SyntheticRollouts(vocab_size=32, tasks=2, trials=2, system_tokens=20, completion_tokens=8)
    save_rollouts(path, generate_rollouts(spec))
    return path


def rows(capsys, *arguments):
    bench.main([*map(str, arguments), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_plan_only_prints_one_object_per_method_and_chunk(capsys, file):
    arguments = ("--rollouts", file, "--model", MODEL, "--methods", "dense,leafized,packed,branch")
    found = rows(capsys, *arguments, "--chunk", "8,16", "--plan-only")
    assert [(r["method"], r["chunk"]) for r in found] == [
        ("dense", None), ("leafized", None), ("packed", 8), ("packed", 16), ("branch", 8), ("branch", 16),
    ]  # fmt: skip
    for row in found:
        assert set(row) == FIELDS
        assert row["seconds"] is None
        assert row["backward_tokens_executed"] >= (
            row["flat_tokens"] if row["method"] == "dense" else row["tree_tokens"]
        )
    dense, leafized, packed = found[0], found[1], found[2]
    assert dense["model_flops"] > leafized["model_flops"] > packed["model_flops"]
    assert len({(r["flat_tokens"], r["tree_tokens"], r["loss_tokens"]) for r in found}) == 1


def test_methods_are_timed_and_agree_with_the_oracle(capsys, file):
    arguments = ("--rollouts", file, "--tasks", "0", "--model", MODEL, "--repeat", "1", "--check")
    found = rows(capsys, *arguments, "--methods", "dense,leafized,packed", "--chunk", "16")
    assert [set(r) for r in found] == [FIELDS | {"grad_rel_err"}] * 3
    for row in found:
        assert row["seconds"] > 0
        assert row["peak_bytes"] > 0
        assert row["grad_rel_err"] < 2e-5


def test_thinking_makes_every_completion_a_leaf(capsys, file):
    base, thinking = (
        rows(capsys, "--rollouts", file, "--model", MODEL, "--methods", "packed", "--plan-only", *extra)[0]
        for extra in ((), ("--thinking", "30"))
    )
    assert thinking["tree_tokens"] > base["tree_tokens"] + 15 * base["sequences"]
    tokens = [np.arange(6, dtype=np.int32), np.arange(9, dtype=np.int32)]
    samples = Samples(tokens, np.array([0, 0, 1, 1]), np.array([4, 5, 7, 8]))
    changed = workload.with_thinking(samples, 5.0, first_id=100, seed=3)
    again = workload.with_thinking(samples, 5.0, first_id=100, seed=3)
    for i, (sequence, start) in enumerate(zip(changed.sequences, (4, 7), strict=True)):
        np.testing.assert_array_equal(sequence, again.sequences[i])
        assert sequence[:start].tolist() == tokens[i][:start].tolist()
        assert (sequence[start:-2] >= 100).all()
        assert sequence[-2:].tolist() == tokens[i][-2:].tolist()
        supervised = changed.position[changed.sequence == i]
        assert supervised.tolist() == list(range(start, len(sequence)))
    trie = build_trie(changed.sequences)
    assert (trie.subtree_end[trie.tail] == trie.tail + 1).all()


def test_model_flops_by_hand():
    """Two layers of 3 matrices; one query sees one key, the next two."""
    model = Qwen3(Qwen3Config())
    params = {"layers": {"w": np.zeros((2, 4, 5)), "norm": np.zeros((2, 4))}}
    got = workload.model_flops(model, params, tokens=7, pairs=3, loss_tokens=2)
    assert got == 6 * 40 * 7 + 12 * 2 * 4 * 16 * 3 + 6 * 64 * 512 * 2
    trie = build_trie([[1, 2], [1, 3]])
    assert workload.tree_work(trie) == (3, 1 + 2 + 2)
    assert workload.sequence_work(np.array([2, 2])) == (4, 2 * (1 + 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "fast"), "--methods: name: expected one of dense, dense_remat, leafized, "),
        (("--chunk", "x"), "--chunk: value: expected integers with commas; got 'x'"),
        (("--tasks", "a-b"), "--tasks: value: expected like 0-3 or 0,2,5; got 'a-b'"),
        (("--tasks", "7"), "7"),
        (("--repeat", "0"), "--repeat: value: expected at least 1; got 0"),
        (("--thinking", "0"), "--thinking: MEAN: expected above 0, at most 1000000; got 0.0"),
        (("--thinking", "inf"), "--thinking: MEAN: expected above 0, at most 1000000; got inf"),
        (("--vocab-mod", "0"), "vocab_mod: expected 1 to 2147483647; got 0"),
        (("--tasks", "3-0"), "completion_spans: expected tokens with loss; got none"),
        (("--model", str(GOLDEN), "--thinking", "5"), "--model: vocab_size: expected at least 288; got 48"),
        (("--model", "giant"), "--model: value: expected a folder, a JSON object, or one of tiny, "),
        (("--model", "{nonsense"), "--model: JSON: expected config fields as in config.json; got "),
        (("--model", '{"width": 3}'), "--model: JSON: expected config fields as in config.json; got "),
        (("--model", '{"vocab_size": 3}'), "--model: vocab_size: expected at least 32; got 3"),
        (("--rollouts", "absent.npz"), "absent.npz"),
    ],
)
def test_bad_arguments_are_one_clear_line(file, arguments, message):
    with pytest.raises(InputError) as error:
        bench.main(["--rollouts", str(file), "--plan-only", *arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_head_blocks_equal_autodiff(rng):
    """Log-probability and entropy with temperatures: values and vjp against plain jax.grad, in float64."""
    with jax.enable_x64(True):
        h, head = jnp.asarray(rng.normal(size=(6, 5))), jnp.asarray(rng.normal(size=(9, 5)))
        token = jnp.asarray(rng.integers(0, 9, 6), jnp.int32)
        temperature = jnp.asarray(rng.uniform(0.5, 2, 6))
        cotangents = tuple(jnp.asarray(rng.normal(size=6)) for _ in range(2))

        def plain(h, head):
            log_p = jax.nn.log_softmax(h @ head.T / temperature[:, None])
            return log_p[jnp.arange(6), token], -(jnp.exp(log_p) * log_p).sum(axis=1)

        want, vjp = jax.vjp(plain, h, head)

        def in_blocks(h, head):
            return recomputed_numbers(LMHead(), {"head": head}, h, token, temperature)[:2]

        got, pull = jax.vjp(in_blocks, h, head)
        for a, b in zip((*got, *pull(cotangents)), (*want, *vjp(cotangents)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
        block = evaluate_block(h, head, token, temperature)
        nothing = pull_block(block, h, head, token, temperature, jnp.zeros(6), jnp.zeros(6))
        assert all((np.asarray(a) == 0).all() for a in nothing)
