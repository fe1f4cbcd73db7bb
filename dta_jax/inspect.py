"""Shows what rollouts share and how they would run: `python -m dta_jax.inspect ROLLOUTS.npz --out DIR`.

    DIR/index.html            one page that needs nothing else: the trie, the schedule, and advice in words
    DIR/trie.svg, .png        what the page shows, as pictures (PNG where matplotlib is installed)
    DIR/schedule.svg, .png
    DIR/ranks.svg, .png

Instead of a file, a run's folder can be given (one with `operative_config.gin`): then the batch of one of
its steps is shown, with the run's own chunk size, strategy, model and number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dta_jax.bench import task_range
from dta_jax.config import load_config
from dta_jax.errors import InputError, run_command
from dta_jax.hf_config import read_config
from dta_jax.inspect_advice import advice
from dta_jax.inspect_page import inspection_page
from dta_jax.inspect_pictures import ranks_picture, schedule_picture, trie_picture
from dta_jax.inspection import Inspection, Subject, inspect_samples
from dta_jax.learner import model_config
from dta_jax.picture import can_write_png
from dta_jax.qwen3 import Qwen3, preset
from dta_jax.recorded import load_source
from dta_jax.rollouts import Rollouts, load_rollouts, samples_from_rollouts
from dta_jax.settings import LiveRollouts
from dta_jax.tokenizer import load_tokenizer

DEFAULT_CHUNK = 2048
CONFIG_FILE = "operative_config.gin"
SAVED_ROLLOUTS = "rollouts"  # a folder in a run's


@dataclass(frozen=True, eq=False)
class Target:
    """What to inspect and how: from the arguments, else from the run."""

    subject: Subject
    chunk_size: int
    strategy: str
    ranks: int | None
    model: Qwen3 | None


def subject_of(rollouts: Rollouts, name: str) -> Subject:
    """All completions of some rollouts.

    Raises:
      InputError: none of their tokens can have loss.
    """
    samples = samples_from_rollouts(rollouts)
    if not len(samples.sequence):
        raise InputError(name, "completion_spans", expected="tokens with loss", actual="none")
    first = np.searchsorted(samples.sequence, np.arange(len(samples.sequences)))
    rollout = samples.values["rollout"][first].astype(np.int64)
    completion = samples.values["completion"][first].astype(np.int64)
    before = np.searchsorted(np.sort(rollouts.completion_spans[:, 0]), rollout)
    return Subject(
        name, samples, rollout, completion - before, rollouts.task_id, rollouts.trial, rollouts.reward
    )


def target_of_run(folder: Path, step: int | None, tasks: str | None) -> Target:
    """The batch of a step of a run, and what the run would do with it.

    Args:
      folder: the run's.
      step: from 1; None takes the first, or, of a run that makes its rollouts, the newest that it has saved.
      tasks: must be None: a run takes its own.

    Raises:
      InputError: no config, one that cannot be used, a step below 1 or one whose rollouts are not kept.
    """
    if tasks is not None:
        expected = "no --tasks with a run's folder: a run takes its own"
        raise InputError("--tasks", "value", expected=expected, actual=repr(tasks))
    if step is not None and step < 1:
        raise InputError("--step", "value", expected="at least 1", actual=step)
    train = load_config(folder / CONFIG_FILE)
    config = model_config(train)
    if isinstance(train.rollouts, LiveRollouts):
        file = saved_batch(folder, step)
        rollouts, name = load_rollouts(file), f"{folder}, step {file.stem}"
    else:
        source = load_source(train, config.vocab_size)
        step = step or 1
        rollouts, name = source.rollouts.take(np.sort(source.rows(step)).tolist()), f"{folder}, step {step}"
    ranks = train.mesh.data if train.mesh.data > 1 else None
    subject = subject_of(rollouts, name)
    chunk_size, strategy = train.planner.chunk_size, train.planner.strategy
    if isinstance(chunk_size, str):
        chunk_size = DEFAULT_CHUNK
    if strategy == "auto":
        strategy = "packed"
    return Target(subject, chunk_size, strategy, ranks, Qwen3(config))


def saved_batch(folder: Path, step: int | None) -> Path:
    """The rollouts that a run saved of a step, `FOLDER/rollouts/STEP.npz`; None takes the newest.

    Raises:
      InputError: they were not saved.
    """
    saved = {int(path.stem): path for path in (folder / SAVED_ROLLOUTS).glob("*.npz") if path.stem.isdigit()}
    if not saved or (step is not None and step not in saved):
        wanted = "the rollouts of a step" if step is None else f"those of step {step}"
        steps = ", ".join(map(str, sorted(saved)[-5:])) or "none"
        hint = "LiveRollouts.save_every says how often they are saved"
        raise InputError(folder / SAVED_ROLLOUTS, "steps", expected=wanted, actual=steps, hint=hint)
    return saved[max(saved) if step is None else step]


def target_of_file(path: Path, tasks: str | None) -> Target:
    """All rollouts of a file, or those of some tasks."""
    rollouts = load_rollouts(path)
    if tasks is not None:
        rollouts = rollouts.select(task_range(tasks))
    name = path.name if tasks is None else f"{path.name}, tasks {tasks}"
    return Target(subject_of(rollouts, name), DEFAULT_CHUNK, "packed", None, None)


def write_inspection(found: Inspection, page: str, out: Path) -> list[Path]:
    """Writes page and pictures to a folder, which is made if it is not there.

    Raises:
      InputError: the folder cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        index = out / "index.html"
        index.write_text(page, encoding="utf-8")
        written = [index]
        for name, picture in (
            ("trie", trie_picture(found)),
            ("schedule", schedule_picture(found)),
            ("ranks", ranks_picture(found)),
        ):
            written += picture.write(out / name)
    except OSError as error:
        raise InputError("--out", str(out), expected="a folder to write to", actual=error.strerror) from None
    return written


