"""`medusa-chat train` and `calibrate`, whole: from a tiny backbone to a checkpoint that loads."""

import errno
import json
import os
import re
import signal
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.gguf_models import tiny_model, write_gguf
from support.training_models import CONTEXT, conversations, write_backbone, write_rows
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.load import load
from medusa_chat.cli.main import main
from medusa_chat.cli.training import TrainingView, accuracy_text
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import data_dir
from medusa_chat.runtime.history import FILE, History, StoredConversation
from medusa_chat.runtime.stored_conversation import MessageTree
from medusa_chat.training.events import TrainStep, latest
from medusa_chat.training.examples import Example
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe, TrainRequest, read_recipe, recipe_names
from medusa_chat.training.setup import Base, Plan, plan
from medusa_chat.training.trainer import new_heads
from medusa_chat.trees.calibration import CALIBRATION_FILE

QUICK = ["--device", "cpu", "--precision", "fp32", "--heads", "3", "--batch-tokens", "512"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, one whose embeddings are tied, conversations and prompts."""
    folder = tmp_path_factory.mktemp("ground")
    write_backbone(folder / "backbone")
    write_backbone(folder / "tied", tied=True)
    write_rows(folder / "data.jsonl", conversations())
    write_rows(folder / "prompts.jsonl", [{"turns": ["abc", "de"]}, {"turns": ["fgh"]}] * 3)
    return folder


def command(inputs: Path, output: Path, *options: str, data: str = "data.jsonl") -> list[str]:
    backbone = str(inputs / "backbone")
    start = ["train", "--backbone", backbone, "--data", str(inputs / data)]
    return [*start, "--output", str(output), *QUICK, *options]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def loaded_from(folder: Path) -> Any:
    *_, (_, loaded) = load(LoadRequest(str(folder), precision="fp32", device="cpu"))
    return loaded


def acceleration(loaded: Any, prompt: str) -> float:
    """Tokens a step of a chain as deep as the heads."""
    ids = loaded.tokenizer(f"<user>{prompt}</s><assistant>")["input_ids"]
    chain = Tree.from_choices([(0,) * (k + 1) for k in range(loaded.info.heads)])
    settings = GenerationSettings(drafter="medusa", max_new_tokens=24, nodes=len(chain), seed=0)
    drafter = loaded.engine.drafter(settings, chain)
    *_, last = loaded.engine.generate(ids, drafter, settings)
    assert isinstance(last, Finished) and last.stats.acceleration_rate is not None
    return last.stats.acceleration_rate


# -------------------------------------------------------------------------------- medusa-1


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "out"
    options = ("--max-steps", "60", "--learning-rate", "0.015", "--warmup-steps", "2")
    assert main(command(inputs, output, *options)) == 0
    return output


def test_acceleration_rises_with_training(
    inputs: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-steps", "1", "--learning-rate", "1e-8")
    assert main(command(inputs, tmp_path / "raw", *options)) == 0
    raw = acceleration(loaded_from(tmp_path / "raw"), "cde")
    learnt = acceleration(loaded_from(trained), "cde")
    assert raw < 1.5 and learnt > 3.0


def test_output_is_whole_and_names_its_backbone(inputs: Path, trained: Path) -> None:
    names = {file.name for file in trained.iterdir()}
    heads = {"medusa_lm_head.safetensors", "medusa_calibration.json"}
    assert names == heads | {"config.json", "README.md"}
    assert [file.name for file in trained.parent.iterdir()] == ["out"]
    loaded = loaded_from(trained)
    assert loaded.info.heads == 3 and loaded.calibration is not None
    assert loaded.calibration.accuracies[0][0] > 0.8
    found = json.loads((trained / "medusa_calibration.json").read_text("utf-8"))
    assert "greedy answers" in found["measured_on"]
    assert found["tokens_per_step"]["4"] > 2.5  # the tree is searched on these whole answers
    assert str(inputs / "backbone") in (trained / "README.md").read_text("utf-8")


def test_stopped_training_goes_on_to_the_same_bits(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    recipe = ("--recipe", "medusa-1", "--max-steps", "6", "--json")
    assert main(command(inputs, tmp_path / "whole", *recipe)) == 0
    whole = events_of(capsys.readouterr().out)

    shown = TrainingView.show

    def interrupting(view: Any, event: Any) -> None:
        shown(view, event)
        if getattr(event, "step", None) == 3:
            import signal

            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingView, "show", interrupting)
    assert main(command(inputs, tmp_path / "cut", *recipe)) == 130
    assert not (tmp_path / "cut").exists()
    first = events_of(capsys.readouterr().out)
    monkeypatch.undo()
    assert main(command(inputs, tmp_path / "cut", *recipe)) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(command(inputs, tmp_path / "cut", *recipe, "--seed", "9", "--resume")) == 2
    assert "seed" in capsys.readouterr().err
    assert main(command(inputs, tmp_path / "cut", *recipe, "--resume")) == 0
    rest = events_of(capsys.readouterr().out)
    steps = [e for e in first + rest if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6]
    assert steps == [e for e in whole if e["event"] == "step"]
    for name in ("medusa_lm_head.safetensors", "medusa_calibration.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "cut.training").exists()


def test_backbone_answers_every_question_in_order(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "short.toml"
    recipe.write_text("distill = true\nanswer_tokens = 12\n")
    options = ("--recipe", str(recipe), "--max-steps", "2", "--json")
    line = command(inputs, tmp_path / "out", *options, data="prompts.jsonl")
    assert main(line) == 0
    events = events_of(capsys.readouterr().out)
    answered = [e for e in events if e["event"] == "answered"]
    assert answered[-1]["done"] == answered[-1]["total"] == 3 * 2 + 3
    plan = next(e for e in events if e["event"] == "plan")
    assert plan["rows"] + plan["held_out"] == 9 and plan["steps"] == 2
    assert any("learn little in 2 steps" in note for note in plan["notes"])
    assert [e["event"] for e in events][-1] == "written"
    kept = tmp_path / "out.answers.jsonl"
    assert events[-1]["answers"] == str(kept)
    rows = [json.loads(row)["messages"] for row in kept.read_text("utf-8").splitlines()]
    assert [m["content"] for m in rows[0] if m["role"] == "user"] == ["abc", "de"]
    assert len(rows) == 6 and all(row[-1]["role"] == "assistant" for row in rows)
    again = command(inputs, tmp_path / "again", "--max-steps", "2", "--json")
    again[again.index("--data") + 1] = str(kept)
    assert main(again) == 0 and (tmp_path / "again").is_dir()
    plan = next(e for e in events_of(capsys.readouterr().out) if e["event"] == "plan")
    assert plan["rows"] + plan["held_out"] == 6


# -------------------------------------------------------------------------------- medusa-2


@pytest.mark.parametrize("recipe", ["vicuna-two-stage", "self-distilled-sine"])
@pytest.mark.parametrize("backbone", ["backbone", "tied"])
def test_medusa_2_gives_a_whole_model(
    inputs: Path, tmp_path: Path, recipe: str, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--recipe", recipe, "--max-steps", "3", "--learning-rate", "0.01", "--json"]
    line = command(inputs, tmp_path / "out", *options, "--sequence-length", "48")
    assert main([*line, "--backbone", str(inputs / backbone)]) == 0
    events = events_of(capsys.readouterr().out)
    joint = [e for e in events if e["event"] == "step" and e["lm_loss"] is not None]
    assert [e["step"] for e in joint] == [1, 2, 3]
    if recipe == "self-distilled-sine":  # a fresh adapter changes nothing
        assert abs(joint[0]["lm_loss"]) < 1e-5 < joint[-1]["lm_loss"]
    loaded = loaded_from(tmp_path / "out")
    assert loaded.info.heads == 3
    before = load_file(inputs / backbone / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(before[n], after[n]) for n in before if n in after)
    table = "model.embed_tokens.weight"
    assert torch.equal(before[table], after[table])  # the tied head is left alone, too


def test_adapter_output_is_what_load_merges(inputs: Path, tmp_path: Path) -> None:
    outputs = {}
    for kind in ("merged", "adapter"):
        recipe = tmp_path / f"{kind}.toml"
        recipe.write_text(
            f'method = "medusa-2"\noutput = "{kind}"\noptimizer = "adamw"\nlearning_rate = 1e-2\n'
            "lora_rank = 4\n"
        )
        outputs[kind] = tmp_path / kind
        line = command(inputs, outputs[kind], "--recipe", str(recipe), "--max-steps", "2")
        assert main(line) == 0
    ids = torch.arange(8)
    hidden = []
    for folder in outputs.values():
        backbone = loaded_from(folder).engine.backbone
        hidden.append(backbone.lm_head(backbone.run_chunk(ids)))
    torch.testing.assert_close(*hidden)


def test_the_page_watches_a_training_and_may_stop_it(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:

    shown = TrainingView.show

    def wishing(view: Any, event: Any) -> None:
        shown(view, event)
        if getattr(event, "step", None) == 2:
            latest().ask_to_stop()  # after the first step, which is in the log by now

    monkeypatch.setattr(TrainingView, "show", wishing)
    recipe = ("--recipe", "medusa-1", "--max-steps", "6", "--json")
    assert main(command(inputs, tmp_path / "out", *recipe)) == 130
    run = latest()
    assert run.output == str(tmp_path / "out") and run.ended["reason"] == "stopped"
    steps = [event for event in run.events if event["event"] == "step"]
    told = [e for e in events_of(capsys.readouterr().out) if e["event"] == "step"]
    assert steps and steps[0] == told[0] and len(told) == 2
    before = run.file
    assert main(command(inputs, tmp_path / "out", *recipe)) == 2, "it holds an unfinished one"
    assert latest().file == before, "what is refused leaves no log"


def test_a_refused_training_leaves_nothing_that_refuses_the_next(
    inputs: Path, tmp_path: Path, capsys: Any
) -> None:
    write_rows(inputs / "short.jsonl", [{"text": "a"}])
    wrong = command(inputs, tmp_path / "out", data="short.jsonl")
    for _ in range(2):
        assert main(wrong) == 2
        assert "no usable example" in capsys.readouterr().err
        assert not (tmp_path / "out.training").exists()
    (tmp_path / "out.training").mkdir()  # of one that was killed before it did anything
    (tmp_path / "out.training" / "request.json").write_text("{")
    assert main(wrong) == 2 and "no usable example" in capsys.readouterr().err


# ------------------------------------------------------------------------------- calibrate


def test_calibration_says_what_it_expects_and_measures(
    inputs: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tree.json"
    line = ["calibrate", "--checkpoint", str(trained), "--data", str(inputs / "prompts.jsonl")]
    line += ["--nodes", "8", "--output", str(file), "--precision", "fp32", "--device", "cpu"]
    assert main([*line, "--json"]) == 0
    events = {e["event"]: e for e in events_of(capsys.readouterr().out)}
    sizes = events["measured"]["sizes"]
    assert [nodes for nodes, *_ in sizes][-1] == len(events["calibrated"]["choices"]) + 1 <= 8
    assert all(abs(expected - measured) < 0.8 for _, expected, measured in sizes)
    saved = json.loads(file.read_text("utf-8"))
    assert saved["choices"] == events["calibrated"]["choices"]
    promised = {int(n): rate for n, rate in saved["tokens_per_step"].items()}
    assert promised and all(promised[n] == expected for n, expected, _ in sizes)
    asked = ["generate", "--checkpoint", str(trained), "--tree", str(file), "--prompt", "abc"]
    assert main([*asked, "--max-new-tokens", "4", "--device", "cpu"]) == 0


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_calibration_renews_the_figures_of_the_card_and_nothing_else_of_it(
    inputs: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], newline: str
) -> None:
    before = (trained / "README.md").read_text("utf-8")
    card = tmp_path / "README.md"
    card.write_text(before + "\nMeasured on a fine day: mine.\n", "utf-8", newline=newline)
    card.chmod(0o644)
    line = ["calibrate", "--checkpoint", str(trained), "--data", str(inputs / "prompts.jsonl")]
    line += ["--nodes", "8", "--output", str(tmp_path / CALIBRATION_FILE)]
    assert main([*line, "--precision", "fp32", "--device", "cpu", "--json"]) == 0
    *_, written = events_of(capsys.readouterr().out)
    assert written["folder"] == str(card)
    assert card.stat().st_mode & 0o777 == 0o644
    assert card.read_bytes().count(newline.encode()) == card.read_bytes().count(b"\n")
    after = card.read_text("utf-8")
    assert "greedy answers of the backbone to prompts.jsonl" in after
    assert after.endswith("\nMeasured on a fine day: mine.\n")
    kept = [[one for one in text.splitlines() if one.startswith("- ")] for text in (before, after)]
    assert kept[0] == kept[1] and len(after.splitlines()) == len(before.splitlines()) + 2
    saved = json.loads((tmp_path / CALIBRATION_FILE).read_text("utf-8"))
    assert all(f"{rate:.2f} with {n}" in after for n, rate in saved["tokens_per_step"].items())


def test_calibration_of_a_model_that_is_not_ours_needs_a_place(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--data", str(inputs / "prompts.jsonl")]) == 2
    assert "--output" in capsys.readouterr().err


def test_calibration_asks_the_users_own_chats_again(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(data_dir() / FILE)
    assert history.own()
    for number in range(3):
        said = MessageTree().plus("user", f"abc {number}").plus("assistant", "a secret")
        assert history.save(f"browser {number}", StoredConversation(said))
    file = tmp_path / "mine.json"
    line = ["calibrate", "--checkpoint", str(trained), "--chats", "--output", str(file)]
    assert main([*line, "--nodes", "8", "--precision", "fp32", "--device", "cpu"]) == 0
    capsys.readouterr()
    saved = json.loads(file.read_text("utf-8"))
    assert saved["measured_on"] == "3 greedy answers of the backbone to the user's own chats"
    assert "secret" not in json.dumps(saved)


@pytest.mark.parametrize(
    "asked, said", [([], "give --data FILE or --chats"), (["--chats"], "there are no saved chats")]
)
def test_calibration_without_anything_to_ask_says_so(
    asked: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *asked, "--output", str(tmp_path / "tree.json")]) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------- bad input


def test_recipes_that_ship_are_whole() -> None:
    names = {"default", "medusa-1", "vicuna-two-stage", "self-distilled-sine"}
    assert set(recipe_names()) == names
    sine = read_recipe("self-distilled-sine")
    assert (sine.lambda0, sine.lambda0_schedule, sine.learning_rate) == (0.01, "sine", 1e-4)
    two = read_recipe("vicuna-two-stage")
    assert (two.lambda0, two.head_learning_rate, two.lora_rank) == (0.2, 2e-3, 32)
    assert isinstance(read_recipe("default"), Recipe)


def test_medusa_2_without_a_recipe_of_its_own_spares_the_backbone(tmp_path: Path) -> None:
    default = read_recipe("default")
    (tmp_path / "own.toml").write_text('method = "medusa-2"\nroot = true\n')
    for made in (default.changed(method="medusa-2"), read_recipe(str(tmp_path / "own.toml"))):
        assert (made.learning_rate, made.stages) == (5e-4, 2)
        assert made.head_learning_rate == pytest.approx(default.head_learning_rate)
    asked = default.changed(method="medusa-2", learning_rate=1e-3)
    assert (asked.learning_rate, asked.head_learning_rate_multiplier) == (1e-3, 4.0)


def refusal(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()  # what making the files said
    assert main(line) in (1, 2, 4)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "0"], "heads is 0: give a whole number from 1 to 10"),
        (["--heads", "11"], "heads is 11: give a whole number from 1 to 10"),
        (["--method", "medusa-3"], "choose medusa-1 or medusa-2"),
        (["--recipe", "no-such"], "there is no recipe"),
        (["--learning-rate", "nan"], "learning-rate is nan"),
        (["--sequence-length", str(2 * CONTEXT)], f"context is {CONTEXT}"),
        (["--data", "no-such-file.json"], "there is no file no-such-file.json"),
        (["--resume"], "nothing to resume"),
        (["--backbone", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--precision", "fp8"], "precision is 'fp8'"),
        (["--lora-rank", "8"], "--lora-rank needs --method medusa-2"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, said: str
) -> None:
    assert said in refusal(command(inputs, tmp_path / "out", *options), capsys)
    assert not (tmp_path / "out").exists()


def test_other_data_is_no_data_to_go_on_with(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    data = write_rows(tmp_path / "data.jsonl", conversations())
    line = command(inputs, tmp_path / "out", "--max-steps", "4")
    line[line.index("--data") + 1] = str(data)
    show = TrainingView.show

    def interrupting(view: Any, event: Any) -> None:
        show(view, event)
        if isinstance(event, TrainStep):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingView, "show", interrupting)
    assert main(line) == 130
    write_rows(data, conversations()[:-1])
    assert "was started with another data" in refusal([*line, "--resume"], capsys)


def test_a_file_in_the_place_of_the_work_folder_is_left(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.training"
    file.write_text("mine")
    line = command(inputs, tmp_path / "out", "--max-steps", "2")
    assert "out.training is a file: give another --output" in refusal(line, capsys)
    assert "out.training is a file" in refusal([*line, "--resume"], capsys)
    assert file.read_text() == "mine"


def test_two_trainings_do_not_share_a_folder(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Each wrote over the state of the other."""
    line, show = command(inputs, tmp_path / "out", "--max-steps", "2"), TrainingView.show
    again: list[tuple[int, str]] = []

    def beside(view: Any, event: Any) -> None:
        if isinstance(event, TrainStep) and not again:
            capsys.readouterr()
            again.append((main([*line, "--resume"]), capsys.readouterr().err))
        show(view, event)

    monkeypatch.setattr(TrainingView, "show", beside)
    assert main(line) == 0
    ((code, said),) = again
    assert code == 2 and "out.training is in use by a running training" in said


def test_a_full_disk_costs_no_request(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It was empty then, and no --resume could read it."""
    line, folder = command(inputs, tmp_path / "out", "--max-steps", "2"), tmp_path / "out.training"
    show = TrainingView.show

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupting(view: Any, event: Any) -> None:
        show(view, event)
        if isinstance(event, TrainStep):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingView, "show", interrupting)
        assert main(line) == 130
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert "is full: free some space and start again, with --resume if" in refusal(
            [*line, "--resume"], capsys
        )
    assert json.loads((folder / "request.json").read_text())
    assert main([*line, "--resume"]) == 0


def test_hidden_states_that_are_kept_take_no_more_disk(
    inputs: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    line, plans = command(inputs, tmp_path / "out", "--epochs", "2"), list[Plan]()

    def interrupting(view: Any, event: Any) -> None:
        if isinstance(event, Plan):
            plans.append(event)
        if isinstance(event, TrainStep):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingView, "show", interrupting)
    assert main(line) == main([*line, "--resume"]) == 130
    kept = (tmp_path / "out.training" / "inputs.safetensors").stat().st_size
    first, again = plans
    assert 0 < first.disk_bytes - again.disk_bytes < kept
    assert first.memory_bytes == again.memory_bytes


def test_several_processes_keep_no_hidden_states(inputs: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "backbone")
    named = {"model": model, "config": model.config, "device": "cpu", "precision": "fp32"}
    setup: Any = SimpleNamespace(**named, notes=[])
    heads, examples = new_heads(model.lm_head, 2), [Example((1, 2, 3, 4), (False, *[True] * 3))]
    request = TrainRequest("backbone", (), tmp_path / "out", Recipe())

    def planned(cache: bool, processes: int) -> tuple[int, int]:
        recipe = Recipe(cache=cache, max_steps=4)
        group = ProcessGroup(0, processes)
        found = plan(request, recipe, setup, heads, examples, examples, group)
        return found.disk_bytes, found.memory_bytes

    assert planned(True, 1) > planned(False, 1)
    assert planned(True, 2) == planned(False, 1)


def test_output_that_exists_is_left_alone(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert "exists" in refusal(command(inputs, tmp_path / "out"), capsys)
    assert not list((tmp_path / "out").iterdir())


def test_empty_set_and_bad_row_are_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("\n")
    line = command(inputs, tmp_path / "a", data=str(file))
    assert "has no conversation" in refusal(line, capsys)
    file.write_text('{"messages": 3}\n')
    line = command(inputs, tmp_path / "b", data=str(file))
    assert re.search(r"d\.jsonl:1: ", refusal(line, capsys))


def test_a_bad_row_stops_no_training_and_no_calibration(
    trained: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text((inputs / "prompts.jsonl").read_text("utf-8") + '{"messages": 3}\n', "utf-8")
    line = ["calibrate", "--checkpoint", str(trained), "--data", str(file)]
    line += ["--nodes", "8", "--precision", "fp32", "--device", "cpu"]
    assert main([*line, "--output", str(tmp_path / "tree.json")]) == 0
    assert "1 of 7 rows of d.jsonl left out; the first: " in capsys.readouterr().err


def test_backbone_that_cannot_be_used_is_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = write_backbone(tmp_path / "mute", template=None)
    line = [*command(inputs, tmp_path / "a"), "--backbone", str(mute)]
    assert "no chat template" in refusal(line, capsys)
    config = mute / "config.json"
    config.write_text(json.dumps({"model_type": "mamba", "vocab_size": 23, "hidden_size": 32}))
    line = [*command(inputs, tmp_path / "b"), "--backbone", str(mute)]
    assert "mamba is not supported" in refusal(line, capsys)


def test_full_disk_is_refused_before_anything_is_trained(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    line = command(inputs, tmp_path / "out", "--max-steps", "2")
    assert "free some disk space" in refusal(line, capsys)


def test_disk_that_fills_up_keeps_the_training(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from medusa_chat.training import checkpoint_writer

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_heads", full)
    line = command(inputs, tmp_path / "out", "--max-steps", "2")
    assert main(line) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out.training"]
    monkeypatch.undo()
    assert main([*line, "--resume"]) == 0 and (tmp_path / "out").is_dir()


def test_shares_are_shown_short_and_whole() -> None:
    assert accuracy_text(((0.5, 1.0), (0.0, 0.07))) == ".50 1.00 | .00 .07"


def test_heads_are_trained_for_a_gguf_file_and_find_it_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "models" / "a.gguf", tiny_model())
    data = tmp_path / "text.txt"
    data.write_text("the hedgehog heard her. " * 60)
    output = tmp_path / "models" / "heads"
    asked = ["--data", str(data), "--output", str(output), "--max-steps", "2", *QUICK]
    assert main(["train", "--backbone", str(path), *asked]) == 0
    assert json.loads((output / "config.json").read_text())["base_model_name_or_path"] == "a.gguf"
    *_, (_, loaded) = load(LoadRequest(str(output), precision="fp32"))
    assert loaded is not None and loaded.info.heads == 3 and loaded.info.family == "llama"


def test_a_base_beside_the_heads_is_named_alike_on_every_system() -> None:
    class Folder(PureWindowsPath):
        def resolve(self) -> "Folder":
            return self

    base = Base("x", Folder(r"C:\models\deep\base"))  # type: ignore[arg-type]
    assert base.seen_from(Folder(r"C:\models\heads")) == "deep/base"  # type: ignore[arg-type]
    assert base.seen_from(Folder(r"D:\heads")) == r"C:\models\deep\base"  # type: ignore[arg-type]
