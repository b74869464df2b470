"""The Compare tab in a real browser, on a scripted model: the race, its clock, its figures."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support import scripted
from support.page import (
    SET_PACE,
    Served,
    drawn_frames,
    opened_on,
    page_of,
    reload,
    script,
    scripted_page,
    wait_true,
)
from support.races import Racer

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.session import Session
from medusa_chat.ui.compare.tab import KEY

OVER = "document.querySelectorAll('.lane.is-over').length === 2"
TEXTS = "[...document.querySelectorAll('.lane-text')].map(e => e.textContent)"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scripted_page(Racer(delay=0.004, prefill=0.02, steps=5000)) as page:
        yield page


@pytest.fixture(scope="module")
def page(served, browser) -> Iterator:
    with opened_on(browser, served, "Compare", "#compare-run") as opened:
        yield opened


@pytest.fixture(scope="module")
def races() -> dict[str, str]:
    """The number of the race that `raced` has run."""
    return {}


@pytest.fixture
def tab(page):
    """The page as a user finds it: few tokens asked for, 1280 wide, with motion."""
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(reduced_motion="no-preference")
    page.fill("#compare-prompt textarea", "a prompt")
    ask_for(page, 40)
    return page


def ask_for(page, tokens: int) -> None:
    if not page.get_by_label("Max new tokens").last.is_visible():
        open_settings(page, "256")
    page.get_by_label("Max new tokens").last.fill(str(tokens))
    page.get_by_label("Max new tokens").last.blur()


def open_settings(page, tokens: str) -> None:
    """Until the fields have their first values, which come after they are drawn."""
    page.click("#compare-settings button")
    page.get_by_label("Max new tokens").last.wait_for()
    page.wait_for_function(
        "tokens => [...document.querySelectorAll('input[type=number]')].some("
        "e => e.ariaLabel === 'Max new tokens' && e.checkVisibility() && e.value === tokens)",
        arg=tokens,
    )


def run_both(page) -> None:
    """One click, until both have come to their end in the replay."""
    last = page.get_attribute(".compare-block", "data-race")
    page.click("#compare-run")
    page.wait_for_function(
        "last => ![undefined, last].includes("
        "document.querySelector('.compare-block')?.dataset.race)",
        arg=last or "",
    )
    page.wait_for_function(OVER)
    page.wait_for_selector("#compare-run", state="visible")


@pytest.fixture
def raced(tab, races):
    """The tab with the end of a race: that of the test before, where it is shown yet."""
    number = tab.get_attribute(".compare-block", "data-race")
    if number is None or number != races.get("number"):
        run_both(tab)
        races["number"] = tab.get_attribute(".compare-block", "data-race")
    seek(tab, 1)
    return tab


def seek(page, share: float) -> None:
    page.evaluate(
        """share => { const at = document.querySelector('.scrub');
        at.value = share * at.max; at.dispatchEvent(new Event('input')); }""",
        share,
    )


def listen(page, selector: str) -> None:
    """window.said: every text this element has from now on."""
    page.evaluate(
        """selector => { window.said = []; window.listener?.disconnect();
        const at = document.querySelector(selector);
        window.listener = new MutationObserver(() => window.said.push(at.textContent));
        window.listener.observe(at, {childList: true, characterData: true, subtree: true}); }""",
        selector,
    )


def figure(page, row: str) -> list[str]:
    line = page.locator(".compare-table tbody tr", has=page.get_by_text(row, exact=True))
    return line.locator("td").all_inner_texts()


def race_clock(page):
    return page.locator("#compare").get_by_label("Clock of the race")


def figures(page, kind: str, row: str) -> list[str]:
    """Both cells of a row: kind is "measured" or "modelled"."""
    line = page.locator(f".compare-table .{kind} tr", has=page.get_by_text(row, exact=True))
    return line.locator("td").all_inner_texts()


@pytest.fixture
def gpu_tab(tab) -> Iterator:
    """The tab with the race on a GPU's clock, which no later test meets."""
    race_clock(tab).select_option("gpu")
    yield tab
    tab.evaluate("localStorage.removeItem('medusa-chat-pace')")
    tab.evaluate(SET_PACE, {"mode": None, "gpu": "RTX 4090", "precision": "fp16", "clock": "slow"})
    race_clock(tab).select_option("here")


