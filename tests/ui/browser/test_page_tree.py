"""The panel in a real browser: tree, card, mask, timeline, figures, on a scripted model."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support import scripted
from support.page import (
    Served,
    drawn_frames,
    drawn_path,
    scripted_page,
    send,
    wait_end,
)
from support.scripted import ScriptedRunner, scripted_step

from medusa_chat.decoding.events import Step
from medusa_chat.ui.page.tree_view import margin, printable, states

NAMES = {"a": "accepted", "r": "rejected", "u": "unreached"}
ODD = (
    *("Once", " the", " 😀", "日本", " שלום", " مرحبا", "<0x0A>", "<0xE2>", "\n", "    "),
    *("\u0301", " café", " internationalisationally", "", "👩‍👩‍👧👩‍👩‍👧👩‍👩‍👧👩‍👩‍👧👩‍👩‍👧", "."),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scripted_page(ScriptedRunner(0.01, 0.05, steps=30, nodes=16)) as page:
        yield page


@pytest.fixture
def tab(open_tab):
    return open_tab()


def ask(tab, runner: ScriptedRunner) -> list[Step]:
    """Send, wait for the end and for the last picture; the steps of the answer."""
    send(tab, "hello")
    wait_end(tab)
    see(tab, runner.last[-1].index)
    return list(runner.last)


def see(tab, index: int) -> None:
    tab.wait_for_selector(f'svg.tree[data-step="{index}"]', state="attached")


def pick(tab, index: int) -> None:
    tab.locator(f'.bars [data-step="{index}"]').click()
    see(tab, index)


def now(tab) -> int:
    return int(tab.get_attribute("svg.bars", "aria-valuenow")) - 1


def chips(tab) -> list[dict]:
    return tab.locator("svg.tree .chip").evaluate_all(
        """all => all.map(chip => ({
          node: Number(chip.dataset.node), state: chip.dataset.state,
          text: chip.querySelector('.token').textContent,
          mark: chip.querySelector('.mark').textContent,
          stroke: getComputedStyle(chip.querySelector('.frame')).strokeDasharray,
        }))"""
    )


def busiest(steps: list[Step]) -> Step:
    return max(steps[2:-2], key=lambda step: len(step.path))


# ---- the tree ----


def test_states_and_marks_are_the_traces_under_exact(tab, runner):
    step = busiest(ask(tab, runner))
    pick(tab, step.index)
    drawn = chips(tab)
    letters = states(step.draft.parents, step.path)
    assert [chip["state"] for chip in drawn] == [NAMES[letter] for letter in letters]
    for node, chip in enumerate(drawn):
        shown = printable(step.draft.texts[node])
        assert chip["text"] == shown or shown.startswith(chip["text"].rstrip("…"))
        sign = {"a": "✓", "r": "✗", "u": f"#{(step.draft.ranks[node] or 0) + 1}"}[letters[node]]
        assert chip["mark"].startswith(sign)
        assert (chip["stroke"] != "none") == (letters[node] == "r")  # not by colour alone
    label = tab.get_attribute("svg.tree", "aria-label")
    assert f"{len(step.path) - 1} of 15 draft tokens accepted" in label
    for node in step.path:
        assert printable(step.draft.texts[node]) in label
    assert "own sample" in tab.inner_text(".legend")
    following = printable(step.draft.next_text)
    assert tab.inner_html(".follower .token") == following
    assert label.endswith(f"then \u2068{following}\u2069")


# Whether the end of the path is in the box of the tree.
PATH_IN_SIGHT = """() => {
  const path = [...document.querySelectorAll('svg.tree [data-state=accepted] .frame')];
  const chip = path.at(-1).getBoundingClientRect();
  const { top, bottom } = document.querySelector('.tree-box').getBoundingClientRect();
  return chip.top >= top && chip.bottom <= bottom;
}"""


def test_a_path_below_the_window_is_scrolled_to_until_a_hand_scrolls(tab, runner):
    runner.nodes = 64
    tab.set_viewport_size({"width": 1280, "height": 560})
    steps = [step for step in ask(tab, runner) if len(step.path) > 1]
    tab.click(".fold")  # all of it: it is higher than its box
    order = sorted(steps, key=lambda step: max(step.path[1:2]))  # the later, the lower
    for step in (order[-1], order[0], order[-1]):
        pick(tab, step.index)
        tab.wait_for_function(PATH_IN_SIGHT)
    tab.locator(".tree-box").hover()
    tab.mouse.wheel(0, -3000)
    tab.wait_for_function("() => document.querySelector('.tree-box').scrollTop === 0")
    drawn_frames(tab, 3)
    assert not tab.evaluate(PATH_IN_SIGHT), "the hand is not pulled back"
    tab.close()  # it would stay unfolded


def test_a_step_that_was_cut_counts_what_it_gave_and_rejects_nothing_behind_it(
    tab, runner, monkeypatch
):
    def cut(*values):
        step = scripted_step(*values)
        if len(step.path) != 2:
            return step
        draft = replace(step.draft, next_text="")
        return replace(step, token_ids=step.token_ids[:1], draft=draft)

    monkeypatch.setattr(scripted, "scripted_step", cut)
    steps = [step for step in ask(tab, runner) if len(step.path) == 2]
    behind = {}
    for step in steps:
        behind[step.index] = [n for n, p in enumerate(step.draft.parents) if p == step.path[-1]]
    index = max(behind, key=lambda index: len(behind[index]))
    pick(tab, index)
    assert "1 of 15 accepted" in tab.inner_text(".step-head")
    assert "from the model" not in tab.inner_text(".step-head")
    assert tab.locator(".follower").is_hidden()
    drawn = chips(tab)
    assert behind[index] and {drawn[node]["state"] for node in behind[index]} == {"unreached"}


def test_typical_marks_are_margins_and_the_header_says_what_binds(tab, runner):
    runner.forced = {"acceptance": "typical", "temperature": 0.7}
    steps = ask(tab, runner)
    for epsilon_binds in (True, False):
        step = next(s for s in steps if (s.draft.thresholds[0] >= 0.09) is epsilon_binds)
        pick(tab, step.index)
        said = tab.inner_text(".step-head")
        assert ("ε binds" in said) is epsilon_binds and ("δ binds" in said) is not epsilon_binds
        for chip in chips(tab)[1:]:
            parent = step.draft.parents[chip["node"]]
            if chip["state"] != "unreached":
                found = margin(
                    step.draft.probabilities[chip["node"]], step.draft.thresholds[parent]
                )
                assert chip["mark"][1:].replace("−", "-") == f"{found:+.1f}"
    assert "over the threshold" in tab.inner_text(".legend")


def test_a_tooltip_says_at_once_what_is_known(tab, runner):
    step = busiest(ask(tab, runner))
    pick(tab, step.index)
    node = step.path[1]
    asked = len(runner.peeks)
    tab.locator(f'.chip[data-node="{node}"]').hover()
    tab.wait_for_selector(".tip:not([hidden])")
    said = tab.inner_text(".tip")
    assert printable(step.draft.texts[node]) in said and "accepted" in said
    assert f"rank #{step.draft.ranks[node] + 1}" in said and "the model:" in said
    assert len(runner.peeks) == asked
    tab.mouse.move(5, 5)
    tab.wait_for_selector(".tip", state="hidden")


@pytest.mark.parametrize("nodes", [64, 16])
def test_every_token_is_legible_as_what_it_is(tab, runner, nodes):
    runner.pieces, runner.nodes = ODD, nodes
    step = ask(tab, runner)[-1]
    drawn = chips(tab)
    assert len(drawn) == nodes
    whole = {"".join(parts) for parts in ("👩‍👩‍👧", "日", "本")}
    for chip in drawn:
        shown = printable(step.draft.texts[chip["node"]])
        kept = chip["text"].removesuffix("…")
        assert shown.startswith(kept) and "\n" not in chip["text"]
        if "👩" in kept:
            assert len(kept) % len("👩‍👩‍👧") == 0 and whole
    inside = tab.locator("svg.tree .chip").evaluate_all(
        """all => all.every(chip => {
          const box = n => chip.querySelector(n).getBoundingClientRect();
          const [frame, text, mark] = [box('.frame'), box('.token'), box('.mark')];
          return text.left >= frame.left - 1 && text.right <= mark.left + 2
            && mark.right <= frame.right + 1;
        })"""
    )
    assert inside  # right-to-left tokens neither leave their chip nor push its mark


def test_plain_decoding_is_a_plain_statement(tab, runner):
    runner.forced = {"drafter": "none"}
    ask(tab, runner)
    assert "There is no draft and no tree" in tab.inner_text(".single")
    assert tab.locator("svg.tree .chip").count() == 1
    assert tab.locator(".legend").is_hidden()


# ---- the card ----


def test_a_click_opens_a_card_with_both_top_tens_of_the_runner(tab, runner):
    step = busiest(ask(tab, runner))
    pick(tab, step.index)
    letters = states(step.draft.parents, step.path)
    node = letters.index("r")
    tab.locator(f'.chip[data-node="{node}"]').click()
    tab.wait_for_selector(".card .tops table")
    request = runner.peeks[-1]
    assert request.tokens == (step.draft.tokens[node],)
    expected = runner.peek(request)
    tables = tab.locator(".card .tops table")
    for place, ranked in enumerate((expected.backbone, expected.head)):
        ids = tables.nth(place).locator("tr").evaluate_all("all => all.map(r => +r.dataset.id)")
        assert ids[:10] == [r.id for r in ranked]
    said = tab.inner_text(".card")
    for words in ("not the model's own sample", "rank in head", "entropy at its parent"):
        assert words in said
    assert f"token {step.draft.tokens[node]}, node {node}" in said
    assert str(float(f"{step.draft.probabilities[node]:.3g}")) in said
    tab.click(".card .close")
    assert tab.locator(".card").is_hidden()


def test_a_card_has_the_text_of_the_models_own_token_that_was_not_drafted(tab, runner):
    step, node, own = next(
        (step, node, step.draft.sampled[parent])
        for step in ask(tab, runner)[:-1]
        for node, parent in enumerate(step.draft.parents)
        if parent == step.path[-1] and step.draft.sampled[parent] not in step.draft.tokens
    )
    pick(tab, step.index + 1)  # whose root it is; a model has it in its top 10, too
    pick(tab, step.index)
    tab.locator(f'.chip[data-node="{node}"]').click()
    tab.wait_for_selector(".card .tops table")
    assert f"{printable(runner.pieces[own])}\u2069 token {own}" in tab.inner_text(".card")


def test_the_keyboard_walks_the_tree_and_opens_the_card(tab, runner):
    step = busiest(ask(tab, runner))
    pick(tab, step.index)
    tab.locator('.chip[data-node="0"]').focus()
    tab.keyboard.press("Home")
    here = "Number(document.activeElement.dataset.node)"
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(here) == step.path[1]
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(here) == 0
    tab.keyboard.press("End")
    assert tab.evaluate(here) == step.path[-1]
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(here) == step.path[1]
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".card .tops table")
    assert tab.get_attribute(".card", "data-node") == str(step.path[1])
    tab.keyboard.press("Escape")
    assert tab.locator(".card").is_hidden() and tab.evaluate(here) == step.path[1]
    tab.wait_for_selector(f'.chip[data-node="{step.path[1]}"][aria-label*="accepted"]')


def test_a_card_opened_while_the_answer_runs_comes_after_it(tab, runner):
    runner.delay, runner.steps, runner.forced = 0.5, 300, {"max_new_tokens": 9000}
    send(tab, "hello")
    tab.wait_for_selector("svg.tree .chip.rejected")
    before = len(runner.peeks)
    tab.locator("svg.tree .chip.rejected").first.dispatch_event("click")
    tab.wait_for_selector(".card .asking")
    index = int(tab.get_attribute(".card", "data-step"))
    decoded = len(runner.last)
    while len(runner.last) < decoded + 2:
        drawn_frames(tab)
    assert len(runner.peeks) == before  # the decode loop is not disturbed
    tab.click("#stop")
    wait_end(tab)
    tab.wait_for_selector(".card .tops table")
    assert int(tab.get_attribute("svg.tree", "data-step")) == index  # the step stays with its card
    tab.click(".card .close")  # it may stand over the timeline
    tab.click(".timeline .back")
    see(tab, runner.last[-1].index)


# ---- the mask ----


def test_the_mask_is_the_ancestor_relation(tab, runner):
    step = busiest(ask(tab, runner))
    pick(tab, step.index)
    tab.click(".views button:has-text('mask')")
    tab.wait_for_selector(f'svg.mask[data-step="{step.index}"]')
    rows = tab.locator("svg.mask .row").evaluate_all(
        """all => all.map(row => ({
          query: Number(row.dataset.q), place: row.querySelector('.place').textContent,
          keys: [...row.querySelectorAll('[data-k]')].map(cell => Number(cell.dataset.k)),
          prefix: row.querySelectorAll('.cell.prefix').length}))"""
    )
    parents = step.draft.parents
    paths = [[0]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    before = 12 + sum(len(s.token_ids) for s in runner.last[: step.index])  # the prompt has 12
    assert len(rows) == len(parents)
    for row in rows:
        assert row["keys"] == paths[row["query"]] and row["prefix"] == 1
        assert row["place"] == str(before + len(row["keys"]) - 1)
    tab.click(".views button:has-text('tree')")
    tab.wait_for_selector(f'svg.tree[data-step="{step.index}"]')


# ---- the timeline ----


def test_click_drag_and_keys_choose_the_step(tab, runner):
    steps = ask(tab, runner)
    pick(tab, 4)
    assert drawn_path(tab) == list(steps[4].path)
    first, last = (tab.locator(f'.bars [data-step="{n}"]').bounding_box() for n in (4, 20))
    tab.mouse.move(first["x"] + 3, first["y"] + first["height"] - 2)
    tab.mouse.down()
    tab.mouse.move(last["x"] + 3, last["y"] + last["height"] - 2, steps=6)
    tab.mouse.up()
    see(tab, 20)
    assert now(tab) == 20 and drawn_path(tab) == list(steps[20].path)
    for key, index in (("ArrowRight", 21), ("ArrowLeft", 20), ("Home", 0), ("End", 29)):
        tab.locator("svg.bars").press(key)
        see(tab, index)
        assert now(tab) == index
    assert "tokens" in tab.get_attribute("svg.bars", "aria-valuetext")
    tab.click(".timeline .back")
    tab.wait_for_selector(".timeline .back", state="hidden")


WORD = """text => {
  const content = [...document.querySelectorAll('#history .bot .message-content')].at(text[0]);
  const walker = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
  let left = text[1];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (let k = 0; k < node.data.length; k++) {
      if (!/\\S/.test(node.data[k]) || left--) continue;
      const range = new Range();
      range.setStart(node, k);
      range.setEnd(node, k + 1);
      const box = range.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    }
  }
}"""


def letter_of(tab, steps: list[Step], index: int, row: int) -> list[float]:
    """Where the first letter of a step's text is drawn in an answer."""
    said = tab.evaluate(
        "n => [...document.querySelectorAll('#history .bot .message-content')].at(n).textContent",
        row,
    )
    bare = "".join(said.split())
    after = sum(len("".join(step.text.split())) for step in steps[index:])
    return tab.evaluate(WORD, [row, len(bare) - after])