def _parser() -> argparse.ArgumentParser:
    about = "Shows what rollouts share and how they would run: an HTML page and pictures."
    parser = argparse.ArgumentParser(prog="python -m dta_jax.inspect", description=about)
    add = parser.add_argument
    add("target", type=Path, metavar="ROLLOUTS.npz|RUN", help="recorded rollouts, or the folder of a run")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the page and the pictures")
    add("--chunk", type=int, metavar="N", help=f"chunk size (default: {DEFAULT_CHUNK}, or the run's)")
    add("--strategy", help="the schedule to show (default: packed, or the run's)")
    add(
        "--ranks",
        type=int,
        metavar="K",
        help="data-parallel ranks to distribute over (default: 4, or the run's)",
    )
    add("--tasks", metavar="0-3", help="only these task ids")
    add("--step", type=int, metavar="N", help="of a run: which step (default: 1, or the newest saved)")
    add("--model", metavar="NAME|FOLDER", help="count bytes for this preset or Hugging Face folder")
    add("--tokenizer", type=Path, metavar="FOLDER", help="show text instead of token ids")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    args = _parser().parse_args(arguments)
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    if args.target.is_dir():
        target = target_of_run(args.target, args.step, args.tasks)
    else:
        target = target_of_file(args.target, args.tasks)
    model = target.model
    if args.model is not None:
        model = Qwen3(read_config(args.model) if Path(args.model).is_dir() else preset(args.model))
    found = inspect_samples(
        target.subject,
        chunk_size=target.chunk_size if args.chunk is None else args.chunk,
        strategy=args.strategy or target.strategy,
        num_ranks=target.ranks if args.ranks is None else args.ranks,
        model=model,
    )
    written = write_inspection(found, inspection_page(found, tokenizer), args.out)
    print("\n".join(advice(found)))
    print("wrote", ", ".join(str(path) for path in written))
    if not can_write_png():
        print("no PNG pictures: they need matplotlib (pip install 'dta_jax[plots]')", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
