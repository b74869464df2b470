"""The house: who may import whom, read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "medusa_chat"
MODULES = {
    ".".join(("medusa_chat", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = {"torch", "transformers", "tokenizers", "accelerate", "bitsandbytes", "peft", "gradio"}
LEAVES = {"", "chat_exports", "clean_stream", "errors", "gguf_files", "messages", "paths"}
LEAVES |= {"hosts", "ranges", "units"}
# Room -> the rooms it may know, besides itself and the leaves. From the floor upwards: a room
# names only rooms that stand above it here, so there is no circle.
ROOMS: dict[str, set[str]] = {
    "decoding": set(),
    "decoding.backends": {"decoding"},
    "checkpoints.layouts": set(),
    "hub": set(),
    "trees": {"decoding"},
    "checkpoints": {"checkpoints.layouts", "hub", "trees", "decoding", "decoding.backends"},
    "training": {"checkpoints", "trees", "decoding", "decoding.backends"},
    "runtime": {"checkpoints", "trees", "decoding", "decoding.backends"},
    "bench": {
        *("runtime", "training", "checkpoints", "checkpoints.layouts", "trees", "decoding"),
        "decoding.backends",
    },
    "server": {"runtime", "decoding"},
    "ui.access": set(),
    "ui.page": {"ui.access", "runtime", "training", "decoding"},
    "ui.chat": {"ui.page", "ui.access", "runtime", "decoding"},
    "ui.models": {
        *("ui.page", "ui.access", "runtime", "checkpoints", "checkpoints.layouts", "hub"),
        "decoding",
    },
    "ui.tune": {"ui.page", "ui.access", "runtime", "training", "trees", "decoding"},
    "ui.compare": {"ui.page", "ui.access", "runtime", "decoding"},
    "ui": {
        *("ui.chat", "ui.models", "ui.tune", "ui.compare", "ui.access", "ui.page", "runtime"),
        *("server", "decoding"),
    },
    "cli": {
        *(
            "ui",
            "server",
            "bench",
            "runtime",
            "training",
            "checkpoints",
            "checkpoints.layouts",
            "trees",
        ),
        *("hub", "decoding"),
    },
}


def imported(file: Path, lazily: bool = True) -> Iterator[str]:
    """Full names of what a module imports, as deep in its functions as wanted."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def ours(file: Path) -> set[str]:
    """The modules of ours that a module imports, lazily ones included."""
    found = set()
    for name in imported(file):
        while name.startswith("medusa_chat") and name not in MODULES:
            name = name.rpartition(".")[0]
        if name.startswith("medusa_chat"):
            found.add(name)
    return found


def room(module: str) -> str:
    """The room of a module: "decoding" of medusa_chat.decoding.tree, "" of the package itself."""
    parts = module.split(".")[1:]
    rooms = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in rooms if name in ROOMS), parts[0] if parts else "")


def outside(names: Iterator[str]) -> set[str]:
    """Top names of packages that are neither ours nor of the standard library."""
    tops = {name.split(".")[0] for name in names}
    return tops - set(sys.stdlib_module_names) - {"medusa_chat"}


def files_of(name: str) -> list[Path]:
    """The files of a room, or of one module ("runtime.session"), or of a folder of the core."""
    whole = f"medusa_chat.{name}"
    return [f for module, f in MODULES.items() if f"{module}.".startswith(f"{whole}.")]


def test_every_module_stands_in_a_room_or_is_a_leaf() -> None:
    assert {room(module) for module in MODULES} <= ROOMS.keys() | LEAVES | {"__main__"}


@pytest.mark.parametrize("name", ROOMS)
def test_imports_go_one_way(name: str) -> None:
    above = list(ROOMS)[list(ROOMS).index(name) :]
    assert not ROOMS[name] & set(above), "a room may know only those that stand above it here"
    for module, file in MODULES.items():
        if room(module) == name:
            wrong = {room(other) for other in ours(file)} - ROOMS[name] - LEAVES - {name}
            assert not wrong, f"{file} imports {wrong}"


def test_a_first_line_says_what_the_file_owns() -> None:
    """In a whole sentence; an empty __init__.py owns nothing."""
    for file in MODULES.values():
        text = ast.get_docstring(ast.parse(file.read_text("utf-8")))
        assert text or (file.name == "__init__.py" and not file.stat().st_size), file
        assert not text or text.splitlines()[0].endswith("."), file


