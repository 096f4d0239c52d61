"""The layers of the package: nothing that is installed reaches outside of it, and lower layers import no higher ones."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fairseq_lowrank"
OUTSIDE = ("experiments", "examples", "benchmarks", "tests", "results", "scripts")
# Triton comes with torch on a GPU; the module that uses it says so if it is missing.
OF_TORCH = ("torch", "triton")


def imports(file: Path) -> set[str]:
    """The absolute names of all modules that a file imports, at its top or within functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = file.relative_to(ROOT).parent.parts
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_module_imports_nothing_outside_the_package(file):
    assert not [name for name in imports(file) if below(name, *OUTSIDE)]


OF_TORCH_ALONE = ("ops", "parts", "methods", "attention")
"""The lower layers, the lowest first."""


@pytest.mark.parametrize("layer", OF_TORCH_ALONE)
def test_lower_layer_imports_torch_only(layer):
    allowed = OF_TORCH_ALONE[: OF_TORCH_ALONE.index(layer) + 1]
    own = [f"fairseq_lowrank.{name}" for name in (*allowed, "messages", "importing")]  # the last two import no package
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in FILES
        if file.is_relative_to(PACKAGE / layer)
        for name in imports(file)
        if not below(name, *OF_TORCH, *own) and name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert not found


def test_transformers_layer_imports_no_higher_one():
    lower = [
        f"fairseq_lowrank.{name}"
        for name in (
            *OF_TORCH_ALONE,
            "messages",
            "importing",
            "files",
            "progress",
            "subwords",
            "raw_text",
            "moses",
            "huggingface",
        )
    ]
    files = [file for file in FILES if file.is_relative_to(PACKAGE / "huggingface")]
    own = {name for file in files for name in imports(file) if below(name, "fairseq_lowrank")}
    assert own and not [name for name in own if not below(name, *lower)]


LIBRARIES = {"fairseq": ("fairseq", "fairseq_cli"), "transformers": ("transformers",)}
OF_LIBRARIES = {"fairseq": ("importing", "models", "plugin", "repairs", "tasks"), "transformers": ("huggingface",)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_tools_that_need_a_library_are_in_its_folder(library):
    """Imports within functions count."""
    tools = PACKAGE / "tools"
    needing = (
        *LIBRARIES[library],
        *(f"fairseq_lowrank.{name}" for name in (*OF_LIBRARIES[library], f"tools.{library}")),
    )
    files = [file for file in FILES if file.is_relative_to(tools) and not file.is_relative_to(tools / library)]
    found = {(str(file.relative_to(ROOT)), name) for file in files for name in imports(file) if below(name, *needing)}
    assert not found


def test_records_load_no_torch():
    """Neither reading lines nor comparing rows does, so `compare` answers at once."""
    modules = [f"fairseq_lowrank.records.{file.stem}" for file in (PACKAGE / "records").glob("*.py")]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "fairseq_lowrank.records.results" in modules and printed == "False\n"
    found = {
        name for file in (PACKAGE / "records").glob("*.py") for name in imports(file) if below(name, "torch", "fairseq")
    }
    assert not found


LAYERS = (
    "ops",
    "parts",
    "methods",
    "attention",
    "repairs",
    "plugin",
    "tasks",
    "models",
    "huggingface",
    "tools",
    "records",
    "cli",
)


def test_modules_import_each_other_in_no_circle_and_no_higher_layer():
    """Imports within functions count, and those of types."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}

    def imported(file: Path) -> set[str]:
        found = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                folder = file.relative_to(ROOT).parent.parts
                base = folder[: len(folder) - node.level + 1] if node.level else ()
                package = ".".join(filter(None, (*base, node.module)))
                names = (f"{package}.{alias.name}" for alias in node.names)
                found |= {name if name in modules else package for name in names}
        return found & modules.keys()

    graph = {name: imported(file) - {name} for name, file in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(modules)

    def layer(name: str) -> int:
        return next((place for place, one in enumerate(LAYERS) if below(name, f"fairseq_lowrank.{one}")), -1)

    upward = {(name, one) for name, found in graph.items() for one in found if -1 < layer(name) < layer(one)}
    assert not upward


def test_no_two_parts_of_the_package_import_each_other():
    """A part is a folder, or a file that is in none; imports within functions count."""
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {part: set() for part in parts}
    for file in FILES:
        own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found = (name.split(".")[1] for name in imports(file) if name.startswith("fairseq_lowrank."))
        graph[own] |= parts & {*found} - {own}
    order = [*graphlib.TopologicalSorter(graph).static_order()]
    assert order.index("repairs") < order.index("plugin") < min(order.index("models"), order.index("tools"))


DRAWING = ("matplotlib", "scipy", "sklearn", "fairseq_lowrank.tools.pictures")


def drawing_imports(tree: ast.AST, function: str = "") -> set[tuple[str, str]]:
    """Return the imports of plotting modules, each with its function."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            inner = node.name if isinstance(node, ast.FunctionDef) else function
            found |= drawing_imports(node, inner)
            continue
        found |= {(function, name) for name in names if below(name, *DRAWING)}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_module_plots_only_in_functions_that_plot(file):
    if file == PACKAGE / "tools" / "pictures.py":
        return
    # `fill` of cli/_output.py saves the figures of a command
    functions = {function for function, _ in drawing_imports(ast.parse(file.read_text(encoding="utf-8")))}
    assert all(function.startswith("plot") or function == "fill" for function in functions)


TOOLS = ("tools", "huggingface", "plugin", "cli")
WORDS = {"none", "heads", "average", "difference", "softmax"}
"""Names of parts that are ordinary words too: of columns, commands and functions of torch."""


def strings(file: Path) -> list[tuple[int, str]]:
    """The lines and values of the string constants of a file, without docstrings."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


def test_no_tool_knows_a_method_or_a_part_by_its_name():
    from fairseq_lowrank.attention import METHODS
    from fairseq_lowrank.parts import PARTS

    names = METHODS.keys() | {name for parts in PARTS.values() for name in parts} - WORDS
    files = (file for folder in TOOLS for file in sorted((PACKAGE / folder).rglob("*.py")))
    found = [
        (f"{file.relative_to(ROOT)}:{line}", text) for file in files for line, text in strings(file) if text in names
    ]
    assert not found, "ask the part instead: see what parts and methods declare"
