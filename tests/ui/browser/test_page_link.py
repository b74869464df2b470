"""The page over a link that loses, delays and reorders what goes over it."""

import pytest
from support.page import DESK, SLOW, ask, new_chat, send, wait_attached, wait_end
from support.waiting import wait_for


def fates(tab, event: str, *hows: str) -> list[str]:
    """What becomes of the next posts of an event, "stop.click" as an example, in this order; those
    after them arrive. Returns what is left of them. lost: nothing arrives. unanswered: the answer
    is lost. refused: a gateway says that the server cannot be reached."""
    left = list(hows)
    number = tab.evaluate(
        """event => {
          const [name, kind] = event.split('.');
          const { components, dependencies } = gradio_config;
          const id = components.find((one) => one.props.elem_id === name).id;
          return dependencies.find((one) =>
            one.targets.some(([of, by]) => of === id && by === kind)).id;
        }""",
        event,
    )

    def meet(route):
        if not left or f'"fn_index":{number},' not in (route.request.post_data or ""):
            return route.continue_()
        how = left.pop(0)
        if how == "unanswered":
            route.fetch()
        if how == "refused":
            return route.fulfill(status=502, content_type="text/html", body="<h1>Bad Gateway</h1>")
        return route.abort()

    tab.route("**/run/predict*", meet)
    return left


def rows(tab, count: int) -> None:
    tab.wait_for_function(
        "n => document.querySelectorAll('#history .message-row').length === n", arg=count
    )


@pytest.fixture
def watched(quick, open_tab):
    """A tab that says whether it was loaded again."""
    tab = open_tab()
    tab.evaluate("window.isSame = true")
    yield tab
    assert tab.evaluate("window.isSame"), "the page was loaded again"
    tab.unroute_all()


@pytest.mark.parametrize(
    "part", ["assets/index-*.js", "assets/Blocks-*.css", "scripts/*/block.js", "scripts/*/tree.js"]
)
def test_a_page_of_which_a_part_was_lost_is_loaded_again(quick, browser, served, part):
    tab, lost = browser.new_page(viewport=DESK), []

    def meet(route):
        lost.append(route)
        return route.abort() if len(lost) == 1 else route.continue_()

    tab.set_default_timeout(SLOW)
    tab.route(f"**/{part}", meet)
    tab.goto(served.url)
    wait_attached(tab)
    ask(tab, "hello")
    tab.context.close()
    assert len(lost) >= 2 and len(quick.prompts) == 1


def type_and_enter(tab, text: str) -> None:
    tab.fill("#box textarea", text)
    tab.press("#box textarea", "Enter")


@pytest.mark.parametrize("how", ["lost", "unanswered", "refused"])
def test_a_message_is_sent_once_whatever_is_lost_of_it(quick, watched, how):
    tab = watched
    left = fates(tab, "box.submit", how, how)
    type_and_enter(tab, "hello")
    tab.press("#box textarea", "Enter")  # while the first one is under way
    rows(tab, 2)
    wait_end(tab)
    tab.wait_for_function("!document.querySelector('#box textarea').value")
    assert not left and [turns[-1]["content"] for turns in quick.prompts] == ["hello"]


def test_what_is_done_in_a_row_is_done_in_turn(quick, watched):
    """New chat, slow, and a message before it was answered: the message is the new chat's."""
    tab = watched
    type_and_enter(tab, "the first")
    rows(tab, 2)
    wait_end(tab)
    left = fates(tab, "clear.click", "lost")
    tab.click("#clear")
    type_and_enter(tab, "the second")
    tab.locator("#history .as-typed").get_by_text("the second").wait_for()
    rows(tab, 2)
    assert not left and [len(turns) for turns in quick.prompts] == [1, 1]


def test_stop_is_not_lost(runner, monkeypatch, watched):
    monkeypatch.setattr(runner, "steps", 5000)
    tab = watched
    send(tab, "hello")
    left = fates(tab, "stop.click", "refused")
    tab.click("#stop")
    wait_end(tab)
    assert not left


def test_stop_waits_for_no_count_of_tokens(runner, monkeypatch, watched):
    monkeypatch.setattr(runner, "steps", 5000)
    tab, held = watched, []
    send(tab, "hello")
    number = tab.evaluate(
        """() => gradio_config.dependencies.find((one) =>
          one.targets.some(([, by]) => by === 'count')).id"""
    )

    def meet(route):
        is_count = f'"fn_index":{number},' in (route.request.post_data or "")
        held.append(route) if is_count else route.continue_()

    tab.route("**/run/predict*", meet)
    tab.locator("#box textarea").press_sequentially("and then")
    wait_for(lambda: tab.evaluate("1") and held)  # it is asked, and never answered
    tab.click("#stop")
    wait_end(tab)


