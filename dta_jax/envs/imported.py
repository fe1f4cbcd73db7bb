"""An environment of one's own, named in a config: `module:Class`, imported from the Python path.

    LiveRollouts.environment = @ImportedEnvironment()
    ImportedEnvironment.name = "my_game:Chess"
    ImportedEnvironment.options = '{"size": 8}'

Whoever writes the config decides what code runs, as with any program that is started by name.
"""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from dta_jax.envs.protocol import Environment, Episode
from dta_jax.errors import InputError


@dataclass(frozen=True)
class ImportedEnvironment:
    """`dta_jax.envs.protocol.Environment` by name.

    Attributes:
      name: "module:Class", or "module:function", called with the options.
      options: keyword arguments, a JSON object.
      speaks: whether it asks in token ids or in chat messages.
      vocab_size: where it speaks tokens: its ids are below that.
    """

    name: str
    options: str = "{}"
    speaks: Literal["tokens", "messages"] = "messages"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for field, good, expected in (
            ("speaks", self.speaks in ("tokens", "messages"), "tokens or messages"),
            ("name", all(self.name.partition(":")), "module:Class"),
            (
                "vocab_size",
                (self.vocab_size is None) == (self.speaks == "messages") and (self.vocab_size or 1) >= 1,
                "at least 1 where it speaks tokens, None where it speaks messages",
            ),
        ):
            if not good:
                raise self._refused(field, expected, repr(getattr(self, field)))
        _ = self._made

    @property
    def num_tasks(self) -> int:
        """The environment's."""
        return self._made.num_tasks

    def episode(self, task: int, seed: int) -> Episode:
        """The environment's."""
        return self._made.episode(task, seed)

    @functools.cached_property
    def _made(self) -> Environment:
        module, _, attribute = self.name.partition(":")
        try:
            make: Any = importlib.import_module(module)
            for part in attribute.split("."):
                make = getattr(make, part)
        except (ImportError, AttributeError) as error:
            hint = "modules are looked for on the Python path (PYTHONPATH=. for the current folder)"
            raise self._refused("name", "something that can be imported", error, hint) from error
        try:
            options = json.loads(self.options)
        except ValueError as error:
            raise self._refused("options", "a JSON object", error) from None
        if not isinstance(options, dict):
            raise self._refused("options", "a JSON object", self.options)
        try:
            made = make(**options)
        except TypeError as error:
            raise self._refused("options", f"arguments of {self.name}", error) from error
        if not isinstance(made, Environment):
            raise self._refused("name", "an environment (num_tasks, episode)", type(made).__name__)
        return made

    def _refused(self, field: str, expected: str, actual: object, hint: str = "") -> InputError:
        return InputError("ImportedEnvironment", field, expected=expected, actual=actual, hint=hint)
