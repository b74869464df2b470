"""The pace of an answer in a real browser, on a clock that the tests turn themselves."""

import json
import math
from collections.abc import Iterator

import pytest
from support.page import (
    SET_PACE,
    Served,
    ask,
    keep_no_settings,
    open_settings,
    reload,
    script,
    scripted_page,
    send,
    wait_end,
    wait_true,
)
from support.scripted import ScriptedRunner

from medusa_chat.ui.page.tree_view import printable

STEPS = 12
# The show's clock stands until a test turns it.
CLOCK = script("stage", "stage.now = () => window.now").replace("stage.js", "show.js")
CLOCK = f"window.now = 0; ({CLOCK})()"
# The stream of the answer can be cut, as a view that comes late cuts it.
CUT = """() => {
  const fetched = window.fetch;
  window.fetch = (address, options) => {
    if (!String(address).endsWith('/live')) return fetched(address, options);
    const cutter = new AbortController();
    window.cut = () => cutter.abort();
    return fetched(address, {...options, signal: cutter.signal});
  };
}"""
# Whether the timeline was seen to play from its first step, however short that was.
WATCH_PLAY = """async () => {
  const { show } = await import('medusa/show.js');
  const bars = document.querySelector('svg.bars');
  const play = document.querySelector('.play');
  new MutationObserver(() => {
    const isFirst = bars.getAttribute('aria-valuenow') === '1';
    const isOver = !show.isOn() && bars.getAttribute('aria-valuemax') === '12';
    if (isFirst && isOver && play.dataset.playing === 'true') window.replayed = true;
  }).observe(bars, {attributes: true});
}"""
GPU = {
    **{"mode": "gpu", "size": "7B", "gpu": "RTX 4090", "precision": "fp16"},
    **{"nodes": 16, "clock": "slow"},
}
USUAL = GPU | {"mode": None, "nodes": 64}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scripted_page(ScriptedRunner(0.002, 0.01, steps=STEPS, nodes=16)) as page:
        yield page


@pytest.fixture
def tab(open_tab) -> Iterator:
    """A tab at full speed, and so again after the test."""
    opened = open_tab()
    yield opened
    if opened.evaluate(script("pace", "Boolean(pace.mode)")):
        set_pace(opened, USUAL)
        opened.evaluate("localStorage.removeItem('medusa-chat-pace')")
        opened.evaluate(CLOCK.replace("window.now)()", "performance.now())()"))


def set_pace(tab, pace: dict) -> None:
    with tab.expect_response(is_pace):
        tab.evaluate(SET_PACE, pace)


def at_pace(tab, **changes) -> None:
    tab.evaluate(CLOCK)
    set_pace(tab, GPU | changes)


def come_back_at_pace(tab, **changes) -> None:
    """As a visitor of before: the pace is in the browser's storage, and told on load."""
    tab.add_init_script(f"addEventListener('DOMContentLoaded', () => {{ {CLOCK} }})")
    tab.evaluate(
        "pace => localStorage.setItem('medusa-chat-pace', pace)", json.dumps(GPU | changes)
    )
    with tab.expect_response(is_pace):
        reload(tab)


def is_pace(answer) -> bool:
    return "gradio_api" in answer.url and '"paced"' in (answer.request.post_data or "")


def turn_clock(tab, ms: float) -> None:
    tab.evaluate(script("show", "(window.now += ms, show.look())", "ms"), ms)


def shown(tab) -> int:
    """Of how many steps the answer is shown. A view that came late begins anew: it has none yet."""
    number = script("show", "show.shown() !== '' && String(show.shown())")
    return int(wait_true(tab, number))


def wait_shown(tab, steps: int) -> None:
    wait_true(tab, script("show", f"show.shown() === {steps}"))


def wait_received(tab) -> None:
    """Until the answer is decoded, and the browser has all of it: only its clock holds it back."""
    wait_true(tab, script("show", "show.received()"))


def said(tab) -> str:
    return " ".join(tab.inner_text("#live-text").split())


def text_of(runner, steps: int) -> str:
    text = runner.pieces[0] + "".join(step.text for step in runner.last[:steps])
    return " ".join(text.replace("`", "").replace("**", "").split())


def answer_of(tab) -> str:
    """The answer; a note that it was stopped stands after it."""
    return " ".join(tab.locator("#history .bot .message-content").first.inner_text().split())


TILES = "ms/step", "tokens/step", "tokens/s", "times plain"


def drawn(tab) -> int:
    return int(tab.get_attribute("svg.tree", "data-step"))


