"""Everything that is read from outside, fed with what nobody meant: it is read, or refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dta_jax.chat_template import compile_template
from dta_jax.checkpoint import check_run
from dta_jax.config import load_config
from dta_jax.convert import read_logs
from dta_jax.errors import InputError
from dta_jax.generation.http import CallError
from dta_jax.hf_config import config_from_hf, read_config
from dta_jax.hf_weights import load_params
from dta_jax.metrics import read_metrics
from dta_jax.rollouts import load_rollouts
from dta_jax.settings import Train
from dta_jax.tokenizer import load_tokenizer
from tests.chat_folder import write_chat_folder
from tests.test_malformed import MODEL, SHARDED, good
from tests.test_remote import GOOD_SGLANG, GOOD_VLLM, read_good_sglang, read_good_vllm

ROOT = Path(__file__).parents[2]
# A folder per test is enough: every example overwrites the same file.
often = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """Bytes with a few of them changed, dropped or put in."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(result)))
        match draw(st.sampled_from(["change", "cut", "drop", "insert"])):
            case "change" if at < len(result):
                result[at] = draw(st.integers(0, 255))
            case "cut":
                del result[at:]
            case "drop":
                del result[at : at + draw(st.integers(1, 20))]
            case "insert":
                result[at:at] = draw(st.binary(max_size=20))
    return bytes(result)


@st.composite
def with_other_values(draw, values: dict) -> dict:
    """JSON of the same form, some values replaced, somewhere inside."""
    result = json.loads(json.dumps(values))
    for _ in range(draw(st.integers(1, 3))):
        target = result
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(target[key], dict | list) and draw(st.booleans()):
                target = target[key]
                continue
            target[key] = draw(anything)
            break
    return result


def one_line(error: Exception) -> None:
    assert str(error)
    assert "\n" not in str(error)


def good_npz(folder: Path) -> bytes:
    np.savez(folder / "good.npz", **good())
    return (folder / "good.npz").read_bytes()


@often
@given(data=st.data())
def test_rollout_bytes(tmp_path, data):
    file = tmp_path / "rollouts.npz"
    file.write_bytes(data.draw(damaged(good_npz(tmp_path))))
    try:
        assert load_rollouts(file).num_rollouts >= 0
    except InputError as error:
        one_line(error)


@often
@given(
    name=st.sampled_from([*good(), "trial", "logprobs", "versions", "episode", "step_reward"]),
    array=arrays.arrays(
        arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=10)
    ),
)
def test_rollout_arrays(tmp_path, name, array):
    file = tmp_path / "rollouts.npz"
    np.savez(file, **{**good(), name: array})
    try:
        assert load_rollouts(file).num_rollouts >= 0
    except InputError as error:
        one_line(error)


@often
@given(values=with_other_values(json.loads((MODEL / "config.json").read_text())))
def test_model_configs(values):
    try:
        assert config_from_hf(values).num_hidden_layers >= 1
    except InputError as error:
        one_line(error)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00003.safetensors"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_model_weights(tmp_path, name, data):
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(SHARDED, folder)
    good_bytes = (SHARDED / name).read_bytes()
    # What is in the first bytes says how the rest is read.
    head = data.draw(damaged(good_bytes[:600]))
    (folder / name).write_bytes(head + (good_bytes[600:] if data.draw(st.booleans()) else b""))
    try:
        load_params(folder, read_config(folder))
    except InputError as error:
        one_line(error)


@often
@given(data=st.data())
def test_tokenizers(tmp_path, data):
    if not (tmp_path / "good.json").exists():
        write_chat_folder(tmp_path)
        (tmp_path / "tokenizer.json").rename(tmp_path / "good.json")
    good_bytes = (tmp_path / "good.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(data.draw(damaged(good_bytes)))
    try:
        load_tokenizer(tmp_path)
    except InputError as error:
        one_line(error)


FRAGMENTS = st.sampled_from(
    [
        *(
            "{{ messages[0].content }}",
            "{% for m in messages %}",
            "{% endfor %}",
            "{% if tools %}",
            "{% endif %}",
        ),
        *("{{ 1 / 0 }}", "{{ messages[9].content.x.y }}", "{{ x() }}", "{% set a = 'b' * 3 %}", "{{ a[0] }}"),
        *("{{ ''.__class__ }}", "{{ messages | tojson }}", "{{ range(5) | list }}", "{{", "%}", "{# ", "\n"),
    ]
)


@often
@given(parts=st.lists(FRAGMENTS | st.text(max_size=5), max_size=6))
def test_chat_templates(parts):
    try:
        template = compile_template("".join(parts), source="template")
        assert isinstance(template.render([{"role": "user", "content": "hello"}]), str)
    except InputError as error:
        one_line(error)


@often
@given(
    values=with_other_values(
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "ok", "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "reward": 1.0,
            "task_id": "a",
        }
    )
)
def test_message_logs(tmp_path, values):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(values) + "\n")
    try:
        assert len(read_logs(file)) <= 1
    except InputError as error:
        one_line(error)


BINDINGS = st.builds(
    "{}.{} = {}".format,
    st.sampled_from(["Train", "AdamW", "Planner", "Qwen3Config", "SyntheticRollouts", "Checkpoints"])
    | st.text(max_size=5),
    st.sampled_from(["steps", "seed", "loss", "chunk_size", "learning_rate", "vocab_size", "turns", "keep"])
    | st.text(max_size=5),
    st.sampled_from(
        ["1", "-1", "0", "1e999", "None", "True", "'a'", "@NLL()", "@Train()", "%VOCAB", "[1, 2]", "{"]
    )
    | st.text(max_size=5),
)


@often
@given(bindings=st.lists(BINDINGS, min_size=1, max_size=3))
def test_configs(bindings):
    try:
        assert isinstance(load_config(ROOT / "configs" / "offline.gin", bindings), Train)
    except InputError as error:
        one_line(error)


@pytest.mark.parametrize(("read", "answer"), [(read_good_sglang, GOOD_SGLANG), (read_good_vllm, GOOD_VLLM)])
@often
@given(data=st.data())
def test_replies_of_engines(read, answer, data):
    try:
        reply = read(data.draw(with_other_values(answer)))
    except CallError as error:
        one_line(error)
    else:
        assert len(reply.tokens) == len(reply.logprobs)
        assert np.isfinite(reply.logprobs).all()
        assert ((reply.tokens >= 0) & (reply.tokens < 8)).all()


@often
@given(data=st.data())
def test_metrics(tmp_path, data):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(data.draw(damaged(b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')))
    try:
        assert len(read_metrics(file)) <= 40
    except InputError as error:
        one_line(error)


@often
@given(run=anything | with_other_values({"arrays": {"x": {"dtype": "float32", "shape": [2]}}, "step": 1}))
def test_records_of_checkpoints(run):
    try:
        check_run(Path("7"), run)
    except InputError as error:
        one_line(error)
