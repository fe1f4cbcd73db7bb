"""Reads a run's settings from a gin file. The only module that imports gin.

Each class of `BUILDERS` can be named in a config, and its fields bound:

    Train.rollouts = @RecordedRollouts()
    RecordedRollouts.path = %ROLLOUTS
    Train.loss = @PPOClip()
    PPOClip.eps_high = 0.28

`load_config` goes over the text twice. The first pass only looks: every name must exist, every macro must
be defined and used, every value must have its field's type; whatever is wrong is said with its line and
the nearest right name. In the second pass gin builds.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import tokenize
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import gin
from gin import config_parser

from dta_jax.collect.evaluation import Evaluate
from dta_jax.collect.settings import Collect
from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.envs.bandit import Bandit
from dta_jax.envs.game import TreasureHunt
from dta_jax.envs.imported import ImportedEnvironment
from dta_jax.envs.on_ray import OnRay
from dta_jax.envs.reasoning import ReasoningGym
from dta_jax.envs.tau2 import Tau2
from dta_jax.errors import InputError
from dta_jax.generation.local import LocalSampler
from dta_jax.generation.openai import OpenAIServer
from dta_jax.generation.protocol import Sampling
from dta_jax.generation.sglang import SGLang
from dta_jax.generation.vllm import VLLM
from dta_jax.guard_settings import Guards
from dta_jax.losses import CISPO, NLL, SAPO, EntropyBonus, KLPenalty, PolicyGradient, PPOClip, ValueClip
from dta_jax.objective import GAE, Aggregate, GroupNormalized, PreferencePairs, Returns, Rewards
from dta_jax.qwen3 import Qwen3Config
from dta_jax.rope import RopeScaling
from dta_jax.sequence_losses import DPO, SequenceRatio, SequenceSum
from dta_jax.settings import (
    AdamW,
    Checkpoints,
    Critic,
    HuggingFaceModel,
    LiveRollouts,
    Logging,
    Planner,
    RecordedRollouts,
    SequenceCorrection,
    Train,
)
from dta_jax.sharding import MeshShape
from dta_jax.synthetic import SyntheticRollouts

BUILDERS: Final[Mapping[str, type]] = {
    cls.__name__: cls
    for cls in (
        Train, SyntheticRollouts, RecordedRollouts, LiveRollouts, Qwen3Config, RopeScaling, HuggingFaceModel,
        NLL, PolicyGradient, PPOClip, CISPO, SAPO, KLPenalty, EntropyBonus, Sum, OffPolicy, BehaviourWeight,
        SequenceRatio, SequenceSum, DPO, ValueClip, SequenceCorrection,
        Rewards, GroupNormalized, Returns, GAE, PreferencePairs, Aggregate,
        Bandit, TreasureHunt, ReasoningGym, Tau2, ImportedEnvironment, OnRay,
        LocalSampler, SGLang, VLLM, OpenAIServer, Sampling, Collect, Evaluate,
        Critic, Planner, AdamW, Checkpoints, Guards, Logging, MeshShape,
    )
}  # fmt: skip

_REQUIRED: Final = "gin.REQUIRED"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Train:
    """Builds a run from a gin file and bindings that override it, such as `"Train.steps = 5"`.

    Raises:
      InputError: the file is missing or is not gin; a name, macro or type is wrong; a value is out of
        range. The error names the file and line, or the override.
    """
    path = os.fspath(path)
    bindings = [*_parse_file(path), *(b for text in overrides for b in _parse(text, f"--gin {text!r}"))]
    _check_names(bindings)
    _check_types(bindings)
    located = {binding.key: binding.where for binding in bindings}
    _check_complete(path, bindings)
    gin.clear_config()
    # Not finalized: that would refuse a required macro although no binding in force uses it.
    gin.parse_config_files_and_bindings([path], list(overrides), finalize_config=False)
    try:
        return gin.get_configurable("Train")()
    except InputError as error:
        key = f"{error.source}.{error.field}"
        where = located.get(key, path)
        raise InputError(where, key, expected=error.expected, actual=error.actual, hint=error.hint) from None


def operative_config() -> str:
    """The bindings that the last `load_config` used, defaults included, as gin text."""
    return gin.operative_config_str()


def changed_bindings(old: str, new: str) -> dict[str, tuple[str, str]]:
    """What differs between two operative configs: name -> (old value, new value), "none" where absent."""
    tables = [{b.key: repr(b.value) for b in _parse(text, "operative config")} for text in (old, new)]
    names = sorted(tables[0].keys() | tables[1].keys())
    pairs = {name: (tables[0].get(name, "none"), tables[1].get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class _Reference:
    """`@name`, `@name()` or `%name` on the right of a binding."""

    name: str
    kind: Literal["@", "@()", "%"]

    def __repr__(self) -> str:
        return f"%{self.name}" if self.kind == "%" else f"@{self.name}{self.kind[1:]}"


@dataclass(frozen=True)
class _Binding:
    """`scope/owner.field = value`, or `owner = value` (field "") where a macro is defined.

    A binding in a scope holds for what `@scope/owner()` builds; without one, for everything.
    """

    scope: str
    owner: str
    field: str
    value: Any
    where: str

    @property
    def key(self) -> str:
        scope = f"{self.scope}/" if self.scope else ""
        return f"{scope}{self.owner}.{self.field}" if self.field else self.owner


class _References(config_parser.ParserDelegate):
    """Lets gin's parser keep references as names."""

    def configurable_reference(self, name: str, evaluate: bool) -> _Reference:
        return _Reference(name, "@()" if evaluate else "@")

    def macro(self, name: str) -> _Reference:
        return _Reference(name, "%")


