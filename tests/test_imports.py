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
FRONT_ENDS = {
    *("cli", "options", "prompts", "terminal", "ui", "session", "compare", "history", "personal"),
    *("job_thread", "keeper", "runners", "child", "serving", "worker", "bench", "doctor"),
    *("models_cli", "train_cli", "training_view"),
}
HEAVY = {"torch", "transformers", "tokenizers", "accelerate", "bitsandbytes", "peft", "gradio"}
# In the page's process.
PAGE = ("tally", "worth", "offer", "personal", "run_log", "job_thread", "jobs", "keeper")
# Room or module of ours -> what of ours it may import, itself included.
ALLOWED = {
    "errors": set(),
    "amounts": set(),
    "paths": {"errors"},
    "decoding": {"decoding", "errors"},
    "training": {
        *("training", "decoding", "checkpoint", "finding", "weights", "adapters", "devices"),
        *("compiling", "messages", "paths", "errors", ""),
    },
    "presets": {"paths", "decoding", "errors"},
    "models": {"paths", "errors"},
    "hub": {"hub", "amounts", "models", "paths", "errors", ""},
    "models_cli": {"hub", "quantised", "amounts", "models", "options", "terminal", "errors"},
    "train_cli": {
        *("training", "training_view", "hub", "checkpoint", "messages", "options", "terminal"),
        *("history", "run_log", "paths", "errors"),
    },
    "training_view": {"terminal"},
    "messages": set(),
    "layouts": {"layouts", "errors"},
    "gate": {"layouts", "paths", "errors", ""},
    "gate_child": set(),
    "compiling": {"paths", ""},
    "devices": {"compiling", "estimate", "messages", "errors"},
    "memory": {"errors"},
    "quantised": {"finding", "paths", "errors", ""},
    "fit": {"estimate", "finding", "amounts", "errors"},
    "spreading": {"fit", "estimate", "amounts"},
    "placing": {"devices", "finding", "fit", "memory", "messages", "spreading", "errors"},
    "head_weights": {"finding", "gate", "decoding", "errors", ""},
    "finding": {"layouts", "messages", "decoding", "hub", "models", "paths", "errors"},
    "fetching": {"finding", "hub", "messages"},
    "adapters": {"gate", "errors", ""},
    "weights": {"finding", "models", "gate", "quantised", "memory", "decoding", "errors", ""},
    "estimate": {"layouts", "decoding", "errors"},
    "inspection": {"estimate", "layouts", "finding", "hub", "paths", "errors"},
    "tuning": {"decoding", "paths", "errors", ""},
    "auto_tree": {"finding", "messages", "tuning", "presets", "decoding", "errors"},
    "tally": {"decoding"},
    "run_log": {"paths", ""},
    "worth": {"tally", "decoding"},
    "offer": {"worth", "tally", "messages", "decoding"},
    "personal": {
        "offer",
        "tally",
        "session",
        "jobs",
        "messages",
        "paths",
        "decoding",
        "errors",
        "",
    },
    "checkpoint": {
        *(
            "devices",
            "finding",
            "fetching",
            "weights",
            "adapters",
            "messages",
            "decoding",
            "presets",
        ),
        *("head_weights", "placing", "memory", "tuning", "auto_tree", "prepare", "compiling"),
        *("errors", ""),
    },
    "prepare": {"compiling", "finding", "decoding", "errors", ""},
    "holder": {"checkpoint", "devices", "memory", "messages", "errors"},
    "tuner": {"auto_tree", "checkpoint", "tuning", "messages", "decoding", "errors"},
    "worker": {
        *("tuner", "fit", "memory", "messages", "checkpoint", "presets", "decoding", "errors"),
    },
    "serving": {"worker", "tuner", "holder", "messages", "decoding", "errors"},
    "runners": {"worker", "tuner", "holder", "messages", "decoding", "errors"},
    "child": {"serving", "runners", "messages", "decoding", "errors"},
    "jobs": {"messages", "decoding"},
    "keeper": {"jobs", "runners", "messages", "errors"},
    "job_thread": {"jobs", "keeper", "runners", "messages", "errors"},
    "session": {"job_thread", "jobs", "keeper", "runners", "messages", "decoding", "errors"},
    "compare": {"jobs", "recordings", "session", "messages", "decoding", "errors"},
    "recordings": {"decoding", "errors"},
    "history": {"messages"},
    "ui": {
        *(
            "ui",
            "session",
            "jobs",
            "messages",
            "prompts",
            "compare",
            "recordings",
            "presets",
            "history",
        ),
        *(
            "paths",
            "hub",
            "models",
            "inspection",
            "estimate",
            "devices",
            "finding",
            "layouts",
            "amounts",
        ),
        *("tally", "offer", "personal", "training", "run_log", "decoding", "errors"),
    },
    "terminal": {"session", "amounts", "messages", "decoding", "errors"},
    "prompts": {"terminal", "messages", "errors"},
    "options": {"checkpoint", "messages", "presets", "paths", "decoding", "errors"},
    "doctor": {"compiling", "tuning", "paths", "errors", ""},
    "__main__": {"cli"},
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


def room(name: str) -> str:
    """The part after the package's name: "decoding" of medusa_chat.decoding.tree.Tree."""
    part = name.split(".")[1] if "." in name else ""
    return "" if part == "__version__" else part


def outside(names: Iterator[str]) -> set[str]:
    """Top names of packages that are neither ours nor of the standard library."""
    tops = {name.split(".")[0] for name in names}
    return tops - set(sys.stdlib_module_names) - {"medusa_chat"}


def files_of(name: str) -> list[Path]:
    return [file for module, file in MODULES.items() if room(module) == name]


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_one_way(name: str) -> None:
    for file in files_of(name):
        ours = {room(n) for n in imported(file) if n.split(".")[0] == "medusa_chat"}
        assert ours <= ALLOWED[name], f"{file} imports {ours - ALLOWED[name]}"


def test_decoding_needs_torch_transformers_and_nothing_else() -> None:
    for file in files_of("decoding"):
        kernels = {"triton"} if file.parent.name == "kernels" else set()
        assert outside(imported(file)) <= {"torch", "transformers", "tokenizers"} | kernels, file


@pytest.mark.parametrize(
    "name", ["tree", "settings", "events", "expectation", "costs", "governor", "reach"]
)
def test_what_the_page_needs_of_decoding_is_without_torch(name: str) -> None:
    assert not outside(imported(PACKAGE / "decoding" / f"{name}.py"))


def test_rooms_of_work_know_no_front_end() -> None:
    for file in files_of("decoding") + files_of("training") + files_of("checkpoint"):
        names = set(imported(file))
        assert not {room(n) for n in names if n.startswith("medusa_chat.")} & FRONT_ENDS
        assert not outside(iter(names)) & {"gradio", "typer"}, file


def test_nothing_below_the_session_imports_it() -> None:
    for name in (
        "worker",
        "serving",
        "checkpoint",
        "messages",
        "presets",
        "paths",
        "decoding",
        "training",
    ):
        for file in files_of(name):
            names = [n for n in imported(file) if n.startswith("medusa_chat.")]
            assert "session" not in {room(n) for n in names}, file


def test_headers_are_read_without_any_package() -> None:
    for name in ("layouts", "estimate", "inspection"):
        for file in files_of(name):
            assert not outside(imported(file)) - {"huggingface_hub"}, file


def test_prompts_and_terminal_need_no_package() -> None:
    for name in ("messages", "prompts", "terminal", "tuning"):
        assert not outside(imported(PACKAGE / f"{name}.py")), name


def test_core_prints_nothing() -> None:
    for file in files_of("decoding"):
        calls = [n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Call)]
        named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        assert not named & {"print", "open", "input", "eval", "exec"}, file


