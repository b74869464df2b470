"""The page without a browser: what may come in, what is drawn, how a trace is folded."""

import json
import math
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from gradio.queueing import Queue
from support.scripted import ScriptedRunner, best_tree
from support.waiting import wait_for

from medusa_chat.decoding.events import Finished, Stats, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import PortInUseError, UsageError
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.session import Session
from medusa_chat.ui import app as page
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.access.tunnel import GuestServer, ShareError, Tunnel
from medusa_chat.ui.chat.answer import Answer, chatbot_row, rows
from medusa_chat.ui.chat.quick_requests import text_before
from medusa_chat.ui.chat.step_panel import figures, panel_line, recent_rate, verdict
from medusa_chat.ui.chat.view import error_line
from medusa_chat.ui.page.inputs import MAX_CHARACTERS, checked
from medusa_chat.ui.page.tree_view import (
    MAX_TEXT,
    binding,
    margin,
    printable,
    states,
    step_view,
    to_line,
)

TREES = ("chain", "full")
ADDRESS = "http://127.0.0.1:7860/"


def trace(runner: ScriptedRunner, **settings) -> list:
    return list(
        runner.run(Reply([{"role": "user", "content": "hi"}], GenerationSettings(**settings)))
    )


# ---- inputs ----


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "top_k", "min_p", "posterior_threshold", "posterior_alpha"]
    + ["max_new_tokens"],
)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1, 1e9, True, None, "1", [1], {"a": 1}, 10**30]
)
def test_numbers_out_of_range_or_of_no_number_are_refused(name, value):
    with pytest.raises(UsageError) as refused:
        checked({name: value}, TREES)
    assert "\n" not in str(refused.value) and len(str(refused.value)) <= 300


@pytest.mark.parametrize(
    "posted",
    [
        {"acceptance": "other"},
        {"acceptance": ["exact"]},
        {"acceptance": None},
        {"tree": "../../secret.json"},
        {"tree": ["auto"]},
        {"tree": None},
        {"vanilla": "yes"},
        {"vanilla": 1},
        {"vanilla": None},
        {"seed": "-1"},
        {"seed": "1.5"},
        {"seed": "9" * 20},
        {"seed": "٣"},
        {"seed": 5.0},
        {"seed": ["1"]},
        {"max_new_tokens": 1.5},
        {"text": ["a"]},
        {"text": None},
        {"text": {"text": "a"}},
        {"system": 3},
        {"row": -1},
        {"row": True},
        {"row": "1"},
        {"row": [0, 1]},
        {"drafter": "none"},
        {"drafter": None},
        {"nodes": 0},
        {"nodes": 1.5},
        {"nodes": 10_000},
        {"locked": 1},
        {"stop": ["a"]},
        {"stop": "\n".join("abcdefghijklmnopq")},
        {"stop": "   "},
        {"stop": "END\n\t "},
        {"history": []},
        {"surprise": 1},
    ],
)
def test_what_no_event_posts_is_refused(posted):
    with pytest.raises(UsageError):
        checked(posted, TREES)


def test_good_inputs_become_settings():
    inputs = checked(
        {
            "text": "hi",
            "vanilla": True,
            "temperature": 0,
            "max_new_tokens": 64.0,
            "seed": " 12 ",
            "tree": "chain",
            "acceptance": "typical",
            "posterior_alpha": 0.99,
        },
        TREES,
    )
    assert inputs.settings == GenerationSettings(
        drafter="none",
        acceptance="typical",
        max_new_tokens=64,
        seed=12,
        tree="chain",
        posterior_alpha=0.99,
    )
    assert checked({"seed": ""}, TREES).settings.seed is None
    posted = {"drafter": "prompt-lookup", "nodes": 8.0, "stop": "END\n\n  two\r\n", "top_k": 40.0}
    assert checked(posted, TREES).settings == GenerationSettings(
        drafter="prompt-lookup", nodes=8, stop=("END", "  two"), top_k=40
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.0, 0.0), (1.0, 0.999)])
def test_a_locked_delta_is_the_root_of_epsilon_whatever_was_posted(epsilon, delta):
    posted = {"posterior_threshold": epsilon, "locked": True, "posterior_alpha": 0.7}
    assert checked(posted, TREES).settings.posterior_alpha == pytest.approx(delta)


