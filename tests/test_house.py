"""The house rules as code: who may import whom, one room per library, sizes, and documents that match the program.

A failure says which line breaks which rule. Change a table here only together with the map in `q27app/__init__.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from q27app import errors
from q27app.cli import COMMANDS, LazyGroup, root

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "q27app"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

GROUND = {"config", "config_values", "paths", "errors", "metrics", "gpu", "client", "child_daemon"}
MAY_IMPORT: dict[str, set[str]] = {
    "ground": set(),
    "weights": set(),
    "kernels": {"weights"},
    "chat": set(),
    "model": {"weights", "kernels"},
    "engine": {"weights", "kernels", "model"},
    "daemon": {"weights", "kernels", "model", "engine", "chat"},
    "setup": {"weights", "model"},
    "bench": {"weights", "kernels", "model", "engine", "chat"},
    "tui": {"setup"},
    "cli": {"weights", "kernels", "model", "engine", "chat", "daemon", "setup", "bench", "tui"},
}
"""Room -> rooms below it that it may import, beside itself and the ground floor."""

DOORS: dict[str, set[str]] = {
    "model": {"", "backend", "batch", "kv_formats"},
    "engine": {"", "backend", "batch", "kv_formats"},
}
"""Of `kernels`, what these rooms see; "" is the package itself (open_backend)."""

CUDA_FILES = {f"kernels/{name}.py" for name in ("cuda_backend", "compiler", "launch", "graph", "memory")}
LIBRARIES: dict[str, set[str]] = {
    "pycuda": CUDA_FILES, "cuda": CUDA_FILES,
    "aiohttp": {"daemon/", "client.py"}, "textual": {"tui/"}, "rich": {"tui/"},
    "tokenizers": {"chat/tokenizer.py"}, "jinja2": {"chat/"}, "llguidance": {"chat/"},
    "gguf": {"weights/"}, "huggingface_hub": {"setup/"},
    "pynvml": {"gpu.py"}, "psutil": {"gpu.py"}, "platformdirs": {"paths.py"},
    "prometheus_client": {"metrics.py"}, "tomlkit": {"config.py", "config_values.py", "setup/"}, "tomllib": {"config_values.py"},
    "click": {"cli"},
}
"""Library -> where it may be imported: files, folders ending in /, or the first letters of a file's name."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(module: str) -> str:
    """Room of a dotted name below q27app ("kernels.batch" -> kernels)."""
    first = module.split(".")[0]
    if first in ("", "__init__") or first in GROUND:
        return "ground"
    return "cli" if first.startswith("cli") or first == "__main__" else first


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also those inside functions; TYPE_CHECKING blocks included."""
    package = ["q27app", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def is_module(dotted: str) -> bool:
    path = REPOSITORY / Path(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def internal_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module below q27app) of a file's imports of its own package."""
    for line, name in imports(path):
        if name.split(".")[0] == "q27app":
            module = name if is_module(name) else name.rpartition(".")[0]
            yield line, module.removeprefix("q27app").removeprefix(".")


def test_imports_go_downwards_only():
    wrong = []
    for path in FILES:
        room = room_of(relative(path).removesuffix(".py").replace("/", "."))
        assert room in MAY_IMPORT, f"{relative(path)} stands in no room; give it one in MAY_IMPORT or GROUND"
        for line, module in internal_imports(path):
            target = room_of(module)
            if target not in {room, "ground"} | MAY_IMPORT[room]:
                wrong.append(f"{relative(path)}:{line}: {room} may not import {target} ({module})")
            elif target == "kernels" and module.removeprefix("kernels").removeprefix(".") not in DOORS.get(room, {module[8:]}):
                wrong.append(f"{relative(path)}:{line}: {room} may see only the doors of kernels, not {module}")
    assert not wrong, "\n".join(wrong)


def test_each_library_stays_in_its_room():
    wrong = []
    for path in FILES:
        name = relative(path)
        for line, module in imports(path):
            allowed = LIBRARIES.get(module.split(".")[0])
            if allowed is not None and not any(name == place or name.startswith(place) for place in allowed):
                wrong.append(f"{name}:{line}: {module.split('.')[0]} belongs in {', '.join(sorted(allowed))}")
    assert not wrong, "\n".join(wrong)


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    return (isinstance(node, ast.Attribute) and node.attr in names) or (
        isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in names for alias in node.names))


def test_only_config_reads_the_environment():
    wrong = [f"{relative(path)}:{node.lineno}: use a function of config.py"
             for path in FILES if relative(path) != "config.py" for node in ast.walk(tree_of(path)) if reads_environment(node)]
    assert not wrong, "\n".join(wrong)


def test_no_file_and_no_function_is_too_long():
    wrong = []
    for path in FILES + sorted((REPOSITORY / "tests").rglob("*.py")):
        name = path.relative_to(REPOSITORY)
        num_lines = path.read_text(encoding="utf-8").count("\n")
        if num_lines > MAX_FILE_LINES:
            wrong.append(f"{name}: {num_lines} lines; split it by what it is about")
        wrong += [f"{name}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
                  for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                  and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for():
    assert [relative(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


def test_every_module_imports_without_a_gpu_and_without_its_libraries():
    names = [relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in FILES
             if relative(path) not in CUDA_FILES and path.name not in ("__main__.py",)]
    program = "import sys, importlib\n" \
              "for name in ('pycuda', 'cuda', 'pynvml'): sys.modules[name] = None\n" \
              "for name in sys.argv[1:]: importlib.import_module('q27app.' + name if name != '__init__' else 'q27app')\n"
    done = subprocess.run([sys.executable, "-c", program, *names], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, q27app, q27app.cli; print([n for n in ('numpy', 'aiohttp', 'tokenizers', 'textual') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_map_names_every_room_and_module():
    import q27app

    entries = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir()
               if path.name not in ("__pycache__", "__init__.py") and (path.is_dir() or path.suffix == ".py")}
    missing = sorted(name for name in entries if not re.search(rf"^\s+{re.escape(name)}\b", q27app.__doc__, re.MULTILINE))
    assert not missing, f"q27app/__init__.py: the map lacks {missing}"


def readme_section(title: str) -> str:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"README.md has no section {title!r}"
    return match[1]


def test_the_readme_lists_the_commands_that_exist():
    listed = re.findall(r"^\| `q27app ([a-z]+)[^|]*\| ([^|]+?) \|$", readme_section("Commands"), re.MULTILINE)
    assert dict(listed) == {name: line for name, (_, line) in COMMANDS.items()}


def test_the_readme_lists_the_exit_codes_that_exist():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", readme_section("Exit codes"), re.MULTILINE)}
    assert documented == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_the_readme_maps_every_room():
    text = readme_section("Rooms")
    rooms = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
    assert [room for room in rooms if f"{room}/" not in text] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_help_is_the_commands_own(name):
    command = LazyGroup.get_command(root, None, name)
    assert command.name == name
    first = " ".join((command.help or "").split("\n\n")[0].split())
    assert first == COMMANDS[name][1]