def test_a_word_shows_its_step_and_a_click_goes_there(tab, runner, monkeypatch):
    monkeypatch.setattr(runner, "pieces", tuple(f" word{n}" for n in range(60)))  # no Markdown
    older, steps = ask(tab, runner), ask(tab, runner)
    tab.wait_for_function("() => document.querySelectorAll('#history .bot').length === 2")
    for _ in range(100):  # a page that still settles moves the word from under the pointer
        tab.mouse.move(*letter_of(tab, steps, 12, -1))
        drawn_frames(tab, 5)
        if tab.is_visible('.bars .pointed[data-step="12"]'):
            break
    assert "step 13 of" in tab.locator(".tree-block .tip").inner_text()
    tab.mouse.down()
    tab.mouse.up()
    see(tab, 12)
    tab.mouse.wheel(0, -3000)
    tab.wait_for_function("() => document.querySelector('#conversation').scrollTop === 0")
    tab.mouse.click(*letter_of(tab, older, 6, 0))
    tab.wait_for_selector(".newest")
    see(tab, 6)
    assert now(tab) == 6


def test_play_walks_to_the_end_in_the_time_it_took(tab, runner):
    steps = ask(tab, runner)
    tab.select_option(".mode", "tenth")
    tab.locator("svg.bars").press("Home")
    see(tab, 0)
    tab.evaluate("window.begun = performance.now()")
    tab.locator("svg.bars").press(" ")
    assert tab.get_attribute(".play", "data-playing") == "true"
    tab.wait_for_function(
        "Number(document.querySelector('svg.bars')?.ariaValueNow || "
        "document.querySelector('svg.bars')?.getAttribute('aria-valuenow')) > 5"
    )
    took = tab.evaluate("performance.now() - window.begun")
    assert took >= sum(step.seconds for step in steps[1:5]) * 10_000 * 0.8
    tab.locator("svg.bars").press(" ")
    assert tab.get_attribute(".play", "data-playing") == "false"
    tab.select_option(".mode", "full")
    tab.click(".play")
    see(tab, 29)
    tab.wait_for_selector('.play[data-playing="false"]')
    tab.evaluate("localStorage.removeItem('medusa-chat-pace')")  # so that the tab is kept