def begin(tab, runner) -> None:
    send(tab, "hello")
    wait_received(tab)


def modelled_ms(tab) -> float:
    return float(tab.locator(".gpu-table .now td").first.text_content())


def test_text_and_tree_go_on_by_one_step_of_the_gpus_clock(tab, runner):
    at_pace(tab, clock="own")
    begin(tab, runner)
    ms = modelled_ms(tab)
    assert shown(tab) == 0
    for steps in (1, 2, 5):
        turn_clock(tab, ms * (steps - shown(tab)) + 0.5)
        wait_shown(tab, steps)
        tab.wait_for_selector(f'svg.tree[data-step="{steps - 1}"]')
        tab.wait_for_function(
            "text => document.querySelector('#live-text').innerText.split(/\\s+/).join(' ')"
            ".trim() === text",
            arg=text_of(runner, steps),
        )
        assert tab.get_attribute("svg.bars", "aria-valuemax") == str(steps)
    turn_clock(tab, ms * STEPS * 2)
    wait_end(tab)
    assert drawn(tab) == STEPS - 1


def test_slow_motion_shows_at_most_six_steps_a_second(tab, runner):
    at_pace(tab)
    begin(tab, runner)
    for _ in range(20):  # a second, in parts as a browser's clock turns
        assert shown(tab) <= 6
        turn_clock(tab, 50)
    assert 4 <= shown(tab) <= 6
    assert "times slower" in tab.inner_text(".modelled")
    tab.click(".skip")
    wait_end(tab)


def test_every_modelled_figure_says_what_it_is(tab, runner):
    at_pace(tab)
    words = "modelled: the times of a 7B on this GPU; the tokens a step are this model's"
    tab.wait_for_selector(".tree-block.is-empty")
    assert tab.locator(".figures .tile").first.is_hidden() and tab.locator(".gpu-table").is_hidden()
    begin(tab, runner)
    tab.click(".skip")
    wait_end(tab)
    assert words in tab.inner_text(".modelled")
    assert "modelled" in tab.text_content(".gpu-table caption")
    assert " ms" not in tab.inner_text(".step-head")  # measured here, it contradicts the tiles
    tiles = {name: tab.inner_text(f"[data-figure='{name}'] .value") for name in TILES}
    ms, tokens, rate, gain = tab.locator(".gpu-table .now td").all_text_contents()
    rate_shown = f"{float(tiles['tokens/s']):.1f}"
    assert tiles == dict(zip(TILES, (ms, tokens, rate_shown, gain), strict=True))
    assert round(float(tiles["tokens/s"])) == float(rate)
    assert tab.inner_text("[data-figure='tokens/s'] .under") == "modelled: RTX 4090"
    here = tab.text_content(".tree-block .measured")
    assert here.startswith("Measured on this machine: ") and "× plain decoding's" in here
    tab.select_option(".mode", "full")
    assert tab.inner_text("[data-figure='ms/step'] .value") == "2.0"
    assert tab.locator(".is-modelled").count() == 0


def row(tab, nodes: int) -> list[float]:
    cells = tab.locator(f'.gpu-table [data-nodes="{nodes}"] td').all_text_contents()
    return [float(cell.rstrip("×")) for cell in cells]


def test_gpu_precision_and_nodes_show_at_once_what_they_do(tab, runner):
    runner.nodes, runner.steps = 64, 40
    at_pace(tab, nodes=64)
    begin(tab, runner)
    tab.click(".skip")
    wait_end(tab)
    asked = len(runner.settings)
    ms, tokens, rate, gain = row(tab, 64)
    steps = runner.last
    assert tokens == pytest.approx(sum(len(s.path) for s in steps) / len(steps), abs=0.01)
    few = [1 + sum(node < 16 for node in step.path[1:]) for step in steps]
    assert row(tab, 16)[1] == pytest.approx(sum(few) / len(few), abs=0.01)
    assert rate == pytest.approx(tokens / ms * 1000, abs=1) and row(tab, 1)[3] == 1
    tab.click("[data-view='what if']")
    tab.get_by_label("GPU", exact=True).select_option("H100")
    assert row(tab, 64)[0] < ms and row(tab, 1)[2] > 100
    fp16 = row(tab, 64)[3]
    tab.get_by_label("Precision").select_option("4 bit")
    assert row(tab, 64)[3] < 0.7 * fp16  # decoding 4 bits for 64 rows takes longer than for one
    assert tab.locator('.gpu-table [data-nodes="64"] .slower').count() == (row(tab, 64)[3] < 1)
    tab.get_by_label("Nodes in every step").select_option("16")
    assert tab.locator(".gpu-table .now").get_attribute("data-nodes") == "16"
    assert len(runner.settings) == asked  # the model was not run
    tab.click("[data-view=tree]")


