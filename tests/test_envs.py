"""Environments: what they ask, what they pay, and that the quickstart's game is the right size."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.envs.bandit import Bandit
from dta_jax.envs.game import MOVES, RULES, VOCABULARY, TreasureHunt, encode, oracle, render
from dta_jax.envs.protocol import Answer, Environment, Episode
from dta_jax.errors import InputError


def said(*tokens):
    return Answer(np.array(tokens, np.int32), None, truncated=False)


def play(environment, task, policy):
    """One episode of a token environment: (tokens, which of them the policy said, steps)."""

    async def episode():
        running = environment.episode(task, seed=0)
        assert isinstance(running, Episode)
        tokens, chosen = [], []
        steps = [await running.start()]
        while steps[-1].observation is not None:
            tokens += steps[-1].observation.tokens.tolist()
            answer = policy(np.array(tokens, np.int32))
            chosen += [False] * (len(tokens) - len(chosen)) + [True] * len(answer)
            tokens += list(answer)
            steps.append(await running.step(said(*answer)))
        await running.close()
        return tokens, chosen, steps

    return asyncio.run(episode())


def reward(steps):
    return sum(step.reward for step in steps) + steps[-1].final_reward


def anything(rng, among):
    return lambda tokens: [int(rng.integers(among))]


# --- bandit


def test_bandit_pays_for_the_best_arm():
    bandit = Bandit(contexts=3, arms=4, prompt_tokens=5, other_reward=0.25, seed=1)
    assert isinstance(bandit, Environment)
    assert (bandit.num_tasks, bandit.vocab_size) == (3, 8)
    arms = range(4, 8)
    for task in range(3):
        best = bandit.best_arm(task)
        for token in range(8):
            tokens, _, steps = play(bandit, task, lambda _, token=token: [token, 0])
            assert tokens[:5] == [0, 0, 0, 0, 1 + task]
            assert reward(steps) == (1.0 if token == best else 0.25 if token in arms else 0.0)
            assert steps[-1].info == {"best": float(token == best)}
    assert reward(play(bandit, 0, lambda _: [])[2]) == 0


def test_bandit_has_different_best_arms():
    bandit = Bandit(contexts=32)
    assert {bandit.best_arm(task) for task in range(32)} == set(range(33, 37))


# --- the game


def test_an_episode_of_the_game():
    game = TreasureHunt(size=5, turns=4, nearest=2)
    task = 5
    tokens, chosen, steps = play(game, task, lambda tokens: oracle(tokens).tolist())
    assert tokens[: len(RULES.split())] == encode(RULES).tolist()
    assert reward(steps) == pytest.approx(1)
    assert [chosen[i] for i in range(len(tokens)) if tokens[i] < 4].count(True) == len(steps) - 1
    (row, column), _ = game.cells(task)
    lines = render(tokens, chosen).split("\n")
    assert lines[0] == RULES
    assert lines[1].startswith(f"you {row + 1} {column + 1} treasure ")
    assert len(lines) == len(steps)
    assert lines[-1].split()[-1] in {move.upper() for move in MOVES}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 6), st.integers(0, 63), st.integers(0, 3))
def test_the_oracle_always_finds_the_treasure(size, turns, task, seed):
    game = TreasureHunt(size=size, turns=turns, nearest=1, seed=seed)
    _, _, steps = play(game, task, lambda tokens: oracle(tokens).tolist())
    assert reward(steps) == pytest.approx(1)
    assert steps[-1].info["found"] == 1
    assert steps[-1].stop_reason == "done"
    (row, column), (goal_row, goal_column) = game.cells(task)
    assert len(steps) - 1 == abs(row - goal_row) + abs(column - goal_column) <= turns


def test_moves_pay_what_they_bring():
    game = TreasureHunt(size=9, turns=6, nearest=6)
    away = {"north": "south", "south": "north", "west": "east", "east": "west"}

    def contrary(tokens):
        return encode(away[VOCABULARY[oracle(tokens)[0]]])

    steps = play(game, 0, contrary)[2]
    assert {step.reward for step in steps[1:]} <= {-1 / 6, 0.0}  # 0: against the edge
    assert reward(steps) < 0
    assert steps[-1].stop_reason == "out of turns"
    silent = play(game, 0, lambda _: [len(VOCABULARY) - 1])[2]
    assert reward(silent) == 0
    assert silent[-1].info == {"found": 0.0, "moves": 6.0, "lost_turns": 6.0}
    assert play(game, 0, lambda _: [])[2][-1].info["lost_turns"] == 6
    wordy = play(game, 0, lambda tokens: [31, *oracle(tokens).tolist(), 0])[2]
    assert reward(wordy) == pytest.approx(1)


def test_the_game_is_hard_for_chance_and_short(rng):
    game = TreasureHunt()
    assert isinstance(game, Environment)
    assert 16 <= game.vocab_size <= 40
    for among in (game.vocab_size, len(MOVES)):
        played = [play(game, task % game.num_tasks, anything(rng, among)) for task in range(256)]
        assert np.mean([reward(steps) for _, _, steps in played]) < 0.25
        assert all(30 <= len(tokens) <= 80 for tokens, _, _ in played)


def test_tasks_share_the_rules_and_trials_the_first_turn(rng):
    game = TreasureHunt()
    first = [play(game, 3, anything(rng, 32))[0][: len(RULES.split()) + 4] for _ in range(4)]
    assert all(tokens == first[0] for tokens in first)
    assert len({game.cells(task) for task in range(game.num_tasks)}) > game.num_tasks / 2
    assert [game.cells(t) for t in range(8)] != [TreasureHunt(seed=1).cells(t) for t in range(8)]


def test_rendering_shows_unknown_ids_and_keeps_rules_on_one_line():
    assert render([0, 99]) == "north <99>"
    assert "\n" not in render(encode(RULES))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Bandit(arms=1), "Bandit: arms: expected at least 2; got 1"),
        (lambda: Bandit(other_reward=1), "Bandit: other_reward: expected at least 0, below 1; got 1"),
        (lambda: Bandit().episode(8, 0), "Bandit: task: expected 0 to 7; got 8"),
        (lambda: TreasureHunt(size=10), "TreasureHunt: size: expected 2 to 9; got 10"),
        (
            lambda: TreasureHunt(turns=2),
            "TreasureHunt: nearest: expected 1 to 2 (no treasure is further away); got 3",
        ),
        (lambda: TreasureHunt().episode(-1, 0), "TreasureHunt: task: expected 0 to 63; got -1"),
        (lambda: encode("north up"), "TreasureHunt: word: expected one of its vocabulary; got 'up'"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(InputError) as error:
        make()
    assert str(error.value) == text