@pytest.mark.parametrize("text", ["", "  \n\t ", "\0\0", "\u2003"])
def test_a_message_without_a_character_is_refused(text):
    with pytest.raises(UsageError, match="empty"):
        checked({"text": text}, TREES)


def test_texts_reach_the_model_clean_and_otherwise_unchanged():
    text = "  a\0b \ud83d\ude00 \ud800 \udc00x\n\tﷺ  "
    assert checked({"text": text}, TREES).text == "  ab 😀 \ufffd \ufffdx\n\tﷺ  "
    assert checked({"system": "\udfff"}, TREES).system == "\ufffd"


def test_a_paste_has_a_limit():
    assert len(checked({"text": "x" * MAX_CHARACTERS}, TREES).text) == MAX_CHARACTERS
    with pytest.raises(UsageError, match="1,000,001 characters"):
        checked({"text": "x" * (MAX_CHARACTERS + 1)}, TREES)


# ---- the picture as data ----


def test_states_follow_from_the_path():
    # 0 has 1 and 2, 1 has 3, 2 has 4, 3 has 5
    assert states((-1, 0, 0, 1, 2, 3), (0, 1)) == "aarruu"
    assert states((-1,), (0,)) == "a"


def test_what_stands_behind_the_end_of_an_answer_is_not_rejected():
    step = next(s for s in trace(ScriptedRunner(nodes=16))[1:-1] if len(s.path) == 2)
    whole = step_view(step)["state"]
    cut = step_view(replace(step, token_ids=step.token_ids[:-1]))["state"]
    behind = [node for node, parent in enumerate(step.draft.parents) if parent == step.path[-1]]
    assert behind and {whole[node] for node in behind} == {"r"}
    assert {node for node, letter in enumerate(cut) if letter == "e"} == set(behind)
    assert cut.replace("e", "r") == whole


def test_margin_is_the_log_of_p_over_threshold():
    assert margin(0.09, 0.03) == round(math.log(3), 2)
    assert margin(1e-60, 0.1) == -99.0
    assert margin(0.0, 0.1) is None and margin(0.1, 0.0) is None  # nothing, everything would pass
    assert margin(None, 0.1) is None and margin(0.1, None) is None


def test_tokens_are_shown_as_what_they_are():
    assert printable(" the") == "·the"
    assert printable("\n") == "⏎" and printable("\t") == "⇥" and printable("") == "∅"
    assert printable("<0xE2>") == "<0xE2>"
    assert printable("\u202e\x00") == "<202E><00>"
    assert len(printable("x" * 1000)) == 24
    assert printable("\u0301") == "◌\u0301"  # a mark alone has something to stand on
    assert printable("日本") == "日本" and printable(" שלום") == "·שלום"


@pytest.mark.parametrize("seen", ["👩‍👩‍👧", "🇩🇪", "👍🏽", "e\u0301", "می‌خواهم"])
def test_what_is_seen_as_one_character_is_never_cut_in_two(seen):
    assert printable(seen) == seen
    for pad in range(MAX_TEXT + 1):
        shown = printable("x" * pad + seen * 30)
        assert len(shown) <= MAX_TEXT and shown.endswith("…")
        rest = shown[pad:-1]
        whole = seen * 30
        assert whole.startswith(rest)
        if rest and seen != "می‌خواهم":
            assert len(rest) % len(seen) == 0


def test_the_smaller_side_of_the_threshold_binds():
    assert binding(0.09, 0.09) == "e"
    assert binding(0.09 * (1 - 1e-8), 0.09) == "e"  # what float32 made of it
    assert binding(0.0899, 0.09) == "d"
    assert binding(None, 0.09) == "-" and binding(0.05, None) == "-"


