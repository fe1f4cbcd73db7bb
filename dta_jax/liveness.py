"""How much memory a traced program needs beside its arguments, before any compiler has seen it.

A jaxpr names every array that is computed and every use of it, so lifetimes can be counted. What a
compiler keeps is less than all of them, and which is what the rules here say:

    fused       chains of elementwise operations, broadcasts, slices and transposes are computed where they
                are used (by each other, by reductions); what they read lives as long as their last use
    stored      everything else: results of products, reductions, gathers, sorts; and costly functions (exp,
                log, division, ...) that several stored values are computed from
    in place    updates (`dynamic_update_slice`, scatters, aliased results of kernels) and loop carries whose
                old value has no later use
    loops       a loop costs what its body costs, once; slices of scanned arrays are stored when needed

Compilers for accelerators also write a fused result over what it reads for the last time, add products to
sums without storing them, and write several results of a costly function in one pass (weights and both
moments, of a clipped gradient). A CPU's does none of this, and has no products in bfloat16: it widens their
operands to float32 (`for_cpu`).

    products    operands and results are widened while the product runs
    loops       arrays that come from outside and feed products are widened as wholes, and stay so meanwhile;
                arguments (weights) until the last loop that reads them
    scatters    the whole target is widened; if it is an argument, from the start of the program on. Its own
                buffer then has no contents until the end, and other arrays may use it

Not counted: what libraries take beside their results, alignment, gaps between buffers, and branches of
`lax.cond` (no step has one). `benchmarks/memory_prediction.py` holds the result against the compiler's count.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
from jax.extend import core

CALLS: Final = {  # primitives that only wrap a jaxpr, and the parameter that holds it
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "shard_map": "jaxpr",
}
VIEWS: Final = frozenset({"reshape", "squeeze", "expand_dims"})
MOVES: Final = frozenset({"transpose", "slice", "dynamic_slice"})
COSTLY: Final = frozenset(
    {"exp", "exp2", "log", "log1p", "rsqrt", "sqrt", "tanh", "logistic", "sin", "cos", "pow", "div"}
)
FUSED: Final = (
    MOVES
    | COSTLY
    | {"add", "sub", "mul", "neg", "max", "min", "integer_pow", "square", "abs", "sign", "clamp", "rem"}
    | {"and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "select_n"}
    | {"convert_element_type", "broadcast_in_dim", "iota", "add_any", "copy", "pad", "rev"}
)
REDUCTIONS: Final = frozenset({"reduce_sum", "reduce_max", "reduce_min", "argmax"})
UPDATES: Final = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
LOOPS: Final = frozenset({"scan", "while"})
SPREAD: Final = 4  # a broadcast that is larger by more than this factor is stored only to be changed in place


class Value:
    """One array of the program."""

    __slots__ = ("bytes", "narrow")

    def __init__(self, aval: Any):
        self.bytes = math.prod(aval.shape) * aval.dtype.itemsize
        self.narrow = aval.dtype == jnp.bfloat16


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: its primitive's name and parameters; literals among the inputs are None."""

    name: str
    params: dict[str, Any]
    inputs: list[Value | None]
    outputs: list[Value]

    @property
    def arrays(self) -> list[Value]:
        return [value for value in self.inputs if value is not None]


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan or while, seen alike: its body, what the body's inputs are outside, and what it carries."""

    body: core.Jaxpr
    inputs: list[Value | None]
    carried: list[Value | None]
    sliced: Sequence[core.Var]

    @classmethod
    def of(cls, op: Op) -> Loop:
        if op.name == "scan":
            consts, carry = _scan_parts(op.params)
            body, inputs = op.params["jaxpr"].jaxpr, op.inputs
            return cls(body, inputs, inputs[consts : consts + carry], body.invars[consts + carry :])
        inputs = op.inputs[op.params["cond_nconsts"] :]
        return cls(op.params["body_jaxpr"].jaxpr, inputs, inputs[op.params["body_nconsts"] :], ())