def test_one_click_shows_what_runs_then_both_texts_whole_and_identical(served, tab, monkeypatch):
    monkeypatch.setattr(served.runner, "delay", 0.03)
    listen(tab, ".compare-status")
    run_both(tab)
    told = "\n".join(tab.evaluate("window.said"))
    assert re.search(r"running (plain|with the drafter) \(1 of 2\) … \d+ tokens", told)
    assert re.search(r"running (plain|with the drafter) \(2 of 2\)", told)
    plain, drafted = tab.evaluate(TEXTS)
    assert (
        plain
        == drafted
        == "".join(served.runner.pieces[i % len(served.runner.pieces)] for i in range(40))
    )
    assert tab.locator(".lane h3").all_inner_texts() == ["Plain", "Medusa"]
    assert tab.inner_text(".badge") == "✓ identical: all 40 tokens"
    assert "our plain decoding, fp32, cpu, same weights" in tab.inner_text(".compare-facts")
    flags = tab.locator(".flag").all_inner_texts()
    times = figure(tab, "total time")
    assert flags == ["finished", f"⚑ finished first: {times[1]} against {times[0]}"]


def test_the_table_adds_up_to_the_speedup(raced):
    tab = raced
    speedup, rate, overhead = (
        float(text.rstrip("×")) for text in tab.locator(".term b").all_inner_texts()
    )
    assert speedup == pytest.approx(rate / overhead, rel=0.02)
    plain, drafted = map(float, figure(tab, "tokens/s"))
    assert speedup == pytest.approx(drafted / plain, rel=0.02)
    assert figure(tab, "tokens") == ["40", "40"] and figure(tab, "steps")[0] == "39"
    assert figure(tab, "time to first token") == ["20 ms", "20 ms"]
    times, told = figure(tab, "total time"), tab.inner_text(".compare-verdict")
    assert f"{times[1]} against {times[0]}" in told
    ratio = float(times[0].split()[0]) / float(times[1].split()[0])
    headline = re.search(r"Medusa is ([\d.]+)× as fast", told)
    assert float(headline[1]) == pytest.approx(ratio, rel=0.02)


def test_the_clock_shows_each_text_as_far_as_it_had_come(raced):
    tab = raced
    whole = tab.evaluate(TEXTS)
    seek(tab, 0.4)
    plain, drafted = tab.evaluate(TEXTS)
    assert 0 < len(plain) < len(drafted) <= len(whole[1])
    assert whole[0].startswith(plain) and whole[1].startswith(drafted)
    assert re.fullmatch(r"0\.0\d s of 0\.1\d s", tab.inner_text(".clock"))
    seek(tab, 0)
    assert tab.evaluate(TEXTS) == ["", ""]
    seek(tab, 1)
    assert tab.evaluate(TEXTS) == whole


def test_the_result_survives_a_look_at_the_chat(raced):
    tab = raced
    verdict = tab.inner_text(".compare-verdict")
    tab.get_by_role("tab", name="Chat").click()
    tab.wait_for_selector("#box", state="visible")
    tab.get_by_role("tab", name="Compare").click()
    tab.wait_for_selector(".compare-verdict", state="visible")
    assert tab.inner_text(".compare-verdict") == verdict and all(tab.evaluate(TEXTS))


