"""Every command of README.md and docs/ runs on the demo, or its page says why it cannot here.

A command runs in this process, in a folder that has the files the pages speak of, with sizes that
take a second: more options are added, values are made small, and a name is given for a placeholder.
"""

import io
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from support.doc_commands import COMMANDS, FENCE, ROOT, shown, words

from medusa_chat import paths
from medusa_chat.cli.main import main
from medusa_chat.runtime.history import FILE, History, StoredConversation
from medusa_chat.runtime.stored_conversation import MessageTree

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "assets/benchmarks/NOTES.md",
]
SMALL = "--rounds 1 --max-new-tokens 8 --tree chain-5"
QUESTIONS = f"--prompts question.jsonl {SMALL}"
TRAINED = "--max-steps 1 --heads 1 --batch-tokens 256 --sequence-length 64 --precision fp32"
PLAIN = "--max-new-tokens 8 --seed 1"

# What is run for a command as it stands on a page; of a grammar with alternatives, each.
RUNS = {
    "medusa-chat export --checkpoint my-heads DIR": ["export --checkpoint my-heads for-vllm"],
    "medusa-chat export --checkpoint my-heads --format vllm DIR": [
        "export --checkpoint my-heads --format vllm for-vllm-2"
    ],
    "medusa-chat train --no-root": [f"train --no-root --data prompts.jsonl --output a {TRAINED}"],
    "medusa-chat train --backbone DIR --data prompts.jsonl --output my-heads --distill": [
        f"train --backbone my-heads --data prompts.jsonl --output b --distill {TRAINED}"
    ],
    "medusa-chat train --backbone ID|DIR|FILE --data prompts.jsonl --output my-heads --distill": [
        f"train --backbone demo --data prompts.jsonl --output c --distill {TRAINED}"
    ],
    "medusa-chat train --backbone ID|DIR|FILE --data FILE|HUB_DATASET... --output DIR "
    "[--recipe NAME] [--distill] [--method medusa-1|medusa-2] [--resume] ... (see --help)": [
        "train --backbone my-heads --data prompts.jsonl question.jsonl --output e "
        f"--recipe medusa-1 --method medusa-1 --distill {TRAINED}",
    ],
    "medusa-chat calibrate --checkpoint my-heads --data prompts.jsonl --nodes 64": [
        "calibrate --checkpoint my-heads --data prompts.jsonl --nodes 64"
    ],
    "medusa-chat calibrate --chats --output tree.json": ["calibrate --chats --output tree.json"],
    "medusa-chat calibrate --checkpoint ID|DIR --data FILE... [--nodes N] [--output FILE] "
    "[--json]": [
        "calibrate --checkpoint demo --data prompts.jsonl question.jsonl --nodes 4 "
        "--output tree-2.json --json"
    ],
    "medusa-chat generate --prompt TEXT | --prompt-file F | --messages F.json | --prompts F.jsonl "
    "[--raw] [--json] [--trace FILE] [--verbose]": [
        f"generate --prompt Hello --raw --json --trace FILE {PLAIN}",
        f"generate --prompt-file F --verbose {PLAIN}",
        f"generate --messages F.json {PLAIN}",
        f"generate --prompts F.jsonl {PLAIN}",
    ],
    "medusa-chat chat [--system TEXT] [--verbose]": [f"chat --system Hi --verbose {PLAIN}"],
    "medusa-chat models list | search TEXT | pull ID | rm ID [--json]": ["models list --json"],
    "medusa-chat inspect ID|DIR|FILE [--backbone ID|DIR|FILE] [--max-context N] [--json]": [
        "inspect my-heads --backbone my-heads --max-context 64 --json",
    ],
    "medusa-chat inspect": ["inspect"],
    "medusa-chat export --checkpoint ID|DIR|FILE [--backbone ID|DIR|FILE] [--format vllm] DIR "
    "[--json]": [
        "export --checkpoint my-heads --backbone my-heads --format vllm for-vllm-3 --json"
    ],
    "medusa-chat bench [--study NAME] [--prompts FILE] [--file FILE.gguf] [--llama-bench FILE] "
    "[--shape 7b|8b] [--layers N] [--draft DIR] [--rounds N] [--max-new-tokens N] "
    "[--tree NAME] [--json] [--output FILE]": [
        f"bench --study turns --study context {SMALL} --json --output F.json",
    ],
    "python assets/benchmarks/paper/run.py STUDY --prompts assets/benchmarks/questions.jsonl "
    "--output F.json --picture F.svg": [
        f"python assets/benchmarks/paper/run.py trees {QUESTIONS} --output F.json --picture F.svg"
    ],
    "medusa-chat doctor": ["doctor"],
    "medusa-chat doctor [--gpu] [--json]": ["doctor --json"],
    "python assets/benchmarks/real_model.py FOLDER --rounds 1 --tokens 64": [
        "python assets/benchmarks/real_model.py my-heads --rounds 1 --tokens 8"
    ],
    "medusa-chat bench --study drafters --checkpoint smollm2 --backbone FILE.gguf "
    "--prompts FILE.jsonl --questions N --max-new-tokens N --rounds 1": [
        "bench --study drafters --checkpoint my-heads --backbone my-heads --questions 1 "
        f"{QUESTIONS}"
    ],
}

