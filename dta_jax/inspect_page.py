"""One HTML page of an inspection, with everything in it: no network, no library.

What is drawn on canvases (the trie, the schedule) travels as typed arrays, zlib-compressed; tables and
sentences are plain HTML. The page's own files are in `dta_jax/pages`.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np

import dta_jax
from dta_jax.inspect_advice import REASONS, advice, gibibytes, percent
from dta_jax.inspect_pictures import REWARD_COLOURS, SHARE_COLOURS, depth_picture, ranks_picture
from dta_jax.inspection import BACK_WORK, Inspection, Plan
from dta_jax.page_parts import fill, page_file, table, table_row
from dta_jax.schedule_stats import stack_heights
from dta_jax.sharing import mean_passing
from dta_jax.tokenizer import Tokenizer
from dta_jax.types import BACK, PUSH, Schedule

TOKENS_KEPT: Final = 1_500_000  # of the trie, in one page; long runs lose their ends
_SCRIPTS: Final = ("columns.js", "trie.js", "timeline.js", "inspect.js")
_COLOURS: Final = {"turns": "#2f74b5", "rollouts": "#2a9d8f", "tasks": "#e9b44c"}
_KINDS: Final = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}


def inspection_page(found: Inspection, tokenizer: Tokenizer | None = None) -> str:
    """The page.

    Args:
      found: what to show.
      tokenizer: turns token ids into text; without one, ids are shown.
    """
    parts = {
        "TITLE": escape(f"Sharing in {found.subject.name}"),
        "STYLE": page_file("style.css"),
        "SUBTITLE": escape(_subtitle(found)),
        "CARDS": _cards(found),
        "ADVICE": "".join(f"<li>{escape(sentence)}</li>" for sentence in advice(found)),
        "SCHEDULE": escape(_schedule_words(found)),
        "STRATEGIES": _plan_table(found.strategies, found, "method"),
        "CHUNKS": _plan_table(found.chunks, found, "chunk"),
        "SAVED": _saved(found),
        "RANKS": ranks_picture(found).svg(),
        "RANKTABLE": _rank_table(found),
        "VERSION": escape(dta_jax.__version__),
        "DATA": page_data(found, tokenizer),
        "SCRIPT": "\n".join(page_file(name).replace('"use strict";\n', "", 1) for name in _SCRIPTS),
    }
    return fill(page_file("inspect.html"), parts)


def page_data(found: Inspection, tokenizer: Tokenizer | None) -> str:
    """What the page's scripts read: header and arrays, compressed, as base64."""
    trie, runs, subject = found.trie, found.runs, found.subject
    columns: dict[str, tuple[str, np.ndarray]] = {
        "runLength": ("i4", runs.length),
        "runDepth": ("i4", runs.depth),
        "runEnd": ("i4", runs.end),
        "runParent": ("i4", runs.parent),
        "runSequences": ("i4", runs.sequences),
        "runRollouts": ("i4", found.rollouts),
    }
    header: dict[str, Any] = {
        "longest": trie.longest_path,
        "mostSequences": int(runs.sequences.max()),
        "shareColours": SHARE_COLOURS,
        "rewardColours": REWARD_COLOURS,
    }
    if found.tasks is not None:
        columns["runTasks"] = ("i4", found.tasks)
    for name in ("task", "trial", "reward"):
        array = getattr(subject, name)
        if array is not None:
            header[name] = [round(float(x), 6) if name == "reward" else int(x) for x in array]
    if subject.reward is not None and subject.reward.min() < subject.reward.max():
        columns["runReward"] = ("f4", mean_passing(trie, runs, subject.reward[subject.rollout]))
        header |= {"rewardLow": float(subject.reward.min()), "rewardHigh": float(subject.reward.max())}
    order = np.argsort(trie.tail, kind="stable")
    columns |= {
        "sequenceTail": ("i4", trie.tail[order]),
        "sequenceRollout": ("i4", subject.rollout[order]),
        "sequenceCompletion": ("i4", subject.completion[order]),
    }
    columns |= _loss_columns(found) | _schedule_columns(found)
    header |= {
        "stackSlots": found.schedule.stack_slots,
        "backWork": BACK_WORK - found.schedule.keep_residuals,
        "rowBytes": 0 if found.row_bytes is None else found.row_bytes.stack,
    }
    token_columns, token_header = _token_columns(found, tokenizer)
    return pack(header | token_header, columns | token_columns)