def test_the_result_its_prompt_and_its_settings_survive_a_reload(served, open_tab):
    tab = open_tab(is_new=True)
    tab.get_by_role("tab", name="Compare").click()
    open_settings(tab, "256")
    tab.get_by_label("Max new tokens").last.fill("33")
    tab.get_by_label("Seed").last.fill("5")
    tab.get_by_label("Seed").last.blur()
    tab.wait_for_function(f"/33.*5/.test(localStorage.getItem('{KEY}'))")
    tab.fill("#compare-prompt textarea", "a prompt of my own")
    tab.press("#compare-prompt textarea", "Enter")
    tab.wait_for_selector(".compare-verdict", state="visible")
    verdict = tab.inner_text(".compare-verdict")
    tab.evaluate("localStorage.setItem('medusa-chat-settings', '')")  # the chat's are its own
    reload(tab)
    tab.get_by_role("tab", name="Compare").click()
    tab.wait_for_selector(".compare-verdict", state="visible")
    assert tab.inner_text(".compare-verdict") == verdict and all(tab.evaluate(TEXTS))
    tab.wait_for_function(
        "() => document.querySelector('#compare-prompt textarea').value === 'a prompt of my own'"
    )
    assert tab.get_attribute(".compare-block", "data-race") == "0", "the next race is number 1"
    open_settings(tab, "33")
    boxes = [tab.get_by_label(name).last for name in ("Max new tokens", "Seed", "Temperature")]
    assert [box.input_value() for box in boxes] == ["33", "5", "0"]
    tab.evaluate(f"localStorage.removeItem('{KEY}')")


def test_every_control_works_with_the_keyboard(tab, served, monkeypatch):
    monkeypatch.setattr(served.runner, "delay", 0.05)  # two seconds to replay
    run_both(tab)
    tab.focus(".scrub")
    tab.keyboard.press("Home")
    assert tab.evaluate(TEXTS) == ["", ""]
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    assert all(tab.evaluate(TEXTS))
    assert "of" in tab.get_attribute(".scrub", "aria-valuetext")
    tab.focus(".speed[data-speed='0.25']")
    tab.keyboard.press("Enter")
    assert tab.get_attribute(".speed[data-speed='0.25']", "aria-pressed") == "true"
    tab.focus(".replay .play")
    at = tab.inner_text(".clock")
    tab.keyboard.press("Space")
    assert tab.inner_text(".replay .play") == "Pause"
    tab.wait_for_function(
        "at => ![undefined, at].includes(document.querySelector('.clock')?.textContent)", arg=at
    )
    tab.keyboard.press("Space")
    still = tab.inner_text(".clock")
    drawn_frames(tab, 10)
    assert tab.inner_text(".clock") == still and tab.inner_text(".replay .play") == "Play"
    tab.focus(".replay .again")
    tab.keyboard.press("Enter")
    assert tab.inner_text(".replay .play") == "Pause"
    tab.focus(".scrub")
    tab.keyboard.press("End")
    tab.wait_for_function(OVER)
    tab.click(".speed[data-speed='1']")


def test_a_difference_is_named_and_marked_in_both_texts(served, tab, monkeypatch):
    monkeypatch.setattr(served.runner, "differ_at", 7)
    run_both(tab)
    tab.wait_for_function("document.querySelector('.badge')?.textContent.includes('Gap')")
    badge = tab.inner_text(".badge")
    assert "first difference at token 8" in badge and "in log probability" in badge
    pieces = served.runner.pieces
    assert tab.locator(".lane-text mark").all_text_contents() == [pieces[7], pieces[8]]
    assert tab.locator(".badge code").all_text_contents() == [
        pieces[7].replace(" ", "·"),
        pieces[8].replace(" ", "·"),
    ]
    tab.get_by_role("button", name="show it in both texts").click()
    assert tab.locator(".lane-text mark").first.is_visible()