def _scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan has, as this version of JAX says it."""
    if "ft_in" in params:  # from 0.12 on
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def temporary_bytes(program: core.Jaxpr, *, for_cpu: bool) -> int:
    """The most bytes that are alive at a time in a program, beside its arguments.

    Args:
      program: traced. What it updates is taken to be donated, and every result to replace an argument.
      for_cpu: which of the two kinds of compiler.
    """
    return _Lifetimes(program, (), for_cpu, outermost=True).peak()


class _Lifetimes:
    """The operations of a jaxpr with calls inlined, and what each value is stored in."""

    def __init__(self, jaxpr: core.Jaxpr, sliced: Sequence[core.Var], for_cpu: bool, *, outermost: bool):
        self.cpu, self.outermost = for_cpu, outermost
        env: dict[core.Var, Value | None] = {v: Value(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
        self.inputs = {value for value in env.values() if value is not None}
        ops: list[Op] = []
        _inline(jaxpr, env, ops)
        results = [env[v] for v in jaxpr.outvars if not isinstance(v, core.Literal)]
        ops, results = _slice_on_demand(ops, results, [(env[v], Value(v.aval)) for v in sliced])
        self.results = {value for value in results if value is not None}
        self.ops = _without_dead(ops, self.results)
        self.uses: dict[Value, list[int]] = collections.defaultdict(list)
        for t, op in enumerate(self.ops):
            for value in op.arrays:
                self.uses[value].append(t)
        self.source: dict[Value, tuple[Value, ...]] = {value: () for value in self.inputs}
        self.last: dict[Value, int] = {}
        self._place()

    def _place(self) -> None:
        """Decides what is stored, and until when. `source`: the stored values that a value is read from."""
        fused = self._fused()
        for t, op in enumerate(self.ops):
            read = self._read_by(op)
            self.last.update(dict.fromkeys(read, t))
            for value in op.outputs:
                self.source[value] = read if op.name in VIEWS or value in fused else (value,)
        for value in self.results:
            self.last.update(dict.fromkeys(self.source[value], len(self.ops)))

    def _fused(self) -> set[Value]:
        """Values that are computed where they are used, the last ones first."""
        fused: set[Value] = set()
        ends: dict[Value, set[int]] = {}  # where what a value is computed for is stored
        users: dict[Value, set[str]] = {}  # the primitives that use a value, views looked through
        for op in reversed(self.ops):
            for value in op.outputs:
                ends[value], users[value] = set(), {"result"} if value in self.results else set()
                for u in self.uses[value]:
                    user = self.ops[u]
                    (first, *_) = user.outputs
                    ends[value] |= ends[first] if first in fused or user.name in VIEWS else {u}
                    users[value] |= users[first] if user.name in VIEWS else {user.name}
                if self._can_fuse(op, value, users[value], ends[value]):
                    fused.add(value)
        return fused

    def _read_by(self, op: Op) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(stored for value in op.arrays for stored in self.source[value]))

    def _can_fuse(self, op: Op, value: Value, users: set[str], ends: set[int]) -> bool:
        if op.name not in FUSED or "result" in users:
            return False
        if op.name == "broadcast_in_dim" and value.bytes > SPREAD * sum(v.bytes for v in op.arrays):
            return not users & (LOOPS | UPDATES)
        return users <= FUSED | REDUCTIONS and (op.name not in COSTLY or len(ends) < 2 or self._at_once(ends))

    def _at_once(self, ends: set[int]) -> bool:
        """Whether one pass writes all that these operations store: an accelerator's does so with results."""
        return not self.cpu and all(self.results.issuperset(self.ops[t].outputs) for t in ends)

    def peak(self) -> int:
        """The most bytes alive at a time."""
        live: dict[Value, int] = {}
        early = self._widened_targets()
        loops = self._widened_by_loops()
        shared = self._shared(loops)
        most = 0
        for t, op in enumerate(self.ops):
            running, copies = 0, []
            if op.name in LOOPS:
                loop = Loop.of(op)
                self._carry(live, zip(op.outputs, loop.carried, strict=False), t)
                running = _Lifetimes(loop.body, loop.sliced, self.cpu, outermost=False).peak()
                copies = [2 * value.bytes for value in loops[t] if value not in shared]
            elif op.name == "pallas_call":
                replaced = op.params["input_output_aliases"]
                self._carry(live, [(op.outputs[o], op.inputs[i]) for i, o in replaced], t)
            elif op.name in UPDATES:
                self._carry(live, [(op.outputs[0], op.inputs[0])], t)
                if self.cpu and op.name != "dynamic_update_slice" and t not in early:
                    copies = [2 * value.bytes for value in op.outputs if value.narrow]
            elif op.name == "dot_general" and self.cpu:
                copies = [2 * value.bytes for value in (*op.arrays, *op.outputs) if value.narrow]
            for value in op.outputs:
                if self.source[value] == (value,):
                    replaces = self.outermost and value in self.results
                    if not self.cpu:
                        replaces = replaces or self._accumulates(op, t, value)
                        self._reuse(live, op, t, value)
                    live.setdefault(value, 0 if replaces else value.bytes)
            copies += [2 * value.bytes for value, (first, last) in shared.items() if first <= t <= last]
            most = max(most, running + _packed([*live.values(), *copies], early.values()))
            early.pop(t, None)
            for value in [value for value in live if self.last.get(value, t) <= t]:
                del live[value]
        return most

    def _carry(self, live: dict[Value, int], pairs: Iterable[tuple[Value, Value | None]], t: int) -> None:
        """Gives results the buffers of what they replace, where that is not read later."""
        for new, old in pairs:
            if old is None:
                continue
            if old in self.inputs and self.uses[old][-1] <= t:
                live[new] = 0  # an argument's own buffer
            stored = self.source[old]
            if len(stored) == 1 and self.last[stored[0]] == t and live.get(stored[0]) in (0, new.bytes):
                live[new] = live.pop(stored[0])

    def _reuse(self, live: dict[Value, int], op: Op, t: int, value: Value) -> None:
        """Gives a fused result the buffer of an array of its size that is read for the last time."""
        for old in self._read_by(op) if op.name in FUSED and value not in live else ():
            if self.last[old] == t and live.get(old) == value.bytes:
                live[value] = live.pop(old)
                return

    def _accumulates(self, op: Op, t: int, value: Value) -> bool:
        """Whether a product is only added to an array of its size, or a result is such a sum."""
        if op.name == "dot_general" and len(self.uses[value]) == 1:
            (user,) = (self.ops[u] for u in self.uses[value])
            return user.name == "add" and all(other.bytes == value.bytes for other in user.arrays)
        old = [other for other in op.arrays if other in self.inputs and self.uses[other][-1] == t]
        return op.name == "add" and value in self.results and any(o.bytes == value.bytes for o in old)

    def _widened_targets(self) -> dict[int, Value]:
        """Arguments that a scatter updates, by operation: they are widened at the start."""
        if not (self.cpu and self.outermost):
            return {}
        scatters = [(t, op.inputs[0]) for t, op in enumerate(self.ops) if op.name.startswith("scatter")]
        return {t: v for t, v in scatters if v is not None and v in self.inputs and v.narrow}

    def _widened_by_loops(self) -> dict[int, list[Value]]:
        """What each loop widens of what comes from outside of it, unless a loop around it has done so."""
        loops = [(t, Loop.of(op)) for t, op in enumerate(self.ops) if op.name in LOOPS and self.cpu]
        outer = {} if self.outermost else _views_of(self.ops, {v: v for v in self.inputs})
        found: dict[int, list[Value]] = collections.defaultdict(list)
        for t, loop in loops:
            fed = _feed_products(loop.body)
            for inner, value in zip(loop.body.invars, loop.inputs, strict=True):
                if inner in fed and value is not None and value.narrow and value not in outer:
                    found[t].append(value)
        return found

    def _shared(self, loops: dict[int, list[Value]]) -> dict[Value, tuple[int, int]]:
        """Arguments that loops widen: one copy lives from the first of these loops to the last."""
        times: dict[Value, list[int]] = collections.defaultdict(list)
        for t, values in loops.items():
            for value in self.inputs.intersection(values):
                times[value].append(t)
        return {value: (min(found), max(found)) for value, found in times.items()}


