"""The map in docs/design.md is the package: every module is on it, and imports point upwards only."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dta_jax"


def modules_on_the_map() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text()
    return re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)


def modules() -> dict[str, Path]:
    """By name, without `dta_jax.`; a package's own docstring is no module."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in files}


def imported_modules(path: Path) -> set[str]:
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dta_jax":
            module = node.module.removeprefix("dta_jax").removeprefix(".")
            inside = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= {module} if module in known else inside
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("dta_jax.") for a in node.names if a.name.startswith("dta_jax.")}
    return found


def test_every_module_is_on_the_map_once():
    assert sorted(modules_on_the_map()) == sorted(modules())


def test_imports_point_upwards():
    order = {name: index for index, name in enumerate(modules_on_the_map())}
    down = [
        (name, other)
        for name, index in order.items()
        for other in imported_modules(modules()[name])
        if order[other] >= index
    ]
    assert not down


def test_only_config_imports_gin():
    def imports(path: Path) -> set[str]:
        nodes = ast.walk(ast.parse(path.read_text()))
        return {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}

    assert [name for name, path in modules().items() if "gin" in imports(path)] == ["config"]