def test_a_step_can_be_looked_at_while_newer_ones_arrive(tab, runner):
    runner.delay, runner.steps, runner.forced = 0.5, 300, {"max_new_tokens": 9000}
    send(tab, "hello")
    tab.wait_for_function("document.querySelectorAll('.bars .bar').length > 4")
    tab.locator('.bars [data-step="2"]').click()
    see(tab, 2)
    count = "Number(document.querySelector('svg.bars')?.getAttribute('aria-valuemax'))"
    before = tab.evaluate(count)
    tab.wait_for_function(f"{count} > {before} + 2")
    assert tab.get_attribute("svg.tree", "data-step") == "2" and now(tab) == 2
    tab.click(".timeline .back")
    tab.wait_for_function("Number(document.querySelector('svg.tree')?.dataset.step) > 2")
    tab.click("#stop")
    wait_end(tab)


def test_the_first_of_a_thousand_steps_can_be_reached(tab, runner):
    runner.steps, runner.delay, runner.forced = 1300, 0.0, {"max_new_tokens": 9000}
    steps = ask(tab, runner)
    tab.locator("svg.bars").press("Home")
    see(tab, 0)
    assert drawn_path(tab) == list(steps[0].path)
    tab.wait_for_selector('.bars .now[data-step="0"]')
    known = tab.locator(".bars .bar:not(.unknown):not([display])").count()
    assert known > 50  # the bars around it came with it
    assert tab.locator(".bars .bar").count() < 300  # and only those in sight are drawn