# What the section of its page says of a command that is not run here.
NETWORK, GPU, LONG, PAGE = "network", "GPU", "long run", "page|browser"  # tests/ui/browser opens it
SERVER = "serve|API"  # tests/server asks it
ELSEWHERE = {
    "medusa-chat": PAGE,
    "medusa-chat ui --checkpoint my-heads": PAGE,
    "medusa-chat [ui] --host --port --share --auth USER:PASSWORD --no-browser --root-path "
    "--api": PAGE,
    "medusa-chat --api": SERVER,
    "medusa-chat serve --checkpoint my-heads": SERVER,
    "medusa-chat serve --host --port --api-key KEY --allow-origin URL": SERVER,
    "medusa-chat --checkpoint smollm2": NETWORK,
    "medusa-chat chat --checkpoint smollm2": NETWORK,
    "medusa-chat models search vicuna": NETWORK,
    "medusa-chat inspect FasterDecoding/medusa-vicuna-7b-v1.3": NETWORK,
    "medusa-chat generate --checkpoint FasterDecoding/medusa-vicuna-7b-v1.3 "
    '--prompt "Hello"': NETWORK,
    "medusa-chat models pull": NETWORK,
    "medusa-chat models pull smollm2": NETWORK,
    "medusa-chat models rm smollm2": NETWORK,
    "python assets/benchmarks/vllm_heads.py --vllm PYTHON --checkpoint demo --tokens 32": NETWORK,
    "accelerate launch --num_processes N -m medusa_chat train ...": GPU,
    "python assets/benchmarks/gpu.py --out gpu.json [--minutes 9] "
    "[--parts 7b-fp16,generate] [--model CHECKPOINT,BACKBONE]": GPU,
    "medusa-chat bench --rounds 6": LONG,
    "medusa-chat bench --shape 7b --study steps --max-context 2048 --rounds 3": LONG,
    "medusa-chat bench --study peers --file FILE.gguf --file ANOTHER.gguf --output "
    "peers.json": LONG,
    "medusa-chat bench --study peers": LONG,
    "medusa-chat bench --study drafters --checkpoint qwen-coder-0.5b --backbone FILE.gguf "
    "--prompts FILE.jsonl --questions 16 --max-new-tokens 96 --rounds 1": LONG,
    "medusa-chat bench --study drafters --checkpoint qwen-coder --backbone FILE.gguf --draft "
    "SMALLER.gguf --prompts FILE.jsonl --questions 8 --max-new-tokens 96 --rounds 1": LONG,
    "medusa-chat bench --study steps": LONG,
    "medusa-chat bench --study vllm": LONG,
    "medusa-chat bench --study vllm --checkpoint smollm2 --backbone FILE.gguf "
    "--prompts FILE.jsonl --questions 20 --rounds 2 --vllm PYTHON --vllm-heads DIR "
    "--output vllm.json": LONG,
    "medusa-chat bench --study exactness": LONG,
    "medusa-chat bench --study exactness --checkpoint smollm2 --backbone FILE.gguf "
    "--prompts FILE.jsonl --max-new-tokens 256 --output exactness.json": LONG,
    "python assets/benchmarks/paper/run.py two-stage --data ANSWERS.jsonl --checkpoint smollm2 "
    "--backbone DIR --precision fp32": LONG,
    "python assets/benchmarks/heads.py": LONG,
    "medusa-chat train --backbone SmolLM2-135M-Instruct.Q4_1.gguf --data prompts.jsonl --no-root "
    "--max-steps 350 --recipe assets/heads/smollm2-135m-instruct/recipe.toml --precision bf16 "
    "--output my-heads": LONG,
    "medusa-chat train --backbone SmolLM2-135M-Instruct.Q4_1.gguf --data prompts.jsonl "
    "--precision bf16 --recipe assets/benchmarks/smollm2-medusa-2.toml --method medusa-2 "
    "--max-steps 60 --output my-medusa-2": LONG,
    "python tests/measure_page.py --rounds 3": LONG,
}