def _parse_file(path: str, inside: tuple[str, ...] = ()) -> Iterator[_Binding]:
    if path in inside:
        chain = " -> ".join((*inside, path))
        raise InputError(path, "include", expected="files that do not include themselves", actual=chain)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(path, "file", expected="a readable .gin file", actual=reason) from None
    yield from _parse(text, path, (*inside, path))


def _parse(text: str, source: str, inside: tuple[str, ...] = ()) -> Iterator[_Binding]:
    """The bindings of a text and of the files that it includes, in order."""
    in_file = not source.startswith("--gin")
    try:
        for statement in config_parser.ConfigParser(text, _References()):
            where = f"{source}:{statement.location.line_num}" if in_file else source
            if isinstance(statement, config_parser.IncludeStatement):
                yield from _parse_file(statement.filename, inside)
            elif isinstance(statement, config_parser.ImportStatement):
                raise InputError(where, "import", expected="bindings only", actual=statement.format())
            elif isinstance(statement, config_parser.BindingStatement):
                yield _Binding(
                    statement.scope, statement.selector, statement.arg_name, statement.value, where
                )
    except (SyntaxError, tokenize.TokenError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else error.args[1][0]
        where = f"{source}:{line}" if in_file else source
        reason, hint = str(error.args[0]).strip().splitlines()[0], ""
        if reason.startswith("malformed node"):
            reason, hint = "a value that is no literal", "text needs quotes of its own: 'ROLLOUTS = \"FILE\"'"
        raise InputError(where, "syntax", expected="Name.field = value", actual=reason, hint=hint) from None


def _check_names(bindings: Sequence[_Binding]) -> None:
    """Every builder and field exists; every macro is defined and used."""
    macros = {b.owner for b in bindings if not b.field}
    used = {r.name for b in bindings for r in _references(b.value) if r.kind == "%"}
    built = {r.name.rsplit("/", 1)[0] for b in bindings for r in _references(b.value) if "/" in r.name}
    for b in bindings:
        if not b.field:
            if b.owner not in used:
                raise _unknown(b.where, "macro", b.owner, used - {_REQUIRED})
        elif b.owner not in BUILDERS:
            raise _unknown(b.where, b.key, b.owner, BUILDERS)
        elif b.field not in (fields := [f.name for f in dataclasses.fields(BUILDERS[b.owner])]):
            raise _unknown(b.where, b.key, b.field, fields)
        elif b.scope and not any(f"{scope}/".startswith(f"{b.scope}/") for scope in built):
            raise _unknown(b.where, b.key, b.scope, built)
        for r in _references(b.value):
            if r.kind == "%" and r.name not in macros | {_REQUIRED}:
                raise _unknown(b.where, b.key, r.name, macros)
            if r.kind != "%" and r.name.rsplit("/")[-1] not in BUILDERS:
                raise _unknown(b.where, b.key, r.name, BUILDERS)


def _unknown(where: str, field: str, name: str, known: Collection[str]) -> InputError:
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else ""
    expected = f"one of {', '.join(sorted(known))}" if known else "a name that is defined and used"
    return InputError(where, field, expected=expected, actual=name, hint=hint)


def _check_types(bindings: Sequence[_Binding]) -> None:
    """The value that each field ends up with has the field's type."""
    final = {b.key: b for b in bindings}
    for b in final.values():
        if b.field:
            value, where = _resolved(b, b.value, final, ())
            hint = _hints(BUILDERS[b.owner])[b.field]
            if not _fits(value, hint):
                kind = "" if isinstance(value, _Reference) else f" ({type(value).__name__})"
                raise InputError(where, b.key, expected=type_name(hint), actual=f"{value!r}{kind}")


def _resolved(
    source: _Binding, value: Any, final: Mapping[str, _Binding], inside: tuple[str, ...]
) -> tuple[Any, str]:
    """A binding's value with macros replaced, inside containers too; and where the last of them is set."""
    if isinstance(value, list | tuple):
        return [_resolved(source, item, final, inside)[0] for item in value], source.where
    if not isinstance(value, _Reference) or value.kind != "%":
        return value, source.where
    if value.name == _REQUIRED:
        hint = f'give it, such as --gin "{source.key} = ..."'
        raise InputError(source.where, source.key, expected="a value", actual="none", hint=hint)
    if value.name in inside:
        raise InputError(source.where, source.key, expected="a value", actual="a macro that names itself")
    macro = final[value.name]
    return _resolved(macro, macro.value, final, (*inside, value.name))


def _check_complete(path: str, bindings: Sequence[_Binding]) -> None:
    """Whatever is built has a value for each of its fields that has no default."""
    bound = {b.key for b in bindings}
    built = {r.name.rsplit("/")[-1] for b in bindings for r in _references(b.value) if r.kind != "%"}
    for name in sorted(built | {"Train"}):
        for f in dataclasses.fields(BUILDERS[name]):
            required = f.default is f.default_factory is dataclasses.MISSING
            if required and f"{name}.{f.name}" not in bound:
                expected = type_name(_hints(BUILDERS[name])[f.name])
                raise InputError(path, f"{name}.{f.name}", expected=expected, actual="no binding")


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _references(value: Any) -> Iterator[_Reference]:
    """All references in a value, those inside containers too."""
    if isinstance(value, _Reference):
        yield value
    elif isinstance(value, dict):
        yield from _references([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a parsed value may stand in a field of type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, args[0]) for v in value)
    if isinstance(value, _Reference):
        return value.kind == "@()" and BUILDERS[value.name.rsplit("/")[-1]] is hint
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint


def type_name(hint: Any) -> str:
    """A type as a user would write its values."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a list of {type_name(args[0])}"
    if hint is types.NoneType:
        return "None"
    return f"@{hint.__name__}()" if hint in BUILDERS.values() else hint.__name__


def _builder(cls: type) -> Callable[..., Any]:
    """A function with the signature of `cls`: gin must not change the classes that it builds.

    Settings that a field makes by default are built by gin too, so that bindings of them count.
    """
    names: dict[Any, str] = {made: name for name, made in BUILDERS.items()}
    made_by_default = {
        f.name: names[f.default_factory] for f in dataclasses.fields(cls) if f.default_factory in names
    }

    def build(**bindings: Any) -> Any:
        for name in made_by_default.keys() - bindings.keys():
            bindings[name] = gin.get_configurable(made_by_default[name])()
        try:
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in bindings.items()})
        except InputError as e:
            raise InputError(
                cls.__name__, e.field, expected=e.expected, actual=e.actual, hint=e.hint
            ) from None

    build.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    build.__doc__ = cls.__doc__
    return build


for _name, _cls in BUILDERS.items():
    gin.external_configurable(_builder(_cls), name=_name)