def test_a_replay_only_appends(served, tab, monkeypatch):
    monkeypatch.setattr(served.runner, "delay", 0.002)  # a second to replay
    ask_for(tab, 600)
    run_both(tab)
    assert tab.locator(".lane").first.locator(".lane-chunk").count() > 1
    tab.evaluate(
        """() => { window.removed = 0;
        new MutationObserver(all => all.forEach(m => window.removed += m.removedNodes.length))
          .observe(document.querySelector('.lane-text'), {childList: true, subtree: true}); }"""
    )
    seek(tab, 0.5)  # going back is what empties a lane, once
    drawn_frames(tab, 2)
    before = tab.evaluate("window.removed")
    tab.click(".replay .play")
    tab.wait_for_function(OVER)
    assert tab.evaluate("window.removed") == before > 0


def test_slower_is_said_plainly(tab, monkeypatch):
    monkeypatch.setattr(scripted, "ACCURACY", (0,) * 10)  # no guess is ever right
    run_both(tab)
    assert "slower than plain decoding here: 0.8" in tab.inner_text(".compare-verdict.slower")
    assert "finished first" in tab.locator(".flag").first.inner_text()


def test_a_screen_reader_hears_what_runs_and_the_verdict_only(tab, served, monkeypatch):
    monkeypatch.setattr(served.runner, "delay", 0.05)  # four looks of the page
    listen(tab, ".compare-spoken")
    run_both(tab)
    said = tab.evaluate("window.said")
    assert 2 <= len(said) <= 7 and len(set(said)) == len(said)
    assert "as fast as plain decoding" in said[-1] and "identical" in said[-1]
    assert tab.get_attribute(".compare-spoken", "role") == "status"
    assert tab.locator(".lane-text[aria-live]").count() == 0


def test_without_motion_the_end_is_shown_and_can_be_scrubbed(tab):
    tab.emulate_media(reduced_motion="reduce")
    run_both(tab)
    assert tab.locator(".replay .play").is_hidden() and tab.locator("#compare .speeds").is_hidden()
    whole = tab.evaluate(TEXTS)
    tab.focus(".scrub")
    tab.keyboard.press("Home")
    assert tab.evaluate(TEXTS) == ["", ""]
    tab.keyboard.press("End")
    assert tab.evaluate(TEXTS) == whole


def test_stop_and_errors_are_lines_and_the_last_result_stays(served, tab, monkeypatch):
    run_both(tab)
    verdict = tab.inner_text(".compare-verdict")
    tab.fill("#compare-prompt textarea", "   ")
    tab.click("#compare-run")
    tab.wait_for_function(
        "document.querySelector('.compare-error')?.textContent.includes('message is empty')"
    )
    assert tab.inner_text(".compare-verdict") == verdict
    tab.fill("#compare-prompt textarea", "a prompt")
    monkeypatch.setattr(served.runner, "delay", 0.2)
    tab.click("#compare-run")
    tab.wait_for_function(
        "document.querySelector('.compare-status')?.textContent.includes('running')"
    )
    tab.click("#compare-stop")
    tab.wait_for_function(
        "document.querySelector('.compare-error')?.textContent.includes('stopped')"
    )
    tab.wait_for_selector("#compare-run", state="visible")
    assert tab.inner_text(".compare-verdict") == verdict
    monkeypatch.setattr(served.runner, "delay", 0.004)
    monkeypatch.setattr(served.runner, "fail_at", 2)
    tab.click("#compare-run")
    tab.wait_for_function(
        "document.querySelector('.compare-error')?.textContent.includes('the script says')"
    )
    monkeypatch.setattr(served.runner, "fail_at", None)
    tab.wait_for_selector("#compare-run", state="visible")
    run_both(tab)
    assert tab.text_content(".compare-error") == ""


def test_a_comparison_goes_on_over_a_link_that_was_cut(served, tab, monkeypatch):
    monkeypatch.setattr(served.runner, "hold_at", 2)
    last = tab.get_attribute(".compare-block", "data-race") or ""
    tab.click("#compare-run")
    tab.wait_for_function(
        "document.querySelector('.compare-status')?.textContent.includes('warming up')"
    )
    served.cut()
    monkeypatch.setattr(served.runner, "hold_at", None)
    tab.wait_for_function(
        "last => ![undefined, last].includes("
        "document.querySelector('.compare-block').dataset.race)",
        arg=last,
    )
    tab.wait_for_selector("#compare-run", state="visible")
    assert tab.text_content(".compare-error") == ""