def pack(header: Mapping[str, Any], columns: Mapping[str, tuple[str, np.ndarray]]) -> str:
    """Header and arrays as base64 of zlib of [length u32 | JSON | arrays], each array on a multiple of 8."""
    arrays = {name: np.ascontiguousarray(array, _KINDS[kind]) for name, (kind, array) in columns.items()}
    table, at = [], 0  # offsets count from where the arrays begin
    for name, array in arrays.items():
        table.append((name, columns[name][0], at, array.size))
        at += -(-array.nbytes // 8) * 8
    text = json.dumps({**header, "columns": table}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = [struct.pack("<I", len(text)), text]
    for array in arrays.values():
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        body += [data, b"\0" * (-len(data) % 8)]
    return base64.b64encode(zlib.compress(b"".join(body))).decode()


def _loss_columns(found: Inspection) -> dict[str, tuple[str, np.ndarray]]:
    """Stretches of rows with loss, cut where runs end."""
    T = found.trie.num_rows
    loss = np.zeros(T + 1, bool)
    loss[found.schedule.entry_row] = True
    begins = np.zeros(T + 1, bool)
    begins[found.runs.start] = True
    edge = np.flatnonzero(begins | (loss != np.concatenate([[False], loss[:-1]])))
    stop = np.append(edge[1:], T)
    kept = loss[edge]
    start, length = edge[kept], (stop - edge)[kept]
    return {
        "lossStart": ("i4", start),
        "lossLength": ("i4", length),
        "lossOffset": ("i4", np.searchsorted(start, np.append(found.runs.start, T))),
    }


def operations_of_rows(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """int64[T] twice: the BACK that runs each row, and the PUSH that does, or -1."""
    operation = np.repeat(np.arange(schedule.num_ops), np.diff(schedule.offset))
    backward, pushed = np.full(schedule.trie.num_rows, -1), np.full(schedule.trie.num_rows, -1)
    is_push = schedule.kind[operation] == PUSH
    pushed[schedule.row[is_push]] = operation[is_push]
    backward[schedule.row[~is_push]] = operation[~is_push]
    return backward, pushed


def _schedule_columns(found: Inspection) -> dict[str, tuple[str, np.ndarray]]:
    """Operations, and pieces of runs whose rows are run by the same ones."""
    schedule, T = found.schedule, found.trie.num_rows
    backward, pushed = operations_of_rows(schedule)
    begins = np.zeros(T, bool)
    begins[found.runs.start] = True
    for operation in (backward, pushed):
        begins[1:] |= np.diff(operation) != 0
    piece = np.flatnonzero(begins)
    return {
        "opKind": ("u1", schedule.kind == BACK),
        "opWidth": ("i4", schedule.width),
        "opRows": ("i4", np.diff(schedule.offset)),
        "opEntries": ("i4", np.diff(schedule.entry_offset)),
        "opHeight": ("i4", stack_heights(schedule)),
        "pieceStart": ("i4", piece),
        "pieceBack": ("i4", backward[piece]),
        "piecePush": ("i4", pushed[piece]),
        "pieceOffset": ("i4", np.searchsorted(piece, np.append(found.runs.start, T))),
    }


def _token_columns(
    found: Inspection, tokenizer: Tokenizer | None
) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, Any]]:
    """The first tokens of every run, as ranks in a list of ids by frequency."""
    runs = found.runs
    cap = _largest_cap(runs.length, TOKENS_KEPT)
    kept = np.minimum(runs.length, cap)
    stop = np.cumsum(kept)
    row = np.arange(int(stop[-1])) + np.repeat(runs.start - (stop - kept), kept)
    ids, inverse, count = np.unique(found.trie.token[row], return_inverse=True, return_counts=True)
    by_frequency = np.argsort(-count, kind="stable")
    rank = np.empty(len(ids), np.int64)
    rank[by_frequency] = np.arange(len(ids))
    listed = ids[by_frequency]
    header: dict[str, Any] = {"keptPerRun": cap}
    columns = {"token": ("u2" if len(ids) <= 65536 else "i4", rank[inverse])}
    if tokenizer is None:
        columns["ids"] = ("i4", listed)
    else:
        header["texts"] = [tokenizer.decode([i]) for i in listed.tolist()]
    return columns, header


def _largest_cap(length: np.ndarray, budget: int) -> int:
    """The largest number such that so many tokens of each run at most are within the budget."""
    low, high = 1, int(length.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(length, middle).sum() <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _subtitle(found: Inspection) -> str:
    subject = found.subject
    rollouts = len(np.unique(subject.rollout))
    tasks = "" if subject.task is None else f" of {len(np.unique(subject.task[subject.rollout])):,} tasks"
    return (
        f"{len(found.lengths):,} sequences from {rollouts:,} rollouts{tasks}; the longest has "
        f"{found.trie.longest_path:,} tokens."
    )


def _cards(found: Inspection) -> str:
    plan = found.plan
    assert plan.stats is not None
    assert plan.chunk is not None
    cards = [
        (f"{found.dedupe:.1f} x", "dedupe: tokens over distinct prefixes"),
        (f"{found.flat_tokens:,}", "tokens in all sequences"),
        (f"{found.trie.num_rows:,}", "tree tokens"),
        (f"{len(found.schedule.entry):,}", "tokens with loss"),
        (f"{plan.work:.3f}", f"work at chunk {plan.chunk:,} (least possible {plan.bound:.3f})"),
        (f"{plan.stats.peak_stack_rows:,}", "most rows on the stack"),
    ]
    if plan.peak_bytes is not None:
        cards.append((gibibytes(plan.peak_bytes), "stack, cotangents, residuals"))
    return "".join(
        f'<div class="card"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in cards
    )


def _schedule_words(found: Inspection) -> str:
    plan, stats = found.plan, found.plan.stats
    assert stats is not None
    return (
        f"Strategy {plan.name}, chunks of {plan.chunk:,}: {stats.backs:,} BACK and {stats.pushes:,} PUSH "
        "operations, left to right, each as wide as its work. Click one to see in the tree above "
        "what is on the stack then, what runs, and what is done; wheel and drag as there."
    )


def _plan_table(plans: Sequence[Plan], found: Inspection, first: str) -> str:
    with_bytes = found.row_bytes is not None
    heads = [first, "work", "least", "BACK", "PUSH", "padding", "stack rows"] + ["bytes"] * with_bytes
    longest = max(plan.work for plan in plans if plan.stats is not None)
    rows = []
    for plan in plans:
        stats = plan.stats
        cells = [plan.name if first == "method" else f"{plan.chunk:,}"]
        cells += [f"{plan.work:.3f}", f"{plan.bound:.3f}"]
        if stats is None:
            cells += [""] * (4 + with_bytes)
        else:
            cells += [f"{stats.backs:,}", f"{stats.pushes:,}", percent(plan.padding)]
            cells.append(f"{stats.peak_stack_rows:,}")
            cells += [] if plan.peak_bytes is None else [gibibytes(plan.peak_bytes)]
        shown = plan.name == found.plan.name and plan.chunk == found.plan.chunk
        rows.append(table_row(cells, shown, f"<td class=bars>{_bar(plan, longest)}</td>"))
    return table(heads, rows, "<th class=bars>work</th>")


def _bar(plan: Plan, longest: float) -> str:
    """Backward in blue, pushed in green; a bar that is cut off ends in a fade."""
    if plan.stats is None:
        parts = [(min(1.0, plan.work / longest), "#8a97a3")]
        if plan.work > longest:
            parts = [(0.92, "#8a97a3"), (0.08, "linear-gradient(to right, #8a97a3, #ffffff)")]
    else:
        forward = plan.stats.forward_tokens_executed / (3 * plan.stats.tree_tokens)
        parts = [((plan.work - forward) / longest, "#2f74b5"), (forward / longest, "#2a9d8f")]
    bars = "".join(f'<i style="width:{100 * share:.2f}%;background:{colour}"></i>' for share, colour in parts)
    return f"<div class=bar>{bars}</div>"


def _saved(found: Inspection) -> str:
    saved = {why: count for why, count in found.saved.items() if count}
    total = sum(saved.values())
    if not total:
        return '<p class="sub">No two sequences have a token in common.</p>'
    bars = "".join(
        f'<i style="flex:{count / total:.6f};background:{_COLOURS[why]}" title="{count:,} tokens"></i>'
        for why, count in saved.items()
    )
    keys = "".join(
        f'<span><i style="background:{_COLOURS[why]}"></i>{count:,} ({percent(count / total)}): '
        f"{escape(REASONS[why])}</span>"
        for why, count in saved.items()
    )
    return (
        f'<p class="sub">{total:,} of {found.flat_tokens:,} tokens need not be computed again, because of</p>'
        f'<div class="stack">{bars}</div><div class="key">{keys}</div>'
        f'<div class="chart" style="margin-top:14px">{depth_picture(found).svg()}</div>'
    )


def _rank_table(found: Inspection) -> str:
    heads = ["ranks", "largest", "over the bound", "run more than once", "speed-up"]
    rows = []
    for assignment in found.ranks:
        report = assignment.report
        cells = [
            f"{report.num_ranks}",
            f"{report.max_tree_tokens:,}",
            percent(report.imbalance - 1),
            percent(report.lost_sharing / report.total_tree_tokens),
            f"{report.num_ranks * report.efficiency:.2f} x",
        ]
        rows.append(table_row(cells, report.num_ranks == found.assignment.report.num_ranks))
    return table(heads, rows)
