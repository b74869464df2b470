"""`medusa-chat models`; in a process of its own where only that shows it: kill, quota, offline."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import hub_files
from support.checkpoints import write_checkpoint
from support.hub_files import BASE, HEADS, MB, WHOLE, use, weights
from support.hub_server import Fault, Hub, HubRepo, read_folder, serving
from support.shipped import BASE as SHIPPED_BASE
from support.shipped import NAME as SHIPPED
from support.shipped import shipping  # noqa: F401
from support.waiting import wait_for

from medusa_chat import hub
from medusa_chat.cli.main import main

TINY, TINY_HEADS, TINY_BASE = "tiny/medusa-whole", "tiny/medusa-heads", "tiny/base"
# Commands one after another, whose exit codes come last. Every way to the network raises, and says
# so; nothing is imported before.
WATCHED = """
import json, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print("NETWORK", event, arguments, file=sys.stderr)
        raise OSError("the network was used")
sys.addaudithook(watch)
from medusa_chat.cli.main import main
codes = [main(command) for command in json.loads(sys.argv[1])]
print(json.dumps(codes), file=sys.stderr)
"""
NEED_NETWORK = (("models", "search", "vicuna"), ("models", "pull", "a/b"))
NOT_HERE = ("generate", "--prompt", "x", "--checkpoint", "a/b")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HubRepo]:
    """Repos with a real tiny model: whole, and the same as heads and a base."""
    files = read_folder(write_checkpoint(tmp_path_factory.mktemp("tiny") / "model"))
    names = {"medusa_lm_head.safetensors"}
    heads = {name: files[name] for name in names}
    heads["config.json"] = json.dumps({"base_model_name_or_path": TINY_BASE}).encode()
    base = {name: content for name, content in files.items() if name not in names}
    return {TINY: HubRepo(files), TINY_HEADS: HubRepo(heads), TINY_BASE: HubRepo(base)}


@pytest.fixture
def server(tiny: dict[str, HubRepo]) -> Iterator[Hub]:
    own = {
        BASE: hub_files.base_files(),
        HEADS: hub_files.heads_files(),
        WHOLE: hub_files.whole_files(),
    }
    with serving({name: HubRepo(files) for name, files in own.items()} | tiny) as running:
        yield running


@pytest.fixture
def here(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The server for commands that run in this process."""
    use(server, monkeypatch, tmp_path)
    return server


def environment(server: Hub, folder: Path, **more: str) -> dict[str, str]:
    own = {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "60",
    }
    own["HF_HUB_ETAG_TIMEOUT"] = "60"  # a busy machine is no fault
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    return kept | own | more


