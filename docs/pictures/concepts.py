"""Draws the pictures of docs/concepts.md: python docs/pictures/concepts.py [FOLDER]

What is drawn is computed: the tree, the schedule and the masks of four small conversations are those that
training would use. The last two are of generated rollouts, as `python -m dta_jax.inspect` shows them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from dta_jax.inspect import subject_of
from dta_jax.inspect_pictures import (
    BACK_COLOUR,
    LOSS_COLOUR,
    PUSH_COLOUR,
    SOFT,
    schedule_picture,
    trie_picture,
)
from dta_jax.inspection import inspect_samples
from dta_jax.picture import Line, Picture, Rect, Text
from dta_jax.schedule import compile_schedule, operands
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from dta_jax.types import BACK, NO_PARENT, NO_SLOT, PUSH, Schedule, Trie

LETTERS = "SUATBCDVE"  # of token 1, 2, ...: system, user, answer, tool, ...
LOSS = "ABCDE"  # what the policy said
CONVERSATIONS = ("SSUUAAATTBBB", "SSUUAAATTCC", "SSUUDDD", "SSVVEEE")
CHUNK = 6
PLAIN = "#dbe3ec"
BACKS = ("#f4a261", "#8ecae6", "#a7c957", "#cdb4db", "#ffd166", "#e5989b")
CELL, GAP = 34, 4
STEP = CELL + GAP


def example() -> tuple[Trie, Schedule]:
    """The conversations' tree, and a schedule in chunks of `CHUNK`; every answer has loss."""
    trie = build_trie([np.array([LETTERS.index(c) + 1 for c in text]) for text in CONVERSATIONS])
    loss = np.flatnonzero([letter_of(trie, row) in LOSS for row in range(trie.num_rows)])
    return trie, compile_schedule(trie, loss.astype(np.int32), chunk_size=CHUNK)


def letter_of(trie: Trie, row: int) -> str:
    return LETTERS[trie.token[row] - 1]


def cell(x: float, y: float, text: str, fill: str, below: str = "") -> list[Rect | Line | Text]:
    """One token: a box with its letter and, smaller, a number."""
    shapes: list[Rect | Line | Text] = [Rect(x, y, CELL, CELL, fill)]
    shapes.append(Text(x + CELL / 2, y + (20 if below else 22), text, 14, "middle", bold=True))
    return [*shapes, Text(x + CELL / 2, y + 31, below, 9, "middle", SOFT)] if below else shapes


def lanes(trie: Trie) -> np.ndarray:
    """The line that each row is drawn on: a branch goes on in its first child's."""
    lane, used = np.zeros(trie.num_rows, np.int64), 0
    for row in range(1, trie.num_rows):
        first = trie.parent[row] == row - 1
        used += not first
        lane[row] = lane[row - 1] if first else used
    return lane


def tree_shapes(trie: Trie, left: float, top: float, fills: list[str]) -> list[Rect | Line | Text]:
    """The tree from left to right, rows numbered; branches hang from the row that they leave."""
    lane, shapes = lanes(trie), []
    for row in range(trie.num_rows):
        x, y = left + STEP * int(trie.depth[row]), top + (STEP + 10) * int(lane[row])
        parent = int(trie.parent[row])
        if parent != NO_PARENT and parent != row - 1:
            start = left + STEP * int(trie.depth[parent]) + CELL - 6
            above = top + (STEP + 10) * int(lane[parent]) + CELL
            shapes.append(Line(((start, above), (start, y + CELL / 2), (x, y + CELL / 2)), SOFT))
        shapes += cell(x, y, letter_of(trie, row), fills[row], str(row))
    return shapes


def tree_picture() -> Picture:
    """Conversations as they are recorded, and as one tree."""
    trie, _ = example()
    picture = Picture(600, 450, "Four conversations and their prefix tree")
    tokens = sum(map(len, CONVERSATIONS))
    words = f"Four conversations, {tokens} tokens; orange was said by the policy and has loss"
    picture.shapes.append(Text(16, 24, words, 13, bold=True))
    for i, text in enumerate(CONVERSATIONS):
        for k, letter in enumerate(text):
            fill = LOSS_COLOUR if letter in LOSS else PLAIN
            picture.shapes += cell(16 + STEP * k, 38 + STEP * i, letter, fill)
    words = f"As a tree: {trie.num_rows} rows, numbered in depth-first preorder"
    picture.shapes.append(Text(16, 240, words, 13, bold=True))
    fills = [LOSS_COLOUR if letter_of(trie, row) in LOSS else PLAIN for row in range(trie.num_rows)]
    picture.shapes += tree_shapes(trie, 16, 256, fills)
    return picture


def names_of(schedule: Schedule) -> list[str]:
    """PUSH 1, PUSH 2, BACK 1, ... in the order of execution."""
    count, names = {PUSH: 0, BACK: 0}, []
    for kind in schedule.kind.tolist():
        count[kind] += 1
        names.append(f"{'BACK' if kind == BACK else 'PUSH'} {count[kind]}")
    return names


def rows_of(schedule: Schedule, op: int) -> np.ndarray:
    return schedule.row[schedule.offset[op] : schedule.offset[op + 1]]