def test_page_and_session_know_no_torch() -> None:
    for name in (
        "ui",
        "session",
        "job_thread",
        "jobs",
        "keeper",
        "runners",
        "child",
        "messages",
        "presets",
        "paths",
        "compare",
        "history",
        "errors",
    ) + (*("hub", "models", "models_cli"),):
        for file in files_of(name):
            assert not outside(imported(file)) & (HEAVY - {"gradio"}), file


def test_page_knows_of_decoding_only_what_needs_no_torch() -> None:
    allowed = {"settings", "events", "tree", "costs", "expectation", "growth", "reach"}
    for file in [f for name in (*PAGE, "ui", "session") for f in files_of(name)]:
        names = [n.split(".") for n in imported(file) if n.startswith("medusa_chat.decoding")]
        assert {name[2] for name in names} <= allowed, file


def test_page_knows_of_training_only_what_needs_no_torch() -> None:
    allowed = {"hardware", "tree_search"}
    for file in files_of("ui"):
        names = [n.split(".") for n in imported(file) if n.startswith("medusa_chat.training")]
        assert {name[2] for name in names} <= allowed, file
    for name in allowed:
        assert not outside(imported(PACKAGE / "training" / f"{name}.py")), name


def test_only_the_command_line_opens_the_page() -> None:
    for module, file in MODULES.items():
        if room(module) not in ("cli", "ui"):
            assert "ui" not in {room(n) for n in imported(file) if n.startswith("medusa_chat")}


def test_command_line_imports_the_heavy_ones_lazily() -> None:
    """In fact and not only by its own lines: nothing it imports pulls one in."""
    code = (
        "import sys; import medusa_chat.cli; medusa_chat.cli.main(['--version']);"
        f"found = {sorted(HEAVY | {'rich', 'platformdirs', 'huggingface_hub'})!r};"
        "print([name for name in found if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "[]"
    for name in ("cli", "options"):
        assert not outside(imported(PACKAGE / f"{name}.py", lazily=False)) & HEAVY


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