def test_each_parent_of_a_typical_step_says_what_binds():
    runner = ScriptedRunner(nodes=16, delay=0.001, prefill=0)
    for step in trace(runner, acceptance="typical", temperature=0.7)[1:-1]:
        view = step_view(step, 0.09)
        for node, letter in enumerate(view["binds"]):
            relaxed = 0.3 * math.exp(-step.draft.entropies[node])
            assert letter == ("e" if relaxed >= 0.09 else "d")
    assert step_view(trace(runner)[1], 0.09)["binds"] is None


@pytest.mark.parametrize("settings", [{}, {"acceptance": "typical", "temperature": 0.7}])
def test_a_step_of_64_nodes_fits_in_10_kb(settings):
    runner = ScriptedRunner(nodes=64, delay=0.001, prefill=0)
    events = trace(runner, **settings)
    step = next(e for e in events if isinstance(e, Step) and len(e.path) > 1)
    view = step_view(step)
    assert len(view["state"]) == len(view["text"]) == len(view["parent"]) == 64
    assert [n for n, s in enumerate(view["state"]) if s == "a"] == list(step.path)
    if settings:
        assert view["margin"][1] == margin(step.draft.probabilities[1], step.draft.thresholds[0])
    else:
        assert all(view["same"][node] == 1 for node in step.path[1:])
    answer = Answer()
    answer.add(events)
    line = panel_line(answer, 30.0)
    assert len(line.encode()) < 10_000 and "<" not in line
    assert json.loads(line)["step"]["index"] == len(answer.steps) - 1


def test_a_step_without_a_record_has_numbers_only():
    view = step_view(Step(3, (5, 6), "a b", 0.01, (0, 1)))
    assert view == {
        **{"index": 3, "tokens": 2, "nodes": 1, "accepted": 1},
        **{"ms": 10.0, "heads_ms": 0.0, "backbone_ms": 0.0},
    }


def test_json_for_the_page_is_inert():
    assert "<" not in to_line({"a": "</script><script>${alert(1)}"})
    assert json.loads(to_line("a\nb<\u2028")) == "a\nb<\u2028"


# ---- a trace folded ----


def test_folding_event_by_event_equals_folding_at_once():
    events = trace(ScriptedRunner(delay=0.001, prefill=0, steps=20))
    slow, fast = Answer(), Answer()
    lives = []
    for event in events:
        slow.add([event])
        lives.append(slow.live)
    fast.add(events)
    assert slow.text == fast.text == events[-1].text
    assert panel_line(slow, None) == panel_line(fast, None)
    assert all(later.startswith(earlier) for earlier, later in zip(lives, lives[1:], strict=False))
    told = [part for line in slow.live.splitlines() for part in json.loads(line)]
    assert "".join(told[1::2]) == events[-1].text
    assert told[0::2] == [1, *(len(e.token_ids) for e in events if isinstance(e, Step))]
    found = figures(slow, plain=None)
    assert found["steps"] == 20 and found["ratio"] is None
    assert found["per_step"] == pytest.approx(events[-1].stats.acceleration_rate, rel=1e-3)
    assert found["used"] == 12 + len(events[-1].token_ids)


def test_the_ratio_has_a_measured_baseline():
    runner = ScriptedRunner(delay=0.001, prefill=0, steps=20)
    plain, medusa = Answer(), Answer()
    plain.add(trace(runner, drafter="none"))
    medusa.add(trace(runner))
    assert medusa.plain_rate and plain.plain_rate is None
    assert {len(s.draft.tokens) for s in plain.steps} == {1}
    expected = medusa.rate * medusa.finished.stats.plain_step_seconds
    assert figures(medusa, medusa.plain_rate)["ratio"] == pytest.approx(expected, rel=1e-3)