def chunks_picture() -> Picture:
    """Which BACK runs each row, and which PUSH ran it before."""
    trie, schedule = example()
    fills, pushed = [""] * trie.num_rows, {}
    back = 0
    for op, name in enumerate(names_of(schedule)):
        for row in rows_of(schedule, op).tolist():
            if schedule.kind[op] == PUSH:
                pushed[row] = name.replace("PUSH ", "P")
            else:
                fills[row] = BACKS[back]
        back += int(schedule.kind[op] == BACK)
    picture = Picture(760, 262, "Chunks of a schedule")
    words = f"Chunks of {CHUNK}: one colour, one BACK; P1 and P2 are pushed before"
    picture.shapes += [Text(16, 24, words, 13, bold=True), *tree_shapes(trie, 16, 50, fills)]
    lane = lanes(trie)
    for row, name in pushed.items():
        x, y = 16 + STEP * int(trie.depth[row]), 50 + (STEP + 10) * int(lane[row])
        picture.shapes += [Rect(x, y - 5, CELL, 5, PUSH_COLOUR), Text(x, y - 8, name, 9, fill=PUSH_COLOUR)]
    back = 0
    for op, name in enumerate(names_of(schedule)):
        fill = PUSH_COLOUR if schedule.kind[op] == PUSH else BACKS[back]
        back += int(schedule.kind[op] == BACK)
        y = 56 + 32 * op
        text = f"{op + 1}. {name}: rows {spans(rows_of(schedule, op))}"
        picture.shapes += [Rect(500, y, 16, 16, fill), Text(524, y + 13, text, 13)]
    return picture


def spans(rows: np.ndarray) -> str:
    """Ascending numbers in few words: 4-6, 14-16."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def stack_picture() -> Picture:
    """Slots of the stack after each operation, with the rows whose state they hold."""
    trie, schedule = example()
    names = names_of(schedule)
    slots = int(schedule.slot.max()) + 1
    wide, high, left, top = 92, 24, 74, 66
    picture = Picture(left + wide * len(names) + 16, top + high * slots + 16, "The stack over time")
    words = "The stack after each operation: rows whose keys, values and hidden states it holds"
    picture.shapes.append(Text(16, 24, words, 13, bold=True))
    held = np.full(slots, NO_SLOT)
    for op, name in enumerate(names):
        x = left + wide * op
        kind = schedule.kind[op]
        colour = PUSH_COLOUR if kind == PUSH else BACK_COLOUR
        picture.shapes.append(Text(x + 40, 54, name, 12, "middle", colour, bold=True))
        slot = schedule.slot[schedule.offset[op] : schedule.offset[op + 1]]
        rows = rows_of(schedule, op)
        held[slot[slot != NO_SLOT]] = rows[slot != NO_SLOT] if kind == PUSH else NO_SLOT
        for s in range(slots):
            y = top + high * (slots - 1 - s)
            if not op:
                picture.shapes.append(Text(left - 10, y + 16, f"slot {s}", 11, "end", SOFT))
            fresh = kind == PUSH and s in slot
            fill = "#f2f4f7" if held[s] == NO_SLOT else PUSH_COLOUR if fresh else "#a9d8cf"
            picture.shapes.append(Rect(x, y, wide - 12, high - 3, fill))
            if held[s] != NO_SLOT:
                text = f"{letter_of(trie, int(held[s]))} {held[s]}"
                picture.shapes.append(Text(x + 40, y + 15, text, 11, "middle"))
    return picture


def mask_picture() -> Picture:
    """Which keys the rows of the second BACK see: two numbers per key describe it."""
    trie, schedule = example()
    op = names_of(schedule).index("BACK 2")
    own = list(operands(schedule))[op]
    rows = rows_of(schedule, op)
    held = np.full(schedule.stack_slots, NO_SLOT)
    for before in range(op):
        slot = schedule.slot[schedule.offset[before] : schedule.offset[before + 1]]
        kept = slot != NO_SLOT
        held[slot[kept]] = rows_of(schedule, before)[kept] if schedule.kind[before] == PUSH else NO_SLOT
    held[own.slot[own.slot != NO_SLOT]] = NO_SLOT
    live = np.flatnonzero(held != NO_SLOT)
    keys = [*live.tolist(), *(schedule.stack_slots + np.arange(own.count)).tolist()]
    labels = [*held[live].tolist(), *rows.tolist()]
    size, left, top = 34, 96, 88
    picture = Picture(left + size * len(keys) + 40, top + size * own.count + 34, "The mask of one operation")
    words = "BACK 2: which keys each of its rows sees"
    picture.shapes += [
        Text(16, 24, words, 13, bold=True),
        Text(left, 52, "keys on the stack", 11, fill=SOFT),
        Text(left + size * len(live) + 12, 52, "own keys", 11, fill=SOFT),
    ]
    for k, (key, label) in enumerate(zip(keys, labels, strict=True)):
        x = left + size * k + (12 if k >= len(live) else 0)
        name = f"{letter_of(trie, int(label))} {label}"
        picture.shapes.append(Text(x + size / 2 - 2, 76, name, 10, "middle"))
        for q in range(own.count):
            y = top + size * q
            sees = own.q_start[key] <= q < own.q_end[key]
            fill = (PUSH_COLOUR if k < len(live) else BACK_COLOUR) if sees else "#f2f4f7"
            picture.shapes.append(Rect(x, y, size - 4, size - 4, fill))
    for q in range(own.count):
        name = f"row {letter_of(trie, int(rows[q]))} {rows[q]}"
        picture.shapes.append(Text(left - 12, top + size * q + 20, name, 11, "end"))
    return picture


def pictures() -> dict[str, Picture]:
    """All pictures by file name."""
    spec = SyntheticRollouts(tasks=6, trials=4, turns=5, system_tokens=120, completion_tokens=24, seed=3)
    found = inspect_samples(subject_of(generate_rollouts(spec), "generated rollouts"), chunk_size=256)
    return {
        "concept_tree": tree_picture(),
        "concept_chunks": chunks_picture(),
        "concept_stack": stack_picture(),
        "concept_mask": mask_picture(),
        "concept_rollouts": trie_picture(found),
        "concept_schedule": schedule_picture(found),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, picture in pictures().items():
        (folder / f"{name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