def test_the_show_asks_for_its_nodes_and_tells_without_alarm_that_they_do_not_pay_here(tab, runner):
    runner.plain_share = 0.05
    at_pace(tab, nodes=16)
    begin(tab, runner)
    tab.click(".skip")
    wait_end(tab)
    assert runner.settings[-1].nodes == 16
    here = tab.locator(".tree-block .measured")
    here.get_by_text("so many nodes do not pay here").wait_for(state="attached")
    assert tab.locator(".tree-block .plain.slower").count() == 0
    tab.select_option(".mode", "full")
    tab.locator(".tree-block .plain.slower").get_by_text("Slower than plain decoding").wait_for()


def test_step_by_step_goes_on_by_space(tab, runner):
    at_pace(tab, mode="step")
    begin(tab, runner)
    wait_shown(tab, 1)
    tab.evaluate("document.activeElement.blur()")
    for steps in (2, 3, 4):
        tab.keyboard.press(" ")
        wait_shown(tab, steps)
    turn_clock(tab, 1e6)
    tab.wait_for_selector('svg.tree[data-step="3"]')
    assert shown(tab) == 4  # no clock moves it
    used = 12 + 1 + sum(len(step.token_ids) for step in runner.last[:4])
    assert tab.inner_text("[data-figure='context'] .value") == str(used)
    for _ in range(STEPS - 4):
        tab.keyboard.press(" ")
    wait_end(tab)


def test_own_clock_is_stretched(tab, runner):
    at_pace(tab, mode="tenth")
    begin(tab, runner)
    turn_clock(tab, 10 * 2 * 3 + 1)  # steps of 2 ms
    wait_shown(tab, 3)
    tab.wait_for_selector('svg.tree[data-step="2"]')  # drawn, and the bars with it
    tab.locator("svg.bars").press(" ")
    tab.wait_for_selector('.play[data-playing="false"]')
    turn_clock(tab, 1000)
    assert shown(tab) == 3
    tab.click(".skip")
    wait_end(tab)


def test_stop_cuts_the_answer_at_the_shown_step(served, tab, runner):
    at_pace(tab, clock="own")
    begin(tab, runner)
    turn_clock(tab, modelled_ms(tab) * 5 + 0.5)
    wait_shown(tab, 5)
    tab.click("#stop")
    wait_end(tab)
    tab.wait_for_selector("#history .bot")
    assert answer_of(tab) == text_of(runner, 5)
    tab.wait_for_function(
        "document.querySelector('svg.bars').getAttribute('aria-valuemax') === '5'"
    )
    reload(tab)
    tab.wait_for_selector("#history .bot")
    assert answer_of(tab) == text_of(runner, 5)


def test_a_stream_that_begins_anew_keeps_the_clock(tab, runner):
    at_pace(tab, clock="own")
    tab.evaluate(CUT)
    begin(tab, runner)
    tab.evaluate("cut()")
    wait_true(tab, script("show", "!show.isOn()"))
    turn_clock(tab, modelled_ms(tab) * 5 + 0.5)
    wait_shown(tab, 5)


def test_a_reload_goes_on_at_the_shown_step(open_tab, runner):
    tab = open_tab()
    come_back_at_pace(tab, clock="own")
    begin(tab, runner)
    turn_clock(tab, modelled_ms(tab) * 4 + 0.5)
    wait_shown(tab, 4)
    reload(tab)
    wait_true(tab, script("show", "show.isOn()"))
    wait_shown(tab, 4)
    tab.wait_for_selector('svg.tree[data-step="3"]')
    tab.click(".skip")
    wait_end(tab)


def test_other_models_start_at_full_speed(open_tab, runner):
    tab = open_tab(is_new=True)
    assert tab.locator(".mode").input_value() == "full"
    assert tab.locator(".gpu-table").is_hidden()
    ask(tab, "hello")
    assert runner.settings[-1].nodes is None


def test_a_message_waits_for_the_shown_end_or_skips_to_it(tab, runner):
    at_pace(tab, clock="own")
    begin(tab, runner)
    tab.fill("#box textarea", "and then?")
    tab.click("#send")
    tab.wait_for_selector(".next-line")
    assert tab.locator("#history .user-row").count() == 1
    tab.click("#next .skip")
    tab.wait_for_function("document.querySelectorAll('#history .user-row').length === 2")
    wait_true(tab, script("show", "show.isOn()"))
    tab.click("#tree .skip")
    wait_end(tab)
    assert tab.locator("#history .bot").count() == 2