def test_every_command_is_run_or_its_section_says_why_not() -> None:
    found = set()
    for page in PAGES:
        for section in sections(page.read_text("utf-8")):
            for command in shown(section):
                found.add(command)
                why = ELSEWHERE.get(command)
                assert is_run(command) != bool(why), f"{page.name}: {command}"
                assert why is None or re.search(why, section), f"{page.name}: {command}: {why}?"
    assert not (RUNS.keys() | ELSEWHERE.keys()) - found, "no page has these commands any more"


def test_a_command_that_nothing_runs_is_found() -> None:
    assert is_run("medusa-chat doctor") and is_run("medusa-chat bench")
    assert not is_run("medusa-chat bench --study speed") and not is_run("medusa-chat ui")
    assert ["# a\n", "## b\n```\n # c\n```\n"] == sections("# a\n## b\n```\n# c\n```\n")[1:]


def sections(text: str) -> list[str]:
    """A page's parts between its headings."""
    marked = FENCE.sub(lambda block: block[0].replace("\n#", "\n #"), text)
    return re.split(r"^(?=#+ )", marked, flags=re.M)


def is_run(command: str) -> bool:
    """It is in RUNS, or names a command that is."""
    name = command.removeprefix("medusa-chat ")
    return command in RUNS or (
        name in COMMANDS.commands and any(f"{run} ".startswith(f"{name} ") for run in RUN_LINES)
    )


RUN_LINES = list(dict.fromkeys(line for lines in RUNS.values() for line in lines))


@pytest.mark.parametrize("command", [c for c in RUNS if not re.search(r"[\[|]", c)])
def test_what_is_run_has_every_option_of_the_command(command: str) -> None:
    asked = {word for word in words(command) if word.startswith("--")}
    assert all(asked <= set(line.split()) for line in RUNS[command])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages' commands read."""
    folder = tmp_path_factory.mktemp("as-the-pages-have-it")
    (folder / "assets").symlink_to(ROOT / "assets")
    shutil.copytree(
        ROOT / "assets/demo", folder / "my-heads", ignore=shutil.ignore_patterns("*.py", "draft")
    )
    asked = (ROOT / "assets/benchmarks/questions.jsonl").read_text("utf-8").splitlines()[:2]
    rows = [{"messages": [{"role": "user", "content": json.loads(a)["turns"][0]}]} for a in asked]
    answered = [
        {"messages": [*row["messages"], {"role": "assistant", "content": "It is six."}]}
        for row in rows
    ]
    for name, lines in (
        ("question.jsonl", asked),
        ("prompts.jsonl", list(map(json.dumps, answered))),
        ("F", ["Hello"]),
        ("F.json", [json.dumps(rows[0]["messages"])]),
        ("F.jsonl", ['{"prompt": "Hello"}', json.dumps(rows[0])]),
    ):
        (folder / name).write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.mark.parametrize("line", RUN_LINES)
def test_it_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    if "--chats" in line:
        said = MessageTree().plus("user", "Hello").plus("assistant", "Hello!")
        chat = StoredConversation(said)
        history = History(paths.data_dir() / FILE)
        assert history.own() and history.save("browser", chat)
    if line.startswith("python "):
        monkeypatch.setattr(sys, "argv", line.split()[1:])
        monkeypatch.syspath_prepend(str(Path(sys.argv[0]).parent.resolve()))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        assert main(line.split()) == 0