def test_a_picture_asked_for_while_the_first_step_is_folded_is_that_of_no_step():
    """Steps are folded by another thread: one that came between two looks was step -1."""

    class Coming(list):
        def __len__(self):
            return 0

    answer = Answer()
    answer.add(trace(ScriptedRunner(delay=0, prefill=0, steps=2)))
    answer.steps = Coming(answer.steps)
    Coming.__bool__ = lambda steps: True  # by the second look it is there
    assert json.loads(panel_line(answer, None))["step"] is None


def test_a_continued_answer_tells_that_it_has_not_all_steps():
    events = trace(ScriptedRunner(delay=0, prefill=0))
    for before, goes_on in ([], False), ([("Said before. ", 3)], True):
        answer = Answer(before=before)
        answer.add(events)
        recalled = Answer(before=answer.pieces)
        recalled.recall(events)
        for one in (answer, recalled):
            assert json.loads(panel_line(one, None))["goes_on"] is goes_on


def test_every_step_of_a_long_answer_can_be_reached():
    answer = Answer()
    events = trace(ScriptedRunner(delay=0, prefill=0, steps=2400), max_new_tokens=20000)
    answer.add(events[:-1])
    live = json.loads(panel_line(answer, None))
    assert live["first"] == 2160 and len(live["bars"]) == len(live["times"]) == 240
    known = set()
    for index in range(0, 2400, 100):
        panel = json.loads(panel_line(answer, None, index))
        assert panel["pinned"] and panel["step"]["index"] == index
        for place, tokens in enumerate(panel["bars"], panel["first"]):
            assert tokens == len(answer.steps[place].token_ids)
        known |= set(range(panel["first"], panel["first"] + len(panel["bars"])))
        assert index in known
    assert known == set(range(2400))


def test_bars_of_a_long_answer_stay_small():
    answer = Answer()
    events = trace(ScriptedRunner(delay=0.0123, prefill=0, steps=1, nodes=64))
    answer.add(events[:-1])
    answer.add([replace(events[1], index=n, seconds=0.0123) for n in range(1, 3000)])
    assert len(panel_line(answer, 30.0).encode()) < 10_000
    assert len(panel_line(answer, 30.0, 1500).encode()) < 16_000  # on a click, not each step


def test_the_parts_of_a_step_add_up_to_it():
    answer = Answer()
    answer.add(trace(ScriptedRunner(delay=0.003, prefill=0, steps=20)))
    found = figures(answer, None)
    assert sum(found["split_ms"]) == pytest.approx(found["ms"], rel=0.03)
    old = Answer()
    old.add([replace(step, backbone_seconds=0.0) for step in answer.steps])
    assert figures(old, None)["split_ms"] is None


def test_the_last_second_is_the_last_second():
    answer = Answer()
    slow = [Step(n, (1,), "", 0.1, (0,)) for n in range(30)]
    fast = [Step(n, (1, 2, 3, 4), "", 0.1, (0,)) for n in range(30, 40)]
    answer.add([*slow, *fast])
    assert recent_rate(answer) == pytest.approx(40)
    assert answer.rate == pytest.approx(70 / 4)
    assert recent_rate(Answer()) is None


def test_few_nodes_are_not_advised_to_be_fewer_and_noise_is_no_loss():
    answer, near = Answer(), Answer()
    answer.add([Step(n, (7, 7), "", 0.03, (0,), nodes=4) for n in range(10)])
    assert "overhead" in verdict(answer, 100.0) and "fewer" not in verdict(answer, 100.0)
    near.add([Step(n, (7, 7), "", 0.0215, (0,), nodes=4) for n in range(10)])
    assert verdict(near, 100.0) == ""


@pytest.mark.parametrize(
    "tokens, seconds, said",
    [
        (3, 0.02, ""),
        (1, 0.012, "low acceptance, 1.00 tokens per step"),
        (2, 0.03, "the tree's overhead, a step costs 3.00 plain ones"),
        (1, 0.03, "low acceptance, 1.00 tokens per step, and the tree's overhead"),
    ],
)
def test_a_slower_medusa_says_why(tokens, seconds, said):
    answer = Answer()
    answer.add([Step(n, (7,) * tokens, "", seconds, (0,), nodes=64) for n in range(10)])
    sentence = verdict(answer, plain=100.0)
    assert said in sentence and bool(said) == bool(sentence)
    assert ("Fewer nodes" in sentence) == ("overhead" in said)
    assert figures(answer, 100.0)["slower"] == sentence
    assert verdict(answer, None) == ""


