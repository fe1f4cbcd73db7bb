"""The map in docs/design.md is the package: every module is on it, and imports point upwards only."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dta_jax"


def modules_on_the_map() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text()
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dta_jax":
            parts = node.module.split(".")
            found |= {alias.name for alias in node.names} if len(parts) == 1 else {parts[1]}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dta_jax.")}
    return found


def test_every_module_is_on_the_map_once():
    modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
    assert sorted(modules_on_the_map()) == modules


def test_imports_point_upwards():
    order = {name: index for index, name in enumerate(modules_on_the_map())}
    down = [
        (name, other)
        for name, index in order.items()
        for other in imported_modules(PACKAGE / f"{name}.py")
        if order[other] >= index
    ]
    assert not down


def test_only_config_imports_gin():
    def imports(path: Path) -> set[str]:
        nodes = ast.walk(ast.parse(path.read_text()))
        return {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}

    assert [path.stem for path in sorted(PACKAGE.glob("*.py")) if "gin" in imports(path)] == ["config"]