def test_a_machine_slower_than_the_gpu_says_so_and_replays(tab, runner):
    runner.delay = 0.05
    at_pace(tab, clock="own")
    tab.evaluate(WATCH_PLAY)
    send(tab, "hello")
    wait_end(tab)  # the clock stands: it was shown as it came
    assert "slower than that GPU" in tab.inner_text(".modelled")
    tab.wait_for_function("window.replayed")
    tab.wait_for_selector('.play[data-playing="false"]')
    assert drawn(tab) == STEPS - 1


# ---- the settings and the room of the picture ----


def letters(tab) -> str:
    chips = tab.locator("svg.tree .chip")
    return chips.evaluate_all("all => all.map(chip => chip.dataset.state[0]).join('')")


def test_a_slider_recolours_the_tree_beside_it_without_the_model(tab, runner):
    runner.forced = {"acceptance": "typical", "temperature": 0.7}
    open_settings(tab)
    tab.get_by_label("typical: lossy; takes what is plausible, always the same text").check()
    tab.wait_for_selector("#epsilon input[type=range]:not([disabled])")
    ask(tab, "hello")
    tab.wait_for_selector(f'svg.tree[data-step="{STEPS - 1}"]')
    asked, step = len(runner.settings), runner.last[-1]
    was = letters(tab)
    tab.locator("#epsilon input[type=range]").fill("0.99")
    tab.wait_for_selector(".as-if")
    draft, taken = step.draft, {0}
    for node in range(1, len(draft.parents)):  # a chain of one: nothing else is that probable
        parent = draft.parents[node]
        limit = min(0.99, 0.99**0.5 * math.exp(-draft.entropies[parent]))
        if parent in taken and draft.probabilities[node] > limit:
            taken.add(node)
    assert "".join("a" if node in taken else "-" for node in range(len(was))) == "".join(
        letter if letter == "a" else "-" for letter in letters(tab)
    )
    box = tab.locator("#epsilon").bounding_box()
    tree = tab.locator("svg.tree").bounding_box()
    assert 0 < box["y"] < 900 and 0 < tree["y"] < 900  # both are in sight
    assert box["x"] + box["width"] <= tree["x"]
    tab.locator("#epsilon input[type=range]").fill("0.09")
    tab.wait_for_selector(".as-if", state="detached")
    assert letters(tab) == was and len(runner.settings) == asked
    tab.click("#reset")
    tab.wait_for_selector("#acceptance input[value=exact]:checked")
    keep_no_settings(tab)


def chip_height(tab) -> float:
    return tab.locator("svg.tree .frame").first.bounding_box()["height"]


def test_a_small_tree_is_drawn_larger(tab, runner):
    for nodes, least in ((64, 12), (4, 18)):
        runner.nodes = nodes
        ask(tab, "hello")
        tab.wait_for_function(
            "n => document.querySelectorAll('svg.tree .chip').length === n", arg=nodes
        )
        assert chip_height(tab) >= least
    assert tab.locator("#tree").evaluate("node => node.scrollWidth <= node.clientWidth")


def test_no_token_is_cut_on_a_phone(tab, runner):
    tab.set_viewport_size({"width": 390, "height": 844})
    ask(tab, "hello")
    tab.wait_for_selector(f'svg.tree[data-step="{STEPS - 1}"]', state="attached")
    shown = tab.locator("svg.tree .token").all_text_contents()
    draft = runner.last[-1].draft
    texts = {printable(text) for text in (*draft.texts, draft.next_text)}
    assert shown and all(text in texts for text in shown)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_answer_whose_steps_are_shown_is_marked_with_a_way_back(tab, runner):
    for count in (1, 2):
        ask(tab, "hello")
        tab.wait_for_function(
            "n => document.querySelectorAll('#history .bot').length === n", arg=count
        )
    rows = "[...document.querySelectorAll('#history .message-row')]"
    marked = f"{rows}.map(row => +row.classList.contains('is-shown')).join('')"
    tab.wait_for_function(f"{marked} === '0001'")
    tab.wait_for_selector(".newest", state="hidden")
    tab.locator("#history .bot .message-content").first.click()
    tab.wait_for_function(f"{marked} === '0100'")
    tab.click(".newest")
    tab.wait_for_function(f"{marked} === '0001'")
    tab.wait_for_selector(".newest", state="hidden")
