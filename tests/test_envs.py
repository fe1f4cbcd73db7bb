"""Environments: what they ask, what they pay, and that the quickstart's game is the right size."""

import asyncio
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_jax.envs.bandit import Bandit
from dta_jax.envs.game import MOVES, RULES, VOCABULARY, TreasureHunt, encode, oracle, render
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.envs.on_ray import OnRay
from dta_jax.envs.packages import require
from dta_jax.envs.protocol import Answer, Environment, Episode
from dta_jax.envs.reasoning import ReasoningGym, extract_answer
from dta_jax.envs.reasoning import _questions as questions
from dta_jax.envs.tool_calls import parse_answer, render_call
from dta_jax.errors import InputError
from dta_jax.settings import LiveRollouts


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


# --- the package reasoning-gym


class Sums:
    """Stands for the package: its datasets make and score questions in the same way."""

    def __init__(self, size, seed, terms=2):
        if terms < 2:
            raise ValueError("terms must be at least 2")
        self.terms = [np.random.default_rng([seed, i]).integers(9, size=terms).tolist() for i in range(size)]

    def __getitem__(self, task):
        return {"question": "+".join(map(str, self.terms[task])), "answer": str(sum(self.terms[task]))}

    def score_answer(self, answer, entry):
        if answer == "boom":
            raise ZeroDivisionError("a verifier's fault")
        return 1.0 if answer == entry["answer"] else 0.5 if answer.startswith(entry["answer"]) else 0.0


@pytest.fixture
def gym(monkeypatch):
    """`reasoning_gym` with one dataset, "sums", whether the package is installed or not."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    package.create_dataset = lambda name, **options: Sums(**options)
    factory.DATASETS = {"sums": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    questions.cache_clear()
    yield
    questions.cache_clear()


def ask(environment, task, text, *, truncated=False):
    """(messages, the last step) of a single-turn episode."""

    async def episode():
        running = environment.episode(task, seed=0)
        first = await running.start()
        last = await running.step(Answer(np.zeros(1, np.int32), text, truncated))
        await running.close()
        return list(first.observation.messages), last

    return asyncio.run(episode())


@pytest.mark.usefixtures("gym")
def test_questions_are_scored_by_their_verifier():
    environment = ReasoningGym("sums", size=4, seed=3, options='{"terms": 3}')
    assert isinstance(environment, Environment)
    assert environment.num_tasks == 4
    entry = Sums(4, 3 * 2**20, 3)[2]
    messages, step = ask(environment, 2, f"<think>hm</think>so <answer> {entry['answer']} </answer>")
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "<answer>" in messages[0]["content"]
    assert messages[1]["content"] == entry["question"]
    assert (step.final_reward, step.reward, step.observation) == (1.0, 0.0, None)
    assert step.info == {"correct": 1.0, "answered": 1.0}
    assert ask(environment, 2, f"<answer>{entry['answer']}!</answer>")[1].final_reward == 0.5
    silent = ask(environment, 2, "<think><answer>" + entry["answer"], truncated=True)[1]
    assert (silent.final_reward, silent.stop_reason, silent.info["answered"]) == (0.0, "length", 0.0)


@pytest.mark.usefixtures("gym")
def test_the_last_line_can_be_the_answer():
    environment = ReasoningGym("sums", extraction="last_line", system_prompt=None)
    messages, step = ask(environment, 0, f"I think\n{Sums(1, 0)[0]['answer']} \n\n")
    assert [message["role"] for message in messages] == ["user"]
    assert step.final_reward == 1
    spoken = ReasoningGym("sums", extraction="last_line", system_prompt="Be brief.")
    assert ask(spoken, 0, "")[0][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.usefixtures("gym")
def test_a_verifiers_exception_is_not_a_score():
    with pytest.raises(ZeroDivisionError, match="a verifier's fault"):
        ask(ReasoningGym("sums"), 0, "<answer>boom</answer>")


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (dict(dataset="sumz"), "dataset: expected one of its 1 datasets; got 'sumz'; did you mean sums"),
        (dict(options="{"), "options: expected a JSON object; got"),
        (dict(options="[]"), "options: expected a JSON object without size and seed; got []"),
        (dict(options='{"seed": 1}'), "options: expected a JSON object without size and seed; got"),
        (dict(options='{"terms": 1}'), "options: expected options that sums takes; got terms must be"),
        (
            dict(options='{"digits": 1}'),
            "options: expected options that sums takes; got Sums.__init__() got an",
        ),
        (dict(size=0), "size: expected 1 to 1048576; got 0"),
        (dict(extraction="first_line"), "extraction: expected tags or last_line; got 'first_line'"),
    ],
)
def test_bad_questions(settings, text):
    with pytest.raises(InputError) as error:
        ReasoningGym(**{"dataset": "sums"} | settings)
    assert str(error.value).startswith(f"ReasoningGym: {text}")


def test_a_missing_package_is_named():
    with pytest.raises(InputError) as error:
        require("no_such_package_here.module", package="no-such-package", wanted_by="Some")
    assert str(error.value).endswith("no module named no_such_package_here; pip install no-such-package")


def test_a_missing_dependency_of_a_package_is_not_blamed_on_the_package(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency_here"):
        require("half_installed", package="half-installed", wanted_by="Some")


@pytest.mark.parametrize(
    ("text", "extraction", "answer"),
    [
        ("<answer>1</answer> no, <answer>\n2 </answer> or so", "tags", "2"),
        ("<answer>1</answer></think>none", "tags", None),
        ("<answer>1", "tags", None),
        ("1</answer>", "tags", None),
        ("<answer></answer>", "tags", ""),
        ("a\n b\n", "last_line", "b"),
        ("a</think>\n\n", "last_line", None),
    ],
)
def test_extraction(text, extraction, answer):
    assert extract_answer(text, extraction) == answer


# --- tool calls


def test_calls_in_a_text():
    text = f"""<think>
