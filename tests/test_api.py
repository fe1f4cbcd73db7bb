"""The public names: all documented, all there, and quick to import; the documented examples are exact."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import dta_jax
from dta_jax.reference import dense_value_and_grad
from dta_jax.types import Samples
from tests.trees import largest_error

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "api.md").read_text()


def run_block(number):
    """What one of the documented examples leaves behind."""
    block = re.findall(r"^```python\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE)[number]
    namespace = {"__name__": "example"}
    sys.modules["example"] = type(sys)("example")  # dataclasses look their module up
    try:
        exec(block, namespace)
    finally:
        del sys.modules["example"]
    return namespace


def test_every_public_name_is_there_and_documented():
    for name in dta_jax.__all__:
        value = getattr(dta_jax, name)
        assert value.__doc__, name
        assert value.__module__.startswith("dta_jax."), name
    tables = DOCS.split("## Names")[1]
    documented = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE))))
    assert documented == set(dta_jax.__all__)
    assert set(dta_jax.__all__) <= set(dir(dta_jax))


def test_types_and_values_are_imported_from_the_same_places():
    tree = ast.parse((ROOT / "dta_jax" / "__init__.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dta_jax."):
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    assert set(found) == set(dta_jax.__all__)
    for name, (module, attribute) in found.items():
        assert getattr(dta_jax, name) is getattr(importlib.import_module(module), attribute), name


def test_no_public_name_is_a_modules():
    modules = {path.stem for path in (ROOT / "dta_jax").iterdir()}
    assert not modules & set(dta_jax.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dta_jax' has no attribute 'build_tree'"):
        _ = dta_jax.build_tree


def test_importing_loads_nothing_and_gradients_need_no_optional_package():
    code = (
        "import sys, dta_jax\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "for name in dta_jax.__all__: getattr(dta_jax, name)\n"
        "loaded = {'gin', 'orbax', 'tokenizers', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_version_is_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.get("version", dta_jax.__version__) == dta_jax.__version__


def test_the_documented_trainer_lowers_its_loss(capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps with int32
        found = run_block(0)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert abs(losses[0]) < 1e-6  # every ratio is 1, and the advantages add up to 0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < -1e-3
    assert jax.tree.structure(found["params"]) == jax.tree.structure(found["result"].grads)


def test_the_documented_models_gradient_is_that_of_dense_training():
    found = run_block(1)
    samples = found["samples"]
    assert isinstance(samples, Samples)
    dense = dense_value_and_grad(found["model"], found["params"], samples, dta_jax.NLL(), pad_to=4)
    result = found["result"]
    np.testing.assert_allclose(float(result.loss), float(dense.loss), rtol=1e-5)
    np.testing.assert_allclose(result.logp, dense.logp, rtol=1e-5)
    assert largest_error(result.grads, dense.grads) < 2e-5