def test_speedup_is_rate_over_overhead():
    answer = Answer()
    answer.add([Step(n, (7, 8, 9), "", 0.02, (0,)) for n in range(10)])
    found = figures(answer, 75.0)
    assert found["per_step"] / found["overhead"] == pytest.approx(found["ratio"], rel=1e-3)
    stats = Stats.of(30, 11, 31, 0.22, 0.1)  # the last step gave the end token alone
    answer.add([Step(10, (), "", 0.02, (0,)), Finished("eos", tuple(range(30)), "", "", stats)])
    found = figures(answer, 75.0)
    assert found["per_step"] == pytest.approx(31 / 11, rel=1e-3)
    assert found["per_step"] / found["overhead"] == pytest.approx(found["ratio"], rel=1e-3)


def test_the_prefix_of_a_step_is_what_its_root_follows():
    answer = Answer()
    answer.add(trace(ScriptedRunner(delay=0.001, prefill=0, steps=30)))
    for index in (0, 7, 29):
        view = json.loads(panel_line(answer, None, index))["step"]
        assert view["prefix"] == len(text_before(answer, index))


def test_messages_are_shown_without_a_changed_character():
    text = "1. a\n   - b\n\tcode\n\n"
    (row,) = rows([{"role": "user", "content": text}], {}, {})
    assert chatbot_row(row, "user")["content"] == [{"type": "text", "text": text}]


# ---- the server ----


def test_the_page_never_imports_torch():
    code = (
        "import sys, medusa_chat.ui.app as a; from medusa_chat.runtime.session import Session;"
        "from support.scripted import ScriptedRunner; "
        "from medusa_chat.ui.access.share import Share;"
        "a.build_app(Session(ScriptedRunner()), ['chain'], Share(lambda: 0));"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=here.parent,
        env={"PYTHONPATH": f"{here.parent}:{here}", "PATH": ""},
        timeout=60,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_taken_port_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} is in use"):
            page.open_page(Session(ScriptedRunner()), page.PageOptions(port=port))


def test_a_taken_port_of_the_usual_range_is_passed_over():
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 7860))
            taken.listen()
            first = 7861
        except OSError:
            first = 7860  # somebody else has it, and may be gone in a moment
        opened = page.open_page(Session(ScriptedRunner()))
        assert first <= opened.blocks.server_port <= 7959
        assert httpx.get(opened.url).status_code == 200
        opened.close()


def test_an_idle_page_looks_seldom_for_something_queued(monkeypatch):
    """Gradio's own 1,000 looks a second take 5 % of a core from the model."""
    looks = []

    class Counted(Queue):
        def __len__(self) -> int:
            looks.append(time.monotonic())
            return super().__len__()

    monkeypatch.setattr("gradio.queueing.Queue", Counted)
    opened = page.open_page(Session(ScriptedRunner()))
    wait_for(lambda: len(looks) > 20)
    opened.close()
    pauses = sorted(after - before for before, after in zip(looks, looks[1:], strict=False))
    assert pauses[len(pauses) // 2] >= page.QUEUE_SECONDS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 by itself")
def test_a_port_that_somebody_took_a_moment_ago_is_passed_over(monkeypatch):
    monkeypatch.setattr("gradio.http_server.TRY_NUM_PORTS", 3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))  # Gradio looks for a free port on 127.0.0.1
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("gradio.http_server.INITIAL_PORT_VALUE", port)
        opened = page.open_page(Session(ScriptedRunner()), page.PageOptions(host="127.0.0.2"))
    assert opened.blocks.server_port > port
    assert httpx.get(opened.url).status_code == 200
    opened.close()


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("no.such.host.invalid", None, "is not an address of this machine"),
        ("192.0.2.1", None, "is not an address of this machine"),
        ("127.0.0.1", 70_000, "give 1 to 65535"),
    ],
)
def test_where_no_server_can_be_is_refused_at_once(host, port, says):
    with pytest.raises(UsageError, match=says):
        page.open_page(Session(ScriptedRunner()), page.PageOptions(host=host, port=port))


