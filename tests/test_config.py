"""Gin configs: what they build, and that everything wrong in them is said before anything is loaded."""

import ast
import re
from pathlib import Path

import pytest

from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.config import BUILDERS, changed_bindings, load_config, operative_config
from dta_jax.errors import InputError
from dta_jax.losses import NLL, EntropyBonus, KLPenalty, PPOClip
from dta_jax.objective import Aggregate, GroupNormalized
from dta_jax.qwen3 import Qwen3Config
from dta_jax.settings import AdamW, RecordedRollouts, Train
from dta_jax.synthetic import SyntheticRollouts

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.gin"))
GIVEN = {
    "quickstart.gin": [],
    "offline.gin": [],
    "bandit.gin": [],
    "sft.gin": ["ROLLOUTS = 'some.npz'"],
    "tau_airline_offline.gin": ["ROLLOUTS = 'some.npz'"],
    "tau2_mock_sft.gin": ["ROLLOUTS = 'some.npz'"],
}
OF_TAU2 = ["tau2_mock.gin", "tau2_mock_rl.gin"]  # need the package: tests/tau2 runs them

TEXT = """
VOCAB = 64
Train.rollouts = @SyntheticRollouts()
Train.model = @Qwen3Config()
Train.loss = @PPOClip()
Train.advantages = @GroupNormalized()
SyntheticRollouts.vocab_size = %VOCAB
Qwen3Config.vocab_size = %VOCAB
AdamW.learning_rate = 1e-3
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "c.gin"
    path.write_text(TEXT)
    return path


def test_a_config_builds_dataclasses_and_keeps_defaults(config):
    assert load_config(config) == Train(
        rollouts=SyntheticRollouts(vocab_size=64),
        model=Qwen3Config(vocab_size=64),
        loss=PPOClip(),
        advantages=GroupNormalized(),
        aggregate=Aggregate(),
        optimizer=AdamW(learning_rate=1e-3),
    )


def test_overrides_win_and_do_not_stay(config):
    changed = load_config(config, ["VOCAB = 128", "Train.steps = 3", "PPOClip.eps_high = 0.28"])
    assert (changed.rollouts.vocab_size, changed.model.vocab_size) == (128, 128)
    assert (changed.steps, changed.loss.eps_high) == (3, 0.28)
    assert load_config(config).steps == 100


def test_losses_nest(config):
    loss = load_config(
        config,
        [
            "Train.loss = @Sum()",
            "Sum.terms = [@OffPolicy(), @KLPenalty(), @EntropyBonus()]",
            "OffPolicy.loss = @PPOClip()",
            "PPOClip.anchor = 'prox_logp'",
            "BehaviourWeight.high = 5",
            "KLPenalty.coef = 0.1",
            "EntropyBonus.coef = 0.01",
        ],
    ).loss
    assert loss == Sum(
        (
            OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(high=5)),
            KLPenalty(0.1),
            EntropyBonus(0.01),
        )
    )
    assert hash(loss) == hash(Sum(loss.terms))


def test_macros_stand_in_lists_and_in_macros(config):
    bindings = ["Train.loss = @Sum()", "Sum.terms = [%POLICY, @KLPenalty()]", "POLICY = %CLIP"]
    bindings += ["CLIP = @PPOClip()", "KLPenalty.coef = 0.1"]
    assert load_config(config, bindings).loss == Sum((PPOClip(), KLPenalty(0.1)))
    with pytest.raises(InputError, match=r"Sum\.terms: expected a list of .*; got \[3, @KLPenalty\(\)\]"):
        load_config(config, [*bindings[:-2], "CLIP = 3", "KLPenalty.coef = 0.1"])
    with pytest.raises(InputError, match="CLIP: expected a value; got a macro that names itself"):
        load_config(config, [*bindings[:-2], "CLIP = %POLICY", "KLPenalty.coef = 0.1"])


def test_a_required_macro_may_be_passed_by(config):
    config.write_text(TEXT + "SIZE = %gin.REQUIRED\nSyntheticRollouts.tasks = %SIZE\n")
    with pytest.raises(InputError, match=r"c\.gin:10: SIZE: expected a value; got none"):
        load_config(config)
    assert load_config(config, ["SyntheticRollouts.tasks = 3"]).rollouts.tasks == 3
    assert load_config(config, ["SIZE = 4"]).rollouts.tasks == 4


def test_files_can_include_files(config, tmp_path):
    outer = tmp_path / "outer.gin"
    outer.write_text(f"include '{config}'\nTrain.steps = 7\n")
    assert load_config(outer).steps == 7
    outer.write_text(f"include '{config}'\nTrain.step = 7\n")
    with pytest.raises(InputError, match=r"outer\.gin:2: Train\.step: .* did you mean steps\?"):
        load_config(outer)


def test_the_operative_config_builds_the_same_run(config, tmp_path):
    built = load_config(config, ["Train.seed = 5"])
    text = operative_config()
    for bound_by_default in ("Aggregate.kind", "Planner.chunk_size", "Checkpoints.keep", "AdamW.b1"):
        assert f"{bound_by_default} = " in text
    (tmp_path / "operative.gin").write_text(text)
    assert load_config(tmp_path / "operative.gin") == built
    assert changed_bindings(text, operative_config()) == {}


def test_changed_bindings_are_named_with_both_values(config):
    load_config(config)
    before = operative_config()
    load_config(config, ["Train.seed = 5", "Train.loss = @NLL()", "Train.advantages = None"])
    changes = changed_bindings(before, operative_config())
    assert changes["Train.seed"] == ("0", "5")
    assert changes["Train.loss"] == ("@PPOClip()", "@NLL()")
    assert changes["PPOClip.eps_low"] == ("0.2", "none")
    assert "AdamW.learning_rate" not in changes


def test_every_config_of_the_repository_is_known():
    assert [path.name for path in CONFIGS] == sorted([*GIVEN, *OF_TAU2])


@pytest.mark.parametrize("name", GIVEN)
def test_configs_of_the_repository_build_and_say_how_to_run_them(name):
    path = ROOT / "configs" / name
    assert isinstance(load_config(path, GIVEN[name]), Train)
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"python -m dta_jax.train configs/{path.name}" in head


@pytest.mark.parametrize("name", ["sft.gin", "tau_airline_offline.gin"])
def test_recorded_configs_ask_for_their_file(name):
    with pytest.raises(InputError, match=r'ROLLOUTS: expected a value; got none; .* --gin "ROLLOUTS = '):
        load_config(ROOT / "configs" / name)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Trian.steps = 5", r"Trian\.steps: expected one of .*; got Trian; did you mean Train\?"),
        ("Train.step = 5", r"Train\.step: expected one of .*; got step; did you mean steps\?"),
        ("VOCABB = 3", r"macro: expected one of VOCAB; got VOCABB; did you mean VOCAB\?"),
        ("Train.steps = %VOCABB", r"Train\.steps: expected one of VOCAB; got VOCABB; did you mean VOCAB\?"),
        ("Train.loss = @PPOClipp()", r"Train\.loss: .* got PPOClipp; did you mean PPOClip\?"),
        ("Sum.terms = [@NLL(), @PPO()]", r"Sum\.terms: .* got PPO"),
        ("Train.steps = '5'", r"Train\.steps: expected int; got '5' \(str\)"),
        ("Train.steps = 5.0", r"Train\.steps: expected int; got 5\.0 \(float\)"),
        ("Train.steps = True", r"Train\.steps: expected int; got True \(bool\)"),
        ("Train.steps = None", r"Train\.steps: expected int; got None \(NoneType\)"),
        ("Train.steps = @NLL()", r"Train\.steps: expected int; got @NLL\(\)"),
        ("AdamW.b1 = False", r"AdamW\.b1: expected float; got False \(bool\)"),
        ("AdamW.clip_norm = 'no'", r"AdamW\.clip_norm: expected float or None; got 'no' \(str\)"),
        ("GroupNormalized.unbiased = 1", r"GroupNormalized\.unbiased: expected bool; got 1 \(int\)"),
        ("Train.loss = @NLL", r"Train\.loss: expected @NLL\(\) or .*; got @NLL$"),
        ("Train.loss = @AdamW()", r"Train\.loss: expected @NLL\(\) or .*; got @AdamW\(\)"),
        ("Train.model = 'tiny'", r"Train\.model: expected @Qwen3Config\(\) or .*; got 'tiny' \(str\)"),
        ("VOCAB = '3'", r"(Qwen3Config|SyntheticRollouts)\.vocab_size: expected int; got '3' \(str\)"),
        ("Aggregate.kind = 'mean'", r"Aggregate\.kind: expected 'token_mean' or .*; got 'mean' \(str\)"),
        ("RecordedRollouts.tasks = 3", r"RecordedRollouts\.tasks: expected a list of int or None; got 3"),
        ("RecordedRollouts.tasks = [0, 'x']", r"expected a list of int or None; got \[0, 'x'\] \(list\)"),
        ("Train.steps = 0", r"Train\.steps: expected at least 1; got 0"),
        ("AdamW.learning_rate = 1e999", r"AdamW\.learning_rate: expected a finite number .*; got inf"),
        ("AdamW.decay_steps = 0", r"AdamW\.decay_steps: expected None or above warmup_steps=0; got 0"),
        ("PPOClip.eps_low = 2", r"PPOClip\.eps_low: expected a number in \[0, 1\]; got 2"),
        ("Qwen3Config.head_dim = 15", r"Qwen3Config\.head_dim: expected an even number .*; got 15"),
        ("SyntheticRollouts.branching = 2", r"SyntheticRollouts\.branching: expected at most 1; got 2"),
        (
            "Planner.chunk_size = 0",
            r"Planner\.chunk_size: expected 'auto', 1 to 512, or a multiple of 128; got 0",
        ),
        ("Planner.chunk_size = 600", r"Planner\.chunk_size: .* a multiple of 128; got 600"),
        ("Planner.chunk_size = -128", r"Planner\.chunk_size: .* a multiple of 128; got -128"),
        ("Aggregate.divisor = 3", r"Aggregate\.divisor: expected None for token_mean; got 3"),
        (
            "Aggregate.kind = 'constant'",
            r"Aggregate\.divisor: expected a positive number .*; got None",
        ),
        ("Train.steps", r"syntax: expected Name\.field = value; got "),
        ("Train.steps = ", r"syntax: expected Name\.field = value; got "),
        ("RecordedRollouts.path = a.npz", r"syntax: .* got a value that is no literal; text needs quotes"),
        ("Train.steps = [1,", r"syntax: expected Name\.field = value; got "),
        ("Train.steps = 1 +", r"syntax: expected Name\.field = value; got "),
        ("Train.seed = 4294967296", r"Train\.seed: expected 0 to 2\^32 - 1; got 4294967296"),
        ("Qwen3Config.dtype = 'float64'", r"Train\.model: expected one of dtype float32 or bfloat16; got "),
        ("SyntheticRollouts.turns = 1e999", r"turns: expected at most 1000000; got inf"),
        ("a/Train.steps = 5", r"a/Train\.steps: expected a name that is defined and used; got a"),
        ("import os", r"import: expected bindings only; got import os"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(config, binding, message):
    with pytest.raises(InputError) as caught:
        load_config(config, [binding])
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).startswith(f"--gin {binding!r}: ") or "divisor" in message or "dtype" in message
    assert "\n" not in str(caught.value)


def test_scopes_give_one_builder_several_settings(config):
    terms = ["Train.loss = @Sum()", "Sum.terms = [@low/PPOClip(), @high/PPOClip()]"]
    wide = [*terms, "low/PPOClip.eps_low = 0.1", "PPOClip.eps_high = 0.3"]
    assert load_config(config, wide).loss == Sum((PPOClip(0.1, 0.3), PPOClip(0.2, 0.3)))
    before = operative_config()
    load_config(config, [*wide, "low/PPOClip.eps_low = 0.15"])
    assert changed_bindings(before, operative_config()) == {"low/PPOClip.eps_low": ("0.1", "0.15")}
    with pytest.raises(InputError, match=r"lo/PPOClip\.eps_low: expected one of high, low; got lo"):
        load_config(config, [*terms, "lo/PPOClip.eps_low = 0.1"])
    with pytest.raises(InputError, match=r"low/PPOClip\.eps_low: expected float; got 'x' \(str\)"):
        load_config(config, [*terms, "low/PPOClip.eps_low = 'x'", "PPOClip.eps_low = 0.1"])


def test_files_that_include_themselves_are_refused(config, tmp_path):
    config.write_text(f"include '{tmp_path / 'b.gin'}'\n{TEXT}")
    (tmp_path / "b.gin").write_text(f"include '{config}'\n")
    chain = f"{config} -> {tmp_path / 'b.gin'} -> {config}"
    with pytest.raises(InputError, match=f"include: expected .*; got {chain}$"):
        load_config(config)


def test_a_wrong_line_is_named_with_its_number(config):
    config.write_text(TEXT.replace("learning_rate = 1e-3", "learning_rat = 1e-3"))
    with pytest.raises(InputError, match=r"c\.gin:9: AdamW\.learning_rat: .* did you mean learning_rate\?"):
        load_config(config)
    config.write_text(TEXT + "Train.seed = -1\n")
    with pytest.raises(InputError, match=r"c\.gin:10: Train\.seed: expected 0 to 2\^32 - 1; got -1"):
        load_config(config)
    config.write_text(TEXT + "\nTrain:\n  steps = 'x'\n")
    with pytest.raises(InputError, match=r"c\.gin:1[12]: Train\.steps: expected int; got 'x' \(str\)"):
        load_config(config)


def test_what_has_no_default_must_be_bound(config):
    with pytest.raises(InputError, match=r"c\.gin: KLPenalty\.coef: expected float; got no binding"):
        load_config(config, ["Train.loss = @Sum()", "Sum.terms = [@PPOClip(), @KLPenalty()]"])
    config.write_text(TEXT.replace("Train.model = @Qwen3Config()", ""))
    with pytest.raises(InputError, match=r"c\.gin: Train\.model: expected @Qwen3Config\(\) or"):
        load_config(config)
    config.write_text("")
    with pytest.raises(InputError, match=r"c\.gin: Train\.\w+: expected .*; got no binding"):
        load_config(config)


def test_a_loss_and_its_advantages_go_together(config):
    with pytest.raises(InputError, match=r"Train\.advantages: expected None, because NLL does not read"):
        load_config(config, ["Train.loss = @NLL()"])
    with pytest.raises(InputError, match=r"Train\.advantages: .* because PPOClip reads advantages; got None"):
        load_config(config, ["Train.advantages = None"])
    assert load_config(config, ["Train.loss = @NLL()", "Train.advantages = None"]).loss == NLL()


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.gin: file: .* a readable \.gin file; got No such file"):
        load_config(tmp_path / "none.gin")
    with pytest.raises(InputError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.gin: file: .* can't decode"):
        load_config(tmp_path / "binary.gin")


def test_recorded_rollouts_need_a_path_and_numbers_that_fit():
    with pytest.raises(InputError, match=r"RecordedRollouts: path: .* path of an \.npz file; got ''"):
        RecordedRollouts("")
    for vocab_mod in (0, 2**31):
        with pytest.raises(InputError, match=f"vocab_mod: expected None or 1 to 2147483647; got {vocab_mod}"):
            RecordedRollouts("r.npz", vocab_mod=vocab_mod)
    for tasks in ((), (-1,), (0, 2**31)):
        with pytest.raises(InputError, match="tasks: expected None or task ids, 0 to 2147483647; got "):
            RecordedRollouts("r.npz", tasks=tasks)


def test_only_the_config_module_imports_gin():
    importers = set()
    for path in (ROOT / "dta_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "gin" for name in names):
                importers.add(path.name)
    assert importers == {"config.py"}


def test_builders_can_be_hashed_and_compared():
    assert all(cls.__hash__ is not None for cls in BUILDERS.values())
