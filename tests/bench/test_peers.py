"""The study "peers": GGUF files beside llama-bench. No figure of this file is a measurement."""

import json
import stat
import subprocess
import sys

import pytest
from support.gguf_models import tiny_model, write_gguf

from medusa_chat.bench import llama_bench, peers, run_peers, speed, table
from medusa_chat.bench.llama_bench import LlamaBench, LlamaBenchFailed
from medusa_chat.bench.peers import (
    FileFigures,
    _memory_rows,
    _speed_rows,
    asked_by_category,
    read_bytes,
)
from medusa_chat.bench.rows import row
from medusa_chat.bench.run import run
from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, Placed, read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset

REQUEST = LoadRequest(device="cpu", precision="fp32")
FAKE = f"""#!{sys.executable}
import json, sys, time
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
time.sleep(0.2)  # long enough that its memory is seen
if "bad" in asked["-m"]:
    sys.exit("no such model")
print(json.dumps([{{"avg_ts": float(asked["-n"]), "build_commit": "abc", "backends": "CPU"}}]))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("peers") / "tiny.gguf", tiny_model(), "Q8_0")


@pytest.fixture
def program(tmp_path):
    """A llama-bench that is as fast as it has tokens to make."""
    made = tmp_path / "llama-bench"
    made.write_text(FAKE, "utf-8")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


@pytest.fixture
def prompts(tmp_path):
    lines = [f'{{"category": "{c}", "turns": ["{c} {n}"]}}\n' for c in "ab" for n in range(4)]
    made = tmp_path / "prompts.jsonl"
    made.write_text("".join(lines), "utf-8")
    return made


def test_a_file_is_measured_in_turns_with_llama_bench(file, program, prompts, monkeypatch):
    monkeypatch.setattr(peers, "READ", 1000)
    monkeypatch.setattr(peers, "most_threads", lambda: 2)
    result = run_peers(
        REQUEST,
        [file],
        program,
        rounds=2,
        max_new_tokens=8,
        progress=lambda message: None,
        prompts=prompts,
        questions=1,
    )
    rows = {row["name"].removeprefix("tiny.gguf: "): row for row in result["rows"]}
    assert rows["llama.cpp"]["value"] == 8 and result["machine"]["llama.cpp"] == "commit abc, CPU"
    assert rows["plain"]["ratio"] == pytest.approx(rows["plain"]["value"] / 8)
    for where in ("a", "b"):
        assert rows[f"default on {where}"]["ratio"] > 0
        assert rows[f"same text on {where}"]["value"] == 1
    for name in ("memory bandwidth", "share of the bandwidth", "first answer"):
        assert rows[name]["value"] > 0, name
    assert "x llama.cpp" in table(result) and "threads" in result["machine"]
    if sys.platform == "linux":
        assert rows["peak memory"]["value"] > rows["peak memory, llama.cpp"]["value"] > 0


def test_without_llama_bench_the_remedy_is_said(file, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LlamaBenchFailed, match="--llama-bench FILE") as refused:
        LlamaBench().run(file, 8, 1, "cpu")
    figures = FileFigures(plain=[2.0], bandwidth=[1e9], why=str(refused.value))
    llama, plain, *_ = _speed_rows(file, figures, 10**8, "8 tokens")
    assert llama["value"] is None and "--llama-bench FILE" in llama["note"]
    assert plain["value"] == 2 and plain["ratio"] is None


def test_one_thread_is_timed_by_the_processor_without_the_load(file, program, monkeypatch):
    seconds = iter([0.0, 3.0, 3.0, 4.0])  # before and after a long run and a short one
    monkeypatch.setattr(llama_bench, "_processor_seconds", lambda: next(seconds))
    assert LlamaBench(program).run(file, 8, 1, "cpu")[0] == 8 / (3 - 1)


def test_a_llama_bench_that_fails_says_its_last_line(program, tmp_path):
    with pytest.raises(LlamaBenchFailed, match="no such model"):
        LlamaBench(program).run(tmp_path / "bad.gguf", 8, 1, "cpu")
    program.write_text(f"#!{sys.executable}\n", "utf-8")
    with pytest.raises(LlamaBenchFailed, match="printed no JSON"):
        LlamaBench(program).run(tmp_path / "x.gguf", 8, 1, "cpu")


def test_what_is_no_file_is_refused_before_anything_is_measured(tmp_path, program):
    for files in ([], [tmp_path / "none.gguf"], [program]):
        with pytest.raises(UsageError, match="--file FILE.gguf"):
            run_peers(
                REQUEST, files, None, rounds=1, max_new_tokens=8, progress=lambda message: None
            )


def test_the_prompts_are_spread_over_each_category(prompts):
    asked = asked_by_category(prompts, 2, lambda message: None)
    assert asked == [("a 0", "a"), ("a 2", "a"), ("b 0", "b"), ("b 2", "b")]
    own = asked_by_category(None, None, lambda message: None)
    assert {category for _, category in own} == {"HumanEval", "MT-Bench"} and len(own) == 16


def test_a_step_reads_every_tensor_but_an_embedding_beside_an_lm_head(file):
    header = read_gguf(LocalFolder(file.parent), file.name)
    whole = sum(tensor.bytes for tensor in header.tensors.values())
    assert "output.weight" in header.tensors
    assert read_bytes(header) == whole - header.tensors["token_embd.weight"].bytes


def test_of_experts_a_step_reads_as_many_as_a_token_uses():
    tensors = {"token_embd.weight": Placed((4, 4), 0, 0, 64)}
    tensors |= {"blk.0.ffn_up_exps.weight": Placed((8, 4, 4), 0, 64, 512)}
    told = {"general.architecture": "x", "x.expert_count": 8, "x.expert_used_count": 2}
    assert read_bytes(GgufHeader(told, tensors)) == 64 + 512 * 2 // 8


@pytest.mark.parametrize("study", ["speed", "steps"])
def test_a_file_without_heads_is_measured_too(file, study, monkeypatch):
    monkeypatch.setattr(speed, "HOSTILE_ROUNDS", 1)
    monkeypatch.setattr(speed, "TURNS", 1)
    monkeypatch.setattr(speed, "WAKING", 0)
    request = LoadRequest(str(file), device="cpu", precision="fp32")
    quiet = {"progress": lambda message: None, "budget": 0.0}
    result = run(request, rounds=1, max_new_tokens=6, tree="auto", studies=[study], **quiet)
    rows = {row["name"]: row for row in result["rows"]}
    if study == "steps":
        for nodes in (2, 4, 8, 16, 32):
            assert rows[f"step of {nodes} nodes"]["ratio"] > 0
    else:
        assert rows["auto"]["against"] == rows["prompt-lookup"]["against"] == "plain"
        assert rows["identical to plain, auto"]["value"] == 1 and "medusa" not in rows
        assert "--study peers" in rows["generate"]["note"]


def test_the_readmes_table_is_made_of_a_result(tmp_path):
    """In it what was not measured is said, and every ratio is that of its row."""
    figures = FileFigures([10.0], [15.0], [2e9])
    rows = [*_speed_rows(tmp_path / "a.gguf", figures, 10**8, "8 tokens")]
    bare = FileFigures(plain=[3.0], bandwidth=[1e9], why="no llama-bench")
    rows += _speed_rows(tmp_path / "b.gguf", bare, 10**8, "8 tokens")
    for name, found in (("a.gguf", figures), ("b.gguf", bare)):
        rows += _memory_rows(tmp_path / name, found, 10**8, 2 * 10**8)
        rows.append(row(f"{name}: first answer", [2.5], "s"))
    rows.append(row("a.gguf: default on HumanEval", [30.0], "tokens/s", "plain", [20.0]))
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"machine": {"threads": 2}, "rows": rows}), "utf-8")
    command = [sys.executable, str(asset("benchmarks", "peers_table.py")), str(result)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "threads: 2"
    cells = "| a.gguf | 10 | 15 (1.50 x) | 30 (3.00 x, 1.50 x plain) | not measured | 75 % |"
    assert lines[-2] == f"{cells} 0.20 GB (not measured) | 2.5 s |"
    assert lines[-1].startswith("| b.gguf | not measured | 3.0 (beside nothing) | not measured |")