def run(
    server: Hub, folder: Path, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """medusa-chat in a process of its own that cannot know what this one imported."""
    code = options.pop(
        "code", "import sys; from medusa_chat.cli.main import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(server, folder, **options.pop("env", {})),
        capture_output=True,
        text=True,
        timeout=900,
        **options,
    )


def run_watched(server: Hub, folder: Path, commands: Any, codes: list[int], **env: str) -> str:
    """stdout of commands that end with these codes and use no network."""
    asked = len(server.requests)
    done = run(server, folder, json.dumps(commands), code=WATCHED, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == codes, done.stderr
    assert len(server.requests) == asked and "NETWORK" not in done.stderr
    return done.stdout


def one_line(code: int, stderr: str, says: str) -> None:
    assert code == 4, stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("medusa-chat: ") and says in last, stderr
    assert "Traceback" not in stderr


def test_what_was_pulled_decodes_offline(server: Hub, tmp_path: Path) -> None:
    """A checkpoint, and heads on their base."""
    pulled = run(server, tmp_path, "models", "pull", TINY, "--json")
    assert pulled.returncode == 0, pulled.stderr
    told = json.loads(pulled.stdout)
    assert told["id"] == TINY and told["base"] is None
    assert told["fetched_bytes"] == told["total_bytes"] > 10_000
    pulled = run(server, tmp_path, "models", "pull", TINY_HEADS)
    assert pulled.returncode == 0, pulled.stderr
    assert f"backbone {TINY_BASE}" in pulled.stderr
    asked = ("--prompt", "hello", "--json", "--max-new-tokens", "8", "--tree", "dense-2-2")
    whole = ("generate", "--checkpoint", TINY, *asked, "--offline")
    heads = ("generate", "--checkpoint", TINY_HEADS, "--backbone", TINY_BASE, *asked, "--offline")
    refused = [(*command, "--offline") for command in (*NEED_NETWORK, NOT_HERE)]
    codes = [0, 0] + [4] * len(refused)
    said = run_watched(server, tmp_path, [whole, heads, *refused], codes)
    events = [json.loads(line) for line in said.splitlines()]
    first = [event for event in events if event["event"] == "prefilled"]
    assert [event["model"] for event in first] == [TINY, TINY_HEADS]
    assert {event["settings"]["drafter"] for event in first} == {"auto"}
    last = [event for event in events if event["event"] == "finished"]
    assert [len(event["token_ids"]) for event in last] == [8, 8]


def test_generate_downloads_what_is_not_here(here: Hub) -> None:
    options = ("--prompt", "x", "--max-new-tokens", "2", "--tree", "dense-2-2")
    assert main(["generate", "--checkpoint", TINY, *options]) == 0
    assert hub.find(TINY) is not None


def test_the_variable_for_offline_opens_no_socket(server: Hub, tmp_path: Path) -> None:
    commands = [("models", "list"), *NEED_NETWORK]  # of `generate` the option is tested above
    run_watched(server, tmp_path, commands, [0, 4, 4], HF_HUB_OFFLINE="1")


def begun_bytes(folder: Path) -> int:
    total = 0
    for file in (folder / "hf" / "hub").rglob("*.incomplete"):
        with suppress(FileNotFoundError):  # whole in this moment, and renamed
            total += file.stat().st_size
    return total


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_pull_goes_on_where_it_was(
    server: Hub, tmp_path: Path, sign: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from huggingface_hub import constants

    name = "model-00001-of-00002.safetensors"
    server.repos[BASE].files[name] = weights(4 * MB, 9)
    server.faults = [Fault(f"/cdn/.*{name}", "slow", 1, after=2 * MB, rate=20_000)]
    process = subprocess.Popen(
        [sys.executable, "-m", "medusa_chat", "models", "pull", BASE],
        env=environment(server, tmp_path),
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: begun_bytes(tmp_path) > 1.5 * MB, seconds=600)
    process.send_signal(sign)
    assert process.wait(timeout=120) == (-sign if sign == signal.SIGKILL else 128 + sign)
    kept = begun_bytes(tmp_path)
    assert kept > 1.5 * MB
    # In this process, where torch is imported already: what counts is what lies in that cache.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code = main(["generate", "--prompt", "x", "--checkpoint", BASE, "--offline"])
    one_line(code, capsys.readouterr().err, "is incomplete")
    before = server.sent
    again = run(server, tmp_path, "models", "pull", BASE, "--json")
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert told["fetched_bytes"] <= told["total_bytes"] - kept
    late = 200_000  # what the server still wrote to the one that was killed
    assert server.sent - before <= told["fetched_bytes"] + late
    place = Path(told["folders"][BASE]) / name
    assert place.read_bytes() == server.repos[BASE].files[name]


def test_a_full_disk_is_one_line_and_the_rest_comes_later(server: Hub, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    server.repos[BASE].files[name] = weights(3 * MB, 9)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MB, resource.RLIM_INFINITY))

    full = run(server, tmp_path, "models", "pull", BASE, preexec_fn=limit)
    one_line(
        full.returncode, full.stderr, "is full while downloading model-00001-of-00002.safetensors"
    )
    assert 0 < begun_bytes(tmp_path) <= MB
    again = run(server, tmp_path, "models", "pull", BASE)
    assert again.returncode == 0, again.stderr


def test_list_search_and_rm_in_json(here: Hub, capsys: Any) -> None:
    assert main(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["cached"] == [] and len(listed["known"]) > 10
    assert main(["models", "pull", HEADS, "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert pulled["base"] == BASE and pulled["fetched_bytes"] == pulled["total_bytes"]
    assert main(["models", "list", "--json"]) == 0
    cached = {row["id"]: row for row in json.loads(capsys.readouterr().out)["cached"]}
    assert cached[HEADS]["has_heads"] and cached[BASE]["whole"]
    assert main(["models", "rm", BASE, "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)
    assert freed["id"] == BASE and 0 < freed["freed_bytes"] <= cached[BASE]["bytes"] + 5000
    assert main(["models", "search", "heads", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fresh"] and {row["id"] for row in found["found"]} == {HEADS, TINY_HEADS}


def test_list_search_and_rm_for_a_reader(here: Hub, capsys: Any) -> None:
    assert main(["models", "list"]) == 0
    assert "demo  (part of medusa-chat" in capsys.readouterr().out
    assert main(["models", "pull", WHOLE]) == 0
    out, err = capsys.readouterr()
    assert f"medusa-chat --checkpoint {WHOLE}" in out and "to download of" in err
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{WHOLE}  (with Medusa heads)" in out and "FasterDecoding/" in out
    assert main(["models", "search", "whole"]) == 0
    assert WHOLE in capsys.readouterr().out
    assert main(["models", "rm", WHOLE]) == 0
    assert " freed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("pull", "nobody/nothing"), 4, "nobody/nothing is not on the Hub"),
        (("pull", "someone/medusa-haeds"), 4, f"did you mean {HEADS}"),
        (("pull", "no id"), 4, "not a valid Hub id"),
        (("rm", "nobody/nothing"), 4, "not in the cache"),
        (("search", "qwertz"), 4, "has Medusa heads"),
        (("pull",), 2, "ID"),
        (("dance",), 2, "dance"),
        ((), 2, "command"),
    ],
)
def test_refusals_are_one_line(
    here: Hub, capsys: Any, arguments: tuple[str, ...], code: int, says: str
) -> None:
    assert main(["models", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("medusa-chat: ") and err.count("\n") == 1
    assert says.lower() in err.lower()


@pytest.mark.parametrize(
    "command", [["models", "pull"], ["generate", "--prompt", "x", "--checkpoint"]]
)
def test_a_family_that_cannot_be_decoded_is_said_before_anything_is_fetched(
    here: Hub, capsys: Any, command: list[str]
) -> None:
    files = here.repos[BASE].files
    config = json.loads(files["config.json"]) | {"model_type": "bloom"}
    files["config.json"] = json.dumps(config).encode()
    assert main([*command, HEADS]) == 4
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("medusa-chat: model family bloom is not supported")
    assert hub.find(HEADS) is None and not hub.cached()


def test_a_gated_base_is_said_before_anything_is_fetched(here: Hub, capsys: Any) -> None:
    here.repos[BASE].gated = "manual"
    assert main(["models", "pull", HEADS]) == 4
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{here.url}/{BASE}" in last and "hf auth login" in last
    assert hub.find(HEADS) is None


def test_a_search_without_the_hub_shows_the_last_one(
    here: Hub, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert main(["models", "search", "heads"]) == 0
    fresh = capsys.readouterr().out
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["models", "search", "heads"]) == 0
    out, err = capsys.readouterr()
    assert out == fresh and "last search" in err


def test_a_terminal_sees_one_line_that_changes(
    here: Hub, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["models", "pull", WHOLE]) == 0
    err = capsys.readouterr().err
    assert "\r\x1b[K100%" in err


def test_progress_says_bytes_speed_and_time() -> None:
    from medusa_chat.cli.terminal import download_line
    from medusa_chat.units import clock, number

    event = hub.DownloadEvent("download", "model.safetensors", 25 * MB, 100 * MB, 5e6, 15.0)
    assert download_line(event) == "25%  25 MB of 100 MB  5 MB/s  0:15 left  model.safetensors"
    assert [clock(s) for s in (0, 59.7, 3725)] == ["0:00", "1:00", "1:02:05"]
    sizes = {13_476_839_424: "13.5 GB", 999_600: "1 MB", 99_960: "100 kB", 999: "999 bytes"}
    assert {hub.gb(size) for size in sizes} == set(sizes.values())
    assert hub.gb(3.2e12) == "3200 GB"
    counts = {3_369_408: "3.37 million", 6_738_415_616: "6.74 billion", 999_400: "999,400"}
    assert {number(count) for count in counts} == set(counts.values())


@pytest.mark.usefixtures("shipping")
def test_of_heads_that_ship_the_backbone_is_what_is_pulled_listed_and_removed(
    here: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    here.repos[SHIPPED_BASE] = HubRepo(here.repos[TINY_BASE].files)
    assert main(["models", "list"]) == 0
    listed = capsys.readouterr().out
    assert f"{SHIPPED}  (heads; part of medusa-chat)" in listed
    assert main(["models", "pull", SHIPPED, "--json"]) == 0
    pulled = json.loads(capsys.readouterr().out)
    assert pulled["base"] == SHIPPED_BASE and list(pulled["folders"]) == [SHIPPED_BASE]
    assert main(["models", "list"]) == 0
    assert any(line.startswith("*") for line in capsys.readouterr().out.splitlines())
    assert main(["models", "rm", SHIPPED]) == 0
    assert hub.find(SHIPPED_BASE) is None
    assert main(["models", "rm", SHIPPED]) == 4