<tool_call>{{"name": "not_this"}}</tool_call>
</think>
I look.
{render_call("get", {"id": "ü", "n": [1, None]})}{render_call("put", {})}
Then more."""
    said, (get, put) = parse_answer(text)
    assert said.split() == ["I", "look.", "Then", "more."]
    assert (get.name, get.arguments, get.error) == ("get", {"id": "ü", "n": [1, None]}, "")
    assert (put.name, put.arguments, put.error) == ("put", {}, "")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "f", "arguments": {}', "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('["f"]', '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": ""}', '"name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments"'),
        ('{"name": "f", "arguments": "{"}', '"arguments"'),
        ('{"name": "f", "arguments": null}', '"arguments"'),
    ],
)
def test_calls_that_can_not_be_read_say_why(body, error):
    said, (good, bad, other) = parse_answer(
        f"a{render_call('g', {})}<tool_call>{body}</tool_call>{render_call('h', {})}b"
    )
    assert said == "ab"
    assert [good.name, other.name] == ["g", "h"]
    assert error in bad.error


def test_calls_may_be_left_open_and_have_arguments_as_a_string():
    said, calls = parse_answer(
        '<tool_call>{"name": "f"}<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}'
    )
    assert said == ""
    assert [(call.name, call.arguments, call.error) for call in calls] == [("f", {}, ""), ("g", {"x": 1}, "")]
    assert parse_answer("<think>never ends <tool_call>{}") == ("", ())


PIECES = ("<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"name"', ":", '"f"', " x")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_can_be_parsed(text):
    said, calls = parse_answer(text)
    assert "<tool_call>" not in said
    assert all(call.error or call.name for call in calls)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.integers(-9, 9) | st.text(max_size=5) | st.booleans()))
def test_calls_survive_their_text(arguments):
    _, (call,) = parse_answer(render_call("f", arguments))
    assert (call.name, call.arguments, call.error) == ("f", arguments, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "bandit"}, "ImportedEnvironment: name: expected module:Class"),
        ({"name": "no_such_module:Game"}, "something that can be imported; got No module named"),
        ({"name": "dta_jax.envs.bandit:Game"}, "something that can be imported; got module"),
        ({"name": "json:JSONDecoder"}, "an environment .num_tasks, episode.; got JSONDecoder"),
        ({"options": "[1]"}, "options: expected a JSON object; got"),
        ({"options": "{"}, "options: expected a JSON object; got"),
        ({"options": '{"sides": 3}'}, "options: expected arguments of dta_jax.envs.bandit:Bandit"),
        ({"vocab_size": None}, "vocab_size: expected at least 1 where it speaks tokens"),
        ({"speaks": "words"}, "speaks: expected tokens or messages"),
    ],
)
def test_an_imported_environment_that_is_none_is_refused(changes, message):
    good = {"name": "dta_jax.envs.bandit:Bandit", "speaks": "tokens", "vocab_size": 13}
    with pytest.raises(InputError, match=message):
        ImportedEnvironment(**(good | changes))
    assert ImportedEnvironment(**good, options='{"contexts": 5}').num_tasks == 5


def test_an_environment_on_a_cluster_is_checked_before_the_cluster(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    there = OnRay(Bandit(contexts=3))
    assert isinstance(there, Environment)
    assert there.num_tasks == 3
    assert LiveRollouts(there).tokens_below == Bandit(contexts=3).vocab_size
    for field, value in (("address", ""), ("actors", 0), ("cpus_per_actor", -1.0)):
        with pytest.raises(InputError, match=f"OnRay: {field}: expected"):
            OnRay(Bandit(), **{field: value})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"no module named ray; pip install dta_jax\[ray\]"):
        OnRay(Bandit())


def test_bad_input_says_the_same_in_another_process():
    error = InputError("Flights", "table", expected=range(3), actual=None, hint="write one")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (InputError, str(error))
    assert (again.source, again.field, again.hint) == ("Flights", "table", "write one")