# ---- the figures ----


def test_the_chart_has_plain_once_it_was_measured(tab, runner):
    runner.forced = {"drafter": "none"}
    ask(tab, runner)
    tab.click("[data-view=times]")
    assert not tab.get_attribute(".rates .plain-line", "d")
    runner.forced = {}
    ask(tab, runner)
    assert tab.get_attribute(".rates .plain-line", "d")
    assert re.fullmatch(r"plain \d+", tab.text_content(".rates .plain-name"))
    tab.wait_for_function(
        "/mean [\\d.]+; plain decoding [\\d.]+/"
        ".test(document.querySelector('svg.rates')?.getAttribute('aria-label'))"
    )
    tab.click("[data-view=tree]")


def test_the_charts_axis_is_that_of_the_whole_answer_once_it_has_ended(tab, runner):
    axis = "Number(document.querySelector('.rates .axis').textContent.replace(',', ''))"
    runner.delay, runner.hold_at = 0.001, 3
    send(tab, "hello")
    tab.click("[data-view=times]")
    tab.wait_for_function(f"{axis} > 1000")
    runner.delay, runner.hold_at = 0.05, None
    wait_end(tab)
    tab.wait_for_function(f"{axis} < 500")
    tab.click("[data-view=tree]")


def test_the_figures_add_up(tab, runner):
    steps = ask(tab, runner)

    def value(label: str) -> float:
        text = tab.inner_text(f"[data-figure='{label}'] .value")
        return float(re.sub(r"[^\d.]", "", text))

    parts = [float(text) for text in tab.locator("[data-part]").all_inner_texts()]
    assert sum(parts) == pytest.approx(value("ms/step"), rel=0.03)
    assert value("tokens/step") == pytest.approx(
        sum(len(step.token_ids) for step in steps) / len(steps), abs=0.006
    )
    used = 12 + 1 + sum(len(step.token_ids) for step in steps)
    assert value("context") == used
    said = tab.inner_text("[data-figure='context'] .under")
    assert f"{2048 - used:,} left" in said
    assert value("first token") >= 50 and value("prompt read") == 50
    assert "12 tokens" in tab.inner_text("[data-figure='prompt read']")


def test_a_nearly_full_context_is_said(tab, runner):
    runner.steps, runner.delay, runner.forced = 640, 0.0, {"max_new_tokens": 9000}
    ask(tab, runner)
    assert "nearly full" in tab.inner_text("[data-figure='context']")


# ---- the tree on a narrow screen: last, since its tab cannot be used again ----


def test_a_narrow_screen_folds_to_what_was_tested(tab, runner):
    tab.set_viewport_size({"width": 390, "height": 844})
    step = ask(tab, runner)[-1]
    tab.evaluate("dispatchEvent(new Event('medusa-microscope'))")  # as a strip does
    tab.wait_for_selector("svg.tree .chip")
    letters = states(step.draft.parents, step.path)
    shown = {chip["node"] for chip in chips(tab)}
    assert shown == {node for node, letter in enumerate(letters) if letter != "u"}
    assert f"show {letters.count('u')} not reached" in tab.inner_text(".fold")
    tab.click(".fold")
    tab.wait_for_function("document.querySelectorAll('svg.tree .chip').length === 16")
    width = tab.evaluate("document.documentElement.scrollWidth")
    assert width <= 390  # the tree scrolls, not the page
    tab.close()  # it would stay unfolded