def test_what_strangers_can_reach_has_a_password_and_the_guard():
    opened = page.open_page(Session(ScriptedRunner()), page.PageOptions(host="0.0.0.0"))
    try:
        assert len(opened.auth[1]) >= 22
        url = f"http://127.0.0.1:{opened.blocks.server_port}/"
        config = f"{url}config"
        assert httpx.get(config).status_code == 401
        login = httpx.post(f"{url}login", data=login_form(opened.auth))
        assert login.status_code == 200
        assert httpx.get(config, cookies=login.cookies).status_code == 200
        assert httpx.get(url, headers={"host": "evil.com"}).status_code == 403
        assert httpx.get(url, headers={"host": "x.gradio.live"}).status_code == 403
        crossing = {"origin": "https://evil.com"}
        assert httpx.post(f"{url}login", headers=crossing).status_code == 403
        assert (
            httpx.post(f"{url}gradio_api/run/predict", content=b"x" * 5_000_000).status_code == 413
        )
    finally:
        opened.close()


def test_share_at_the_start_makes_a_link_or_says_why_not(monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def offline(port: int) -> None:
        raise ShareError("No internet: the link could not be made.")

    thread = SimpleNamespace(is_alive=lambda: True, join=interrupted)
    server = SimpleNamespace(thread=thread)
    blocks = SimpleNamespace(server=server, close=lambda verbose: None)
    for tunnel, line in (
        (offline, "not shared: No internet: the link could not be made."),
        (lambda port: Tunnel("https://a.gradio.live", lambda: None), "shared at https://a.gradio"),
    ):
        share = Share(lambda: 7, tunnel)
        opened = page.Page(blocks, "http://127.0.0.1:7860/", None, share, GuestServer())
        monkeypatch.setattr(page, "open_page", lambda session, options, opened=opened: opened)
        lines = []
        assert page.launch(Session(ScriptedRunner()), page.PageOptions(share=True), lines.append)
        assert len(lines) == 2 and lines[1].startswith(line)
        assert share.link is None  # closed with the page


def login_form(auth: tuple[str, str]) -> dict[str, str]:
    return {"username": auth[0], "password": auth[1]}


def test_launch_tells_where_and_ends_with_ctrl_c(monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    thread = SimpleNamespace(is_alive=lambda: True, join=interrupted)
    blocks = SimpleNamespace(server=SimpleNamespace(thread=thread), close=lambda verbose: None)
    share = Share(lambda: 7)
    opened = page.Page(blocks, "http://127.0.0.1:7860/", None, share, GuestServer())
    monkeypatch.setattr(page, "open_page", lambda session, options: opened)
    lines = []
    assert page.launch(Session(ScriptedRunner()), page.PageOptions(), lines.append) == 130
    assert lines == ["medusa-chat is open at http://127.0.0.1:7860/ (Ctrl-C ends it)"]


def test_greeting_says_what_the_user_must_know():
    auth = ("medusa", "secret")
    opened = page.Page(None, "http://127.0.0.1:7860/", auth, Share(lambda: 7), GuestServer())
    assert "user medusa, password secret" in page.greeting(opened, was_generated=True)
    assert "secret" not in " ".join(page.greeting(opened, was_generated=False))


def test_best_tree_has_the_nodes_asked_for():
    assert [len(best_tree(n)) for n in (2, 16, 64)] == [2, 16, 64]


def test_a_refusal_on_the_page_names_a_place_on_the_page():
    line = error_line("start a new chat, or raise --max-context where the model allows it")
    assert json.loads(line)["error"].endswith("or raise Models → Context where the model allows it")