def _inline(jaxpr: core.Jaxpr, env: dict[core.Var, Value | None], ops: list[Op]) -> None:
    """Appends a jaxpr's operations, those of its calls in their place."""
    for eqn in jaxpr.eqns:
        inputs = [None if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        name = eqn.primitive.name
        if name not in CALLS:
            outputs = [Value(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outputs, strict=True))
            ops.append(Op(name, eqn.params, inputs, outputs))
            continue
        called = eqn.params[CALLS[name]]
        body = called.jaxpr if isinstance(called, core.ClosedJaxpr) else called
        inner: dict[core.Var, Value | None] = dict(zip(body.invars, inputs, strict=True))
        inner |= {v: Value(v.aval) for v in body.constvars}
        _inline(body, inner, ops)
        found = (None if isinstance(v, core.Literal) else inner[v] for v in body.outvars)
        env.update(zip(eqn.outvars, found, strict=True))


def _slice_on_demand(
    ops: list[Op], results: list[Value | None], sliced: Iterable[tuple[Value | None, Value]]
) -> tuple[list[Op], list[Value | None]]:
    """Puts a slice of each scanned array before its first use."""
    for whole, part in sliced:
        first = next((t for t, op in enumerate(ops) if whole in op.inputs), None)
        if first is None:
            continue

        def renamed(values: list[Value | None], old: Any = whole, new: Value = part) -> list[Value | None]:
            return [new if value is old else value for value in values]

        ops = [Op(op.name, op.params, renamed(op.inputs), op.outputs) for op in ops]
        ops.insert(first, Op("dynamic_slice", {}, [whole], [part]))
        results = renamed(results)
    return ops, results


def _without_dead(ops: list[Op], results: Iterable[Value]) -> list[Op]:
    needed, kept = set(results), []
    for op in reversed(ops):
        if needed.intersection(op.outputs):
            kept.append(op)
            needed.update(op.arrays)
    return kept[::-1]


def _views_of(ops: list[Op], known: dict[Value, Any]) -> dict[Value, Any]:
    """Extends what is `known` of arrays to what only views, moves or changes them in place."""
    known = dict(known)
    for op in ops:
        if op.name in VIEWS or op.name in MOVES or op.name == "dynamic_update_slice":
            pairs: Any = [(op.outputs[0], op.inputs[0])]
        elif op.name in LOOPS:
            pairs = zip(op.outputs, Loop.of(op).carried, strict=False)
        else:
            continue
        known |= {new: known[old] for new, old in pairs if old in known}
    return known


def _feed_products(jaxpr: core.Jaxpr) -> set[core.Var]:
    """A jaxpr's inputs that reach a product, here or in a loop, through views, moves and updates only."""
    env: dict[core.Var, Value | None] = {v: Value(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
    names: Any = {env[v]: v for v in jaxpr.invars}
    ops: list[Op] = []
    _inline(jaxpr, env, ops)
    known = _views_of(ops, names)
    fed: set[core.Var] = set()
    for op in ops:
        if op.name == "dot_general":
            fed |= {known[value] for value in op.arrays if value in known}
        elif op.name in LOOPS:
            loop = Loop.of(op)
            inside = _feed_products(loop.body)
            pairs = zip(loop.body.invars, loop.inputs, strict=True)
            fed |= {known[value] for inner, value in pairs if inner in inside and value in known}
    return fed


def _packed(buffers: list[int], widened: Iterable[Value]) -> int:
    """Bytes of buffers beside widened arguments, whose own buffers hold what fits into them."""
    rest = sorted(buffers, reverse=True)
    total = 0
    for room in sorted((value.bytes for value in widened), reverse=True):
        total += 2 * room
        fits = next((size for size in rest if size <= room), None)
        if fits is not None:
            rest.remove(fits)
    return total + sum(rest)
