"""Chat templates (jinja2, sandboxed) as transformers renders them: same variables, filters and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dta_jax.errors import InputError
from dta_jax.hf_config import read_json
from dta_jax.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer, read_tokenizer_config

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` and what else the template reads (`tool_calls`, `reasoning_content`, ...)."""

TEMPLATE_FILE: Final = "chat_template.jinja"
_OLD_TEMPLATE_FILE: Final = "chat_template.json"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model writes; rendering leaves it as it is."""

    tags = {"generation"}  # noqa: RUF012 (the library's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


# What running a template can raise: it is the folder's program, and can divide by 0 as well as any other.
_FAILURES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template.

    Attributes:
      source: where it is from; errors name it.
      variables: what it can read beside the messages: special tokens, `enable_thinking`, ...
    """

    source: str
    variables: Mapping[str, Any]
    _compiled: jinja2.Template

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: from the first on; keys whose value is None are left out.
          tools: JSON schemas of the functions that the model may call.
          add_generation_prompt: end with what begins an assistant's message.

        Raises:
          InputError: the template refuses the messages or fails on them, or they are not plain JSON.
        """
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            plain = json.loads(json.dumps({"messages": present, "tools": tools}))
            return self._compiled.render(
                **self.variables, **plain, documents=None, add_generation_prompt=add_generation_prompt
            )
        except _FAILURES as error:
            expected = "messages that the template renders"
            raise InputError(self.source, "messages", expected=expected, actual=error) from None


def compile_template(text: str, *, source: str, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A template from its text.

    Raises:
      InputError: it is not valid.
    """
    try:
        return ChatTemplate(source, dict(variables or {}), _environment().from_string(text))
    except jinja2.TemplateError as error:
        raise InputError(source, "chat template", expected="a jinja2 template", actual=error) from None


def load_template(tokenizer: Tokenizer, *, name: str = "default", **variables: Any) -> ChatTemplate:
    """The chat template in a tokenizer's folder.

    Args:
      tokenizer: its folder and special tokens are used.
      name: which one, where there are several.
      **variables: further variables of the template, e.g. `enable_thinking=False`.

    Raises:
      InputError: there is none of that name, or it is not valid.
    """
    folder = tokenizer.folder
    known = {**tokenizer.special, **variables}
    for file in (TEMPLATE_FILE, _OLD_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE):
        text = _template_in(folder / file, name)
        if text is not None:
            return compile_template(text, source=str(folder / file), variables=known)
    expected = f"in {TEMPLATE_FILE} or {TOKENIZER_CONFIG_FILE}"
    raise InputError(folder, f"chat template {name!r}", expected=expected, actual="none")


def _template_in(path: Path, name: str) -> str | None:
    if not path.exists():
        return None
    if path.name == TEMPLATE_FILE:
        return path.read_text(encoding="utf-8") if name == "default" else None
    if path.name == _OLD_TEMPLATE_FILE:
        found = read_json(path, "a chat template").get("chat_template")
    else:
        found = read_tokenizer_config(path.parent).get("chat_template")
    if isinstance(found, list):
        return next((entry["template"] for entry in found if entry["name"] == name), None)
    return found if name == "default" else None
