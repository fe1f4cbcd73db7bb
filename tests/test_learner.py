"""One step: scores before it, minibatches and epochs in it, a critic beside it, a reference behind it."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.composite_losses import AtProximal, BehaviourWeight, OffPolicy, Sum
from dta_jax.errors import InputError
from dta_jax.guards import Watch
from dta_jax.hf_weights import save_folder
from dta_jax.learner import Learner
from dta_jax.loop import run_training
from dta_jax.losses import KLPenalty, PolicyGradient, PPOClip, ValueClip
from dta_jax.metrics import read_metrics, read_steps
from dta_jax.objective import GAE, Aggregate, GroupNormalized, PreferencePairs, Returns, Rewards, credited
from dta_jax.prepare import Run, prepare
from dta_jax.qwen3 import Qwen3
from dta_jax.sequence_losses import DPO, SequenceRatio
from dta_jax.settings import AdamW, Checkpoints, Critic, HuggingFaceModel, SequenceCorrection, Train
from dta_jax.tree_engine import TreeEngine
from tests.test_live import SYNCHRONOUS
from tests.test_train import MODEL, PPO, numbers

DECOUPLED = OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(high=5.0))
WITH_CRITIC = dataclasses.replace(
    PPO, advantages=GAE(lam=0.9), critic=Critic(AdamW(3e-3)), optimizer=AdamW(1e-3), batch_groups=3
)
MODEL_PARAMS = jax.eval_shape(Qwen3(MODEL).init, jax.random.key(0))


def change(train: Train, **changes: object) -> Train:
    return dataclasses.replace(train, **changes)


def run(train: Train, out: Path) -> list[dict]:
    return read_steps(out, run_training(prepare(train), out, ""))


def watch(prepared: Run, out: Path) -> Watch:
    return Watch(prepared.train.guards, out)


def gradient(learner: Learner, samples, unit) -> list[np.ndarray]:
    params = learner.starting_params()
    found = learner.engine.value_and_grad(params, samples, learner.train.loss, unit)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found.grads)]


def with_credit(prepared, batch):
    values = batch.samples.values | credited(batch, prepared.train.objective)
    return dataclasses.replace(batch, samples=dataclasses.replace(batch.samples, values=values))


def test_minibatches_add_up_to_the_batch():
    prepared = prepare(change(PPO, loss=PolicyGradient(), batch_groups=3, minibatches=3))
    batch = with_credit(prepared, prepared.source.batch(1))
    planned = prepared.learner.plan(batch)
    assert len(planned.parts) == 3
    whole = gradient(prepared.learner, batch.samples, batch.unit)
    parts = [gradient(prepared.learner, part.samples, part.unit) for part in planned.parts]
    for one, several in zip(whole, map(sum, zip(*parts, strict=True)), strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=2e-6 * np.abs(one).max())


def test_minibatches_and_epochs_update_as_often_as_they_say(tmp_path):
    train = change(PPO, batch_groups=3, minibatches=2, epochs=3, steps=2, optimizer=AdamW(1e-2))
    rows = run(train, tmp_path)
    assert [row["updates"] for row in rows] == [6, 6]
    once = run(change(train, epochs=1, minibatches=1), tmp_path / "once")
    assert rows[0]["loss_tokens"] == once[0]["loss_tokens"]
    assert rows[0]["tree_tokens"] > once[0]["tree_tokens"]  # what both minibatches share
    assert rows[0]["executed_tokens"] >= 3 * once[0]["executed_tokens"]
    assert once[0]["ratio_max"] == 1
    assert rows[0]["ratio_max"] > 1.001
    assert rows[1]["loss"] < once[1]["loss"] - 1e-3


def test_the_learning_rate_counts_updates(tmp_path):
    optimizer = AdamW(1e-3, warmup_steps=9)
    rows = run(change(PPO, batch_groups=3, minibatches=2, epochs=2, steps=2, optimizer=optimizer), tmp_path)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-4, 5e-4], rel=1e-5)


@pytest.mark.parametrize("train", [PPO, change(PPO, minibatches=2, batch_groups=3, loss=DECOUPLED)])
def test_the_first_ratio_of_every_step_is_exactly_one(tmp_path, train):
    row = run(change(train, steps=1, optimizer=AdamW(1e-30)), tmp_path)[0]
    assert (row["ratio_mean"], row["ratio_max"]) == (1, 1)


@pytest.mark.parametrize(
    ("loss", "forward"), [(DECOUPLED, 0), (SequenceRatio(PPOClip(anchor="prox_logp")), 1)]
)
def test_a_proximal_policy_costs_no_pass_of_its_own(tmp_path, monkeypatch, loss, forward):
    prepared = prepare(change(PPO, loss=loss, batch_groups=3))
    planned = prepared.learner.plan(
        prepared.source.batch(1, {"old_logp": np.full(prepared.source.rollouts.tokens.size, -3, np.float32)})
    )
    passes = []
    forward_pass = TreeEngine.forward
    monkeypatch.setattr(TreeEngine, "forward", lambda *args: passes.append(1) or forward_pass(*args))
    _, row = prepared.learner.update(
        prepared.learner.starting_state(), 1, planned, None, watch(prepared, tmp_path)
    )
    assert len(passes) == forward
    assert row["ratio_max"] == 1
    assert row["mismatch_max"] > 0.1


def test_at_the_proximal_policy_a_loss_is_what_it_is_with_prox_logp():
    entry = {"advantage": jnp.float32(-1.5), "old_logp": jnp.float32(-2.0)}
    logp, entropy = jnp.float32(-1.2), jnp.float32(0.0)
    assert AtProximal(DECOUPLED).required == ("advantage", "old_logp")

    def given(l):
        return DECOUPLED(l, entropy, entry | {"prox_logp": jnp.float32(-1.2)})

    def at(l):
        return AtProximal(DECOUPLED)(l, entropy, entry)

    assert at(logp) == given(logp)
    assert jax.grad(at)(logp) == jax.grad(given)(logp) != 0


def test_a_critic_learns_and_is_restored(tmp_path):
    train = change(WITH_CRITIC, steps=8, checkpoints=Checkpoints(every=4, keep=9))
    rows = run(train, tmp_path)
    assert rows[-1]["critic_loss"] < 0.8 * rows[0]["critic_loss"]
    assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-3)  # values begin at 0
    assert rows[-1]["explained_variance"] > 0.05
    assert rows[0]["advantage_mean"] == pytest.approx(0, abs=1e-6)
    resumed = tmp_path / "resumed"
    run(change(train, steps=4), resumed)
    assert numbers(run(train, resumed)) == numbers(rows[4:])
    assert numbers(read_metrics(resumed / "metrics.jsonl")) == numbers(rows)


def test_a_value_head_on_the_policy_learns_with_it(tmp_path):
    loss = Sum((PPOClip(), ValueClip(eps=None, coef=0.5)))
    train = change(WITH_CRITIC, critic=None, loss=loss, steps=8, optimizer=AdamW(3e-3))
    rows = run(train, tmp_path)
    assert rows[0]["ratio_max"] == 1
    assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-3)  # values begin at 0
    assert rows[-1]["explained_variance"] > 0.05
    prepared = prepare(train)
    state = prepared.learner.starting_state()
    assert state.policy.params["value"].shape == (MODEL.hidden_size,)
    assert prepared.learner.decoder_params(state).keys() == MODEL_PARAMS.keys()
    with pytest.raises(
        InputError, match="Train: critic: expected a critic, or ValueClip in the loss, not both"
    ):
        change(train, critic=Critic())


def test_only_the_critic_learns_while_it_warms_up(tmp_path):
    critic = dataclasses.replace(WITH_CRITIC.critic, warmup_steps=1)
    prepared = prepare(change(WITH_CRITIC, critic=critic))
    learner, state = prepared.learner, prepared.learner.starting_state()
    before = jax.tree.map(np.asarray, state)
    old = {"old_logp": np.full(prepared.source.rollouts.tokens.size, -4.0, np.float32)}
    for step, still in ((1, True), (2, False)):
        planned = learner.plan(prepared.source.batch(step, old))
        state, row = learner.update(state, step, planned, None, watch(prepared, tmp_path))
        same = [
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (before.policy, state.policy)), strict=True)
        ]
        assert all(same) == still
        assert (row["updates"], row["critic_grad_norm"] > 0) == (1, True)
        assert ("loss" in row, "grad_norm" in row, "kl_behaviour" in row) == (not still, not still, True)
    assert not np.array_equal(before.critic.params["value"], state.critic.params["value"])


def test_a_critic_and_gae_go_together():
    with pytest.raises(InputError, match="Train: critic: expected a critic, or ValueClip in the loss"):
        change(PPO, advantages=GAE())
    with pytest.raises(InputError, match="Train: critic: expected None without GAE"):
        change(PPO, critic=Critic())
    assert WITH_CRITIC.critic.loss == ValueClip()


def test_dpo_learns_to_prefer(tmp_path):
    train = change(
        PPO,
        loss=DPO(beta=0.5),
        advantages=PreferencePairs(),
        aggregate=Aggregate("sequence_mean"),
        batch_groups=3,
        steps=8,
        optimizer=AdamW(1e-2),
    )
    rows = run(train, tmp_path)
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert rows[-1]["loss"] < 0.6


def test_a_reference_of_its_own_is_read_once_and_kept(tmp_path):
    params = Qwen3(MODEL).init(jax.random.key(9))
    save_folder(tmp_path / "other", MODEL, params)
    loss = Sum((PPOClip(), KLPenalty(0.1)))
    train = change(
        PPO, loss=loss, reference=HuggingFaceModel(str(tmp_path / "other"), dtype="float32"), steps=1
    )
    row = run(train, tmp_path / "out")[0]
    assert row["kl_reference"] > 1e-4
    assert row["ratio_max"] == 1
    kept = np.load(tmp_path / "out" / "reference_logp.npy")
    start = np.load(tmp_path / "out" / "starting_logp.npy")
    assert np.nanmax(np.abs(kept - start)) > 1e-3
    with pytest.raises(InputError, match="Train: reference: expected None"):
        change(train, loss=PPOClip())


@pytest.mark.parametrize("live", [False, True])
def test_a_reference_that_has_changed_is_refused_on_resume(tmp_path, live):
    folder = tmp_path / "other"
    vocab = dataclasses.replace(MODEL, vocab_size=32) if live else MODEL
    save_folder(folder, vocab, Qwen3(vocab).init(jax.random.key(9)))
    base = SYNCHRONOUS if live else change(PPO, batch_groups=1)
    reference = HuggingFaceModel(str(folder), dtype="float32")
    train = change(base, loss=Sum((PPOClip(), KLPenalty(0.1))), reference=reference, steps=1)
    run(train, tmp_path / "out")
    shutil.rmtree(folder)
    save_folder(folder, vocab, Qwen3(vocab).init(jax.random.key(10)))
    more = change(train, steps=2)  # on a batch that the reference has not seen
    message = (
        r"other: weights: expected the reference weights that .*/1 began with; got others; .*--allow-changes"
    )
    with pytest.raises(InputError, match=message):
        run(more, tmp_path / "out")
    assert len(run_training(prepare(more), tmp_path / "out", "", allow_changes=True)) == 1


def test_what_rounds_otherwise_is_told_on_resume(tmp_path):
    run(change(PPO, steps=1), tmp_path)
    file = tmp_path / "checkpoints" / "1" / "run" / "metadata"
    file.write_text(file.read_text().replace('"chunk_size": 64', '"chunk_size": 32'))
    message = "checkpoints/1: chunk_size: 32 when the run began, now 64: from here on .* up to rounding only"
    with pytest.warns(UserWarning, match=message):
        run(change(PPO, steps=2), tmp_path)


def test_kl_in_the_reward_needs_no_kl_in_the_loss(tmp_path):
    train = change(
        PPO,
        loss=PolicyGradient(),
        advantages=Returns(),
        rewards=Rewards(kl_coef=0.1),
        steps=3,
        batch_groups=3,
    )
    rows = run(train, tmp_path)
    assert rows[0]["kl_reference"] == 0
    assert rows[2]["kl_reference"] > 0


def test_sequence_corrections_weigh_advantages(tmp_path):
    masked = SequenceCorrection(BehaviourWeight(high=1e-9, mode="mask"), unit="rollout")
    row = run(change(PPO, sequence_correction=masked, steps=1), tmp_path)[0]
    assert row["advantage_zero_fraction"] == 1
    assert row["grad_norm"] == 0
    within = SequenceCorrection(BehaviourWeight(high=2.0), unit="rollout")
    row = run(change(PPO, sequence_correction=within, steps=1), tmp_path / "within")[0]
    plain = run(change(PPO, steps=1), tmp_path / "plain")[0]
    assert row["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)  # prox is old in a first step


def test_a_batch_of_equal_rewards_changes_nothing_but_the_step(tmp_path):
    train = change(PPO, advantages=GroupNormalized(skip_equal=False), steps=1)
    prepared = prepare(train)
    rollouts = prepared.source.rollouts
    equal = dataclasses.replace(
        prepared.source, rollouts=dataclasses.replace(rollouts, reward=np.ones_like(rollouts.reward))
    )
    old = {"old_logp": np.full(rollouts.tokens.size, -4.0, np.float32)}
    _, row = prepared.learner.update(
        prepared.learner.starting_state(),
        1,
        prepared.learner.plan(equal.batch(1, old)),
        None,
        watch(prepared, tmp_path),
    )
    assert (row["grad_norm"], row["uniform_group_fraction"]) == (0, 1)
