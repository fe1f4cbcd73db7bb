"""Rollouts on devices of their own: the trainer sees the samplers' numbers, and both work at once."""

import asyncio
import time

import jax
import numpy as np
import pytest

from dta_jax.errors import InputError
from dta_jax.generation.device import SamplerDevice
from dta_jax.generation.local import LocalSampler, generate_all
from dta_jax.generation.protocol import Sampling
from dta_jax.generation.spread import SpreadGenerator
from dta_jax.learner import Learner
from dta_jax.loop import run_training
from dta_jax.metrics import read_steps
from dta_jax.placement import training_devices
from dta_jax.prepare import prepare
from dta_jax.sharding import MeshShape
from tests.mesh.runs import on_devices_apart
from tests.test_live import AHEAD, SYNCHRONOUS
from tests.trees import make_model

SIX = MeshShape(6, 1)


def apart(train, devices=(6, 7), mesh=SIX):
    return on_devices_apart(train, devices, mesh)


@pytest.fixture
def used(monkeypatch):
    """The devices that the samplers drew on."""
    found, run = [], SamplerDevice.run

    def noted(self, *work):
        found.append(self._device)
        return run(self, *work)

    monkeypatch.setattr(SamplerDevice, "run", noted)
    return found


@pytest.mark.parametrize(("devices", "mesh"), [((6, 7), SIX), ((1,), MeshShape(1, 1))])
def test_the_trainer_sees_the_samplers_log_probabilities(devices, mesh, tmp_path, used):
    rows = read_steps(tmp_path, run_training(prepare(apart(SYNCHRONOUS, devices, mesh)), tmp_path, ""))
    assert {device.id for device in used} == set(devices)
    assert len(rows) == SYNCHRONOUS.steps
    for row in rows:
        assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert row["kl_behaviour"] < 1e-8


def test_the_mesh_is_made_of_the_other_devices():
    train = apart(SYNCHRONOUS, (2, 5))
    assert [device.id for device in training_devices(train)] == [0, 1, 3, 4, 6, 7]
    state = prepare(train).learner.starting_state()
    places = {device.id for leaf in jax.tree.leaves(state.policy.params) for device in leaf.devices()}
    assert places == {0, 1, 3, 4, 6, 7}


def test_sampling_and_training_overlap(tmp_path, monkeypatch):
    """The groups that new weights allow are sampled while the next update runs."""
    run, update = SamplerDevice.run, Learner.update
    updating, drawn_meanwhile = [False], []

    def slow_run(self, *work):
        time.sleep(0.1)
        drawn_meanwhile.append(updating[0])
        return run(self, *work)

    def slow_update(self, *args, **options):
        updating[0] = True
        result = update(self, *args, **options)
        time.sleep(0.5)
        updating[0] = False
        return result

    monkeypatch.setattr(SamplerDevice, "run", slow_run)
    monkeypatch.setattr(Learner, "update", slow_update)
    rows = read_steps(tmp_path, run_training(prepare(apart(AHEAD)), tmp_path, ""))
    assert any(drawn_meanwhile)
    assert max(row["staleness_max"] for row in rows) == 1


def make_two():
    model, params = make_model(vocab_size=12)
    settings = LocalSampler(rows=4, max_context=64, prefill_chunk=8, decode_steps=4)
    devices = jax.devices()[2:4]
    two = SpreadGenerator([settings.make(model, params, device=device) for device in devices], 4)
    return settings.make(model, params), two


def test_two_samplers_draw_what_one_draws_and_share_the_work(used):
    one, two = make_two()
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 3, 9, 9, 5, 5)]
    want, found = (generate_all(g, prompts, Sampling(9), range(6)) for g in (one, two))
    for a, b in zip(want, found, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert {device.id for device in used} == {0, 2, 3}
    with pytest.raises(InputError, match="version: expected above 0"):
        asyncio.run(two.update_weights({}, 0))


def test_groups_and_conversations_stay_together():
    _, two = make_two()
    first, second = two._generators
    prompt, other = np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32)[::-1]

    async def play():
        group = [two.generate(prompt, Sampling(2), seed=seed) for seed in range(3)]
        group.append(two.generate(other, Sampling(2), seed=0))
        answers = await asyncio.gather(*group)
        assert (first.counters.completions, second.counters.completions) == (3, 1)
        turn = np.concatenate([other, answers[-1].tokens, np.array([1, 2], np.int32)])
        await two.generate(turn, Sampling(2), seed=1)
        await two.close()

    asyncio.run(play())
    assert (first.counters.completions, second.counters.completions) == (3, 2)
    assert second.counters.reused_tokens == 10  # all of its context but the token drawn last


def test_a_call_that_would_wait_goes_elsewhere():
    _, two = make_two()
    prompt = np.arange(9, dtype=np.int32)
    generate_all(two, [prompt] * 8, Sampling(4), range(8))
    assert [one.counters.completions for one in two._generators] == [4, 4]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ((8,), r"devices: expected numbers of devices, 1 to 7; got 8"),
        ((0, 1), r"devices: expected None or different numbers, at least 1 \(device 0 trains\)"),
        ((3, 3), "devices: expected None or different numbers"),
    ],
)
def test_devices_that_cannot_be_set_apart(devices, text):
    with pytest.raises(InputError, match=text):
        prepare(apart(SYNCHRONOUS, devices))