def test_behind_another_answer_it_says_its_place(served, tab, monkeypatch):
    monkeypatch.setattr(served.runner, "delay", 0.1)
    other = served.session.submit(Reply("x", GenerationSettings(max_new_tokens=500, seed=1)))
    tab.click("#compare-run")
    tab.wait_for_function(
        "document.querySelector('.compare-status')?.textContent === 'waiting: 1 ahead'"
    )
    served.session.cancel(other)
    monkeypatch.setattr(served.runner, "delay", 0.004)
    tab.wait_for_selector(".compare-block.has-result")
    tab.wait_for_selector("#compare-run", state="visible")


def test_what_a_model_writes_never_runs(served, tab, monkeypatch):
    hostile = ("<img src=q onerror=window.hit=1>", "${window.hit=1}", "{{window.hit=1}}")
    monkeypatch.setattr(served.runner, "pieces", (*hostile, "<script>window.hit=1</script>"))
    monkeypatch.setattr(served.runner, "differ_at", 2)
    run_both(tab)
    assert hostile[0] in tab.evaluate(TEXTS)[0] and tab.evaluate("window.hit") is None


MODELLED = "modelled: the times of a 7B on this GPU; the tokens a step are this model's"


def chosen(page, label: str, value: str) -> None:
    page.locator("#compare").get_by_label(label, exact=True).select_option(value)


def test_a_gpus_clock_retimes_the_race_beside_what_was_measured(gpu_tab):
    tab = gpu_tab
    chosen(tab, "Clock", "own")
    run_both(tab)
    here = [figures(tab, "measured", row) for row in ("tokens/s", "total time", "ms per step")]
    plain, drafted = map(float, figures(tab, "modelled", "ms per step"))
    steps, per_step = figure(tab, "steps"), figure(tab, "tokens per step")
    rates = list(map(float, figures(tab, "modelled", "tokens/s")))
    assert rates[1] == pytest.approx(float(per_step[1]) / drafted * 1000, rel=0.01)
    speedup, _, overhead = (
        float(text.rstrip("×")) for text in tab.locator(".term b").all_inner_texts()
    )
    assert speedup == pytest.approx(rates[1] / rates[0], rel=0.02)
    assert overhead == pytest.approx(drafted / plain, abs=0.01)
    whole = [plain + int(n) * one for n, one in zip(steps, (plain, drafted), strict=True)]
    told = re.search(r"([\d.]+)× as fast", tab.inner_text(".compare-verdict"))
    assert float(told[1]) == pytest.approx(whole[0] / whole[1], rel=0.01)
    seconds = (plain + int(steps[0]) * plain) / 1000  # the prompt counts as one plain step
    assert tab.inner_text(".clock") == f"{seconds:.2f} s of {seconds:.2f} s"
    assert MODELLED in tab.inner_text(".race-words")
    assert all("modelled" in text for text in tab.locator(".lane-count").all_inner_texts())
    assert "Measured on this machine" in tab.inner_text(".measured-words")
    chosen(tab, "GPU", "H100")
    assert float(figures(tab, "modelled", "ms per step")[0]) < plain
    fp16 = tab.locator(".term b").first.inner_text()
    chosen(tab, "Precision", "4 bit")
    assert tab.locator(".term b").first.inner_text() != fp16
    again = [figures(tab, "measured", row) for row in ("tokens/s", "total time", "ms per step")]
    assert again == here
    race_clock(tab).select_option("here")
    assert tab.locator(".compare-table .modelled").count() == 0
    assert "modelled" not in tab.inner_text(".compare-block")
    assert figures(tab, "measured", "total time") == here[1]


