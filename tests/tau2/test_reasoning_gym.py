"""Questions and verifiers of the package `reasoning-gym` itself."""

import asyncio

import numpy as np
import pytest

from dta_jax.envs.protocol import Answer
from dta_jax.envs.reasoning import ReasoningGym
from dta_jax.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages warn while they are imported


def score(environment, task, answer):
    async def episode():
        running = environment.episode(task, seed=0)
        question = (await running.start()).observation.messages[-1]["content"]
        said = answer if isinstance(answer, str) else answer(question)
        step = await running.step(Answer(np.zeros(1, np.int32), f"<answer>{said}</answer>", False))
        return step.final_reward

    return asyncio.run(episode())


def test_sums_are_scored():
    environment = ReasoningGym("chain_sum", size=5, seed=7, options='{"max_terms": 3, "max_digits": 2}')

    def right(question):
        return str(eval(question.split(":")[-1].strip(" =")))  # digits and signs only

    assert [score(environment, task, right) for task in range(5)] == [1.0] * 5
    assert score(environment, 0, "no number") == 0


def test_questions_follow_from_the_seed():
    def questions(seed):
        environment = ReasoningGym("countdown", size=3, seed=seed)
        starts = [asyncio.run(environment.episode(task, 0).start()) for task in range(3)]
        return [start.observation.messages[-1]["content"] for start in starts]

    assert questions(1) == questions(1)
    assert not set(questions(1)) & set(questions(2))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (dict(dataset="chain_sums"), "did you mean chain_sum"),
        (dict(options='{"digits": 2}'), "options: expected options that chain_sum takes"),
        (dict(options='{"min_terms": -1}'), "got min_terms must be positive"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(InputError) as error:
        ReasoningGym(**settings)
    assert text in str(error.value)