def test_a_stream_that_has_died_is_begun_anew(quick, watched, monkeypatch):
    """A connection may end without a word: no byte comes, and no failure."""
    tab, held = watched, []

    def meet(route):
        if held:
            route.continue_()
        held.append(route)

    monkeypatch.setattr(quick, "hold_at", 2)
    tab.route("**/live", meet)
    with tab.expect_request("**/live"):
        type_and_enter(tab, "hello")
    monkeypatch.setattr(quick, "hold_at", None)
    rows(tab, 2)
    wait_end(tab)


def test_a_server_that_is_out_of_reach_for_a_while_is_told_in_a_line(quick, watched):
    tab = watched
    tab.route("**/gradio_api/**", lambda route: route.abort())
    type_and_enter(tab, "hello")
    tab.wait_for_selector("#lost >> text=No connection to medusa-chat")
    tab.locator("#box textarea").press_sequentially(" and more")
    tab.unroute("**/gradio_api/**")
    rows(tab, 2)
    wait_end(tab)
    tab.wait_for_function("document.querySelector('#box textarea').value === ' and more'")
    tab.wait_for_selector("#lost", state="hidden")
    assert [turns[-1]["content"] for turns in quick.prompts] == ["hello"]


def test_a_message_that_arrived_is_no_draft_when_the_page_is_loaded_again(quick, open_tab):
    """However late the page hears what was said."""
    tab, late, is_late = open_tab(is_new=True), [], False

    def meet(route):
        nonlocal is_late
        if is_late:
            return late.append(route)
        is_late = '"hello"' in (route.request.post_data or "")
        return route.fetch() if is_late else route.continue_()  # it arrives, and no answer does

    tab.route("**/run/predict*", meet)
    type_and_enter(tab, "hello")
    tab.locator("#box textarea").press_sequentially(" more")
    wait_for(lambda: tab.evaluate("1") and quick.prompts and len(quick.last) == quick.steps)
    late.clear()
    tab.reload()
    tab.wait_for_function("document.querySelector('#box textarea')?.value === 'hello more'")
    tab.wait_for_timeout(1500)  # the box has held it for longer than the page watches it
    is_late = False
    for route in late:
        route.continue_()
    rows(tab, 2)
    tab.wait_for_function("document.querySelector('#box textarea')?.value === ' more'")
    tab.wait_for_function("!sessionStorage.getItem('medusa-draft')")
    assert tab.input_value("#box textarea") == " more" and len(quick.prompts) == 1


def test_what_is_written_outlives_a_tab_that_the_phone_ends(quick, open_tab):
    tab = open_tab(is_new=True)
    hide = """isHidden => {
      Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    tab.wait_for_selector("html.is-settled")
    tab.fill("#box textarea", "half a sentence")
    tab.evaluate(hide, True)
    assert tab.evaluate("sessionStorage.getItem('medusa-draft')") == "half a sentence"
    tab.evaluate(hide, False)
    assert not tab.evaluate("sessionStorage.getItem('medusa-draft')"), "the box has it"


def test_the_way_back_may_take_long(quick, watched):
    """What was gone back from came to stand before it in the browser's history."""
    tab = watched
    for text in ("one", "two", "three"):
        new_chat(tab)
        ask(tab, text)
    tab.route("**/run/predict*", lambda route: route.abort())
    tab.evaluate("history.back()")
    tab.evaluate("new Promise((done) => setTimeout(done, 3500))")
    tab.unroute("**/run/predict*")
    tab.wait_for_function("document.title.startsWith('two ·')")
    tab.go_back()
    tab.wait_for_function("document.title.startsWith('one ·')")


def test_a_message_that_was_refused_can_be_sent_again(quick, watched):
    """No view tells of what a guard before Gradio refuses."""
    tab, refused = watched, []

    def meet(route):
        if '"hello"' not in (route.request.post_data or "") or refused:
            return route.continue_()
        refused.append(route)
        return route.fulfill(status=413, body="it is too large")

    tab.route("**/run/predict*", meet)
    with tab.expect_response(lambda found: found.status == 413):
        type_and_enter(tab, "hello")
    tab.wait_for_selector("#notices button:has-text('it is too large')")
    tab.press("#box textarea", "Enter")
    rows(tab, 2)
    wait_end(tab)
    assert refused and len(quick.prompts) == 1