def test_slow_motion_shows_at_most_six_plain_steps_a_second(gpu_tab):
    ask_for(gpu_tab, 4)
    begun = time.monotonic()
    run_both(gpu_tab)
    assert time.monotonic() - begun > 4 / 6  # the prompt and three steps
    assert "times slower" in gpu_tab.inner_text(".race-words")


def test_another_clock_keeps_the_place_of_the_race(gpu_tab):
    run_both_quickly(gpu_tab)
    seek(gpu_tab, 0.5)
    race_clock(gpu_tab).select_option("here")
    half, whole = map(float, re.findall(r"[\d.]+(?= s)", gpu_tab.inner_text(".clock")))
    assert half == pytest.approx(whole / 2, abs=0.02) and all(gpu_tab.evaluate(TEXTS))


def set_pace(page, change: dict) -> None:
    """Set the Chat tab's pace, until the server knows it of both tabs."""
    told = []

    def is_second(reply) -> bool:
        told.extend([reply] if '"paced"' in (reply.request.post_data or "") else [])
        return len(told) == 2

    with page.expect_response(is_second):
        page.evaluate(SET_PACE, change)


def run_both_quickly(page) -> None:
    chosen(page, "Clock", "own")
    run_both(page)


def test_the_clock_follows_the_chats_pace_and_the_server_is_told(served, gpu_tab):
    tab = gpu_tab
    race_clock(tab).select_option("here")
    set_pace(tab, {"mode": "gpu", "nodes": 16, "clock": "own"})
    assert race_clock(tab).input_value() == "gpu"
    run_both(tab)
    drafted = [s for s in served.runner.settings if s.drafter != "none"]
    assert drafted[-1].nodes == 16
    set_pace(tab, {"nodes": 32})
    assert "Run both again to race with 32 nodes" in tab.inner_text(".race-words")
    set_pace(tab, {"mode": "full", "nodes": 64})
    assert race_clock(tab).input_value() == "here"
    run_both(tab)
    drafted = [s for s in served.runner.settings if s.drafter != "none"]
    assert drafted[-1].nodes is None


class Demo(Racer):
    """A script that is named as the demo is."""

    @property
    def model(self):
        return replace(super().model, name="demo")


def test_the_demo_races_as_a_gpu_would(served, browser):
    session = Session(Demo(delay=0.004, prefill=0.02, steps=5000))
    session.submit(LoadRequest())
    with (
        page_of(session) as page,
        opened_on(browser, page, "Compare", ".race-clock") as tab,
    ):
        wait_true(tab, script("page", "page.model?.isDemo"))
        assert race_clock(tab).input_value() == "gpu"
        assert "this demo's" in tab.inner_text(".race-words")
        chosen(tab, "Clock", "own")
        run_both(tab)
        drafted = [s for s in session.runner.settings if s.drafter != "none"]
        assert drafted[-1].nodes == 24  # the show's 64, of a tree of 24


@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_clocks_words_and_choices_fit_a_phone(gpu_tab, is_gpu):
    race_clock(gpu_tab).select_option("gpu" if is_gpu else "here")
    gpu_tab.set_viewport_size({"width": 390, "height": 844})
    assert gpu_tab.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [choice.bounding_box() for choice in gpu_tab.locator(".race-clock .choice").all()]
    shown = [box for box in boxes if box]
    assert len(shown) == (6 if is_gpu else 1)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in shown)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_off_at_the_side(raced, width):
    tab = raced
    tab.set_viewport_size({"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [tab.locator(".lane").nth(i).bounding_box() for i in (0, 1)]
    is_stacked = boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"] - 1
    assert is_stacked == (width == 390)
    assert all(box["width"] > 300 and box["x"] + box["width"] <= width for box in boxes)


def test_the_prompt_has_a_name_for_a_screen_reader(tab):
    assert tab.get_by_role("textbox", name="Prompt for both").input_value()