def test_no_function_is_longer_than_60_lines() -> None:
    """A file holds one noun whole, however long; a function reads like a recipe. A Triton kernel
    cannot be cut into functions that read as one."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for file in MODULES.values():
        if file.parent.name == "kernels":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, kinds):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{file}:{node.lineno} {node.name}: {length} lines"


def test_no_call_unpacks_a_literal() -> None:
    """f(*(a, b), *(c, d)) saves lines and hides what is passed. Kernels' own code is Triton's."""
    for file in MODULES.values():
        if file.parent.name == "kernels":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            for argument in node.args if isinstance(node, ast.Call) else ():
                is_literal = isinstance(argument, ast.Starred) and isinstance(
                    argument.value, (ast.Tuple, ast.List)
                )
                assert not is_literal, f"{file}:{argument.lineno}"


def test_leaves_know_leaves_alone() -> None:
    for name in LEAVES - {""}:
        assert {room(other) for other in ours(PACKAGE / f"{name}.py")} <= LEAVES, name


def test_no_two_modules_import_each_other() -> None:
    graph = {module: ours(file) - {module} for module, file in MODULES.items()}
    done: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                follow(other, (*path, module))
            done.add(module)

    for module in graph:
        follow(module, ())


def test_decoding_needs_torch_transformers_and_gguf_alone() -> None:
    for file in files_of("decoding"):
        kernels = {"cuda", "triton"} if file.parent.name == "kernels" else set()
        known = {"torch", "transformers", "tokenizers", "gguf"}  # gguf: what quantised rows hold
        assert outside(imported(file)) <= known | kernels, file


def test_core_knows_no_front_end() -> None:
    for name in ("decoding", "training", "checkpoints", "trees", "hub"):
        for file in files_of(name):
            assert not outside(imported(file)) & {"gradio", "typer"}, file


def test_headers_are_read_without_any_package() -> None:
    for name in ("layouts", "memory_needs", "model_sizes", "inspection"):
        for file in files_of(f"checkpoints.{name}"):
            assert not outside(imported(file)) - {"huggingface_hub"}, file


def test_the_terminal_needs_no_package() -> None:
    for name in ("messages", "cli.terminal", "decoding.budget"):
        for file in files_of(name):
            assert not outside(imported(file)), name


def test_core_prints_nothing() -> None:
    for file in files_of("decoding"):
        calls = [n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Call)]
        named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not named & {"print", "open", "input", "eval", "exec"}, file


def _eager(module: str, seen: set[str]) -> None:
    """Add all modules of ours that are imported when this one is."""
    if module in seen:
        return
    seen.add(module)
    for name in imported(MODULES[module], lazily=False):
        while name.startswith("medusa_chat") and name not in MODULES:
            name = name.rpartition(".")[0]
        if name.startswith("medusa_chat"):
            _eager(name, seen)


def test_page_and_command_line_import_nothing_heavy() -> None:
    """All that is imported with them at the top of a module, however far down."""
    for start in ("ui.app", "cli.main", "runtime.session", "runtime.runner"):
        seen: set[str] = set()
        _eager(f"medusa_chat.{start}", seen)
        light = HEAVY - ({"gradio"} if start == "ui.app" else set())
        for module in seen:
            found = outside(imported(MODULES[module], lazily=False)) & light
            assert not found, f"{start} imports {module}, which imports {found}"


def test_without_the_package_gguf_all_but_its_files_works() -> None:
    for start in ("checkpoints.load", "training.run", "bench.run"):
        seen: set[str] = set()
        _eager(f"medusa_chat.{start}", seen)
        for module in seen:
            found = outside(imported(MODULES[module], lazily=False))
            assert "gguf" not in found, f"{start} imports {module}"


def test_the_page_starts_without_parsing_the_source_of_gradios_components() -> None:
    code = (
        "import ast, inspect, sys; parse, real, parsed = ast.parse, inspect.getfile, [];"
        "ast.parse = lambda text, *more, **by: parsed.append(text) or parse(text, *more, **by);"
        "from medusa_chat.cli.ui import _page; _page();"
        "assert inspect.getfile is real and 'gradio' in sys.modules;"
        "print(sum('class Textbox(' in str(text) for text in parsed))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_page_itself_knows_no_torch() -> None:
    names = ("ui", "hub", "trees.presets")
    runtime = ("session", "requests", "model_lifecycle", "runner", "compare", "history")
    names += tuple(f"runtime.{name}" for name in runtime)
    for name in names:
        for file in files_of(name):
            assert not outside(imported(file)) & (HEAVY - {"gradio"}), file


def test_command_line_imports_the_heavy_ones_lazily() -> None:
    """In fact and not only by its own lines: nothing it imports pulls one in."""
    code = (
        "import sys; import medusa_chat.cli.main; medusa_chat.cli.main.main(['--version']);"
        f"found = {sorted(HEAVY | {'rich', 'platformdirs', 'huggingface_hub'})!r};"
        "print([name for name in found if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    "forbidden",
    ["weights_only=False", "trust_remote_code=True", "pickle.load", "sanitize_html=False"]
    + ["strict=False)", "except:"],
)
def test_sources_never_weaken_a_check(forbidden: str) -> None:
    for file in MODULES.values():
        lines = file.read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if forbidden in line and "zip(" not in line]
        assert not found, f"{file}: {found[0]}"
