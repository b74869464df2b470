"""Numbers out of range: the field says why, Send says why, and nothing breaks."""

WRONG = (
    ("Nodes", "99999", "nodes is 99999"),
    ("Nodes", "0", "nodes is 0"),
    ("Top-k", "-3", "top_k is -3"),
    ("Max new tokens", "-5", "max_new_tokens is -5"),
    ("Max new tokens", "0", "max_new_tokens is 0"),
    ("Max new tokens", "1.5", "max_new_tokens is 1.5"),
    ("Seed", "-1", "seed is -1"),
)
SAID = "said => document.querySelector('#settings').innerText.includes(said)"
SAID_TWICE = "said => document.querySelector('#chat').innerText.split(said).length > 2"
NOT_SAID = "said => !document.querySelector('#settings').innerText.includes(said)"
TEMPERATURE = """value => [...document.querySelectorAll('#settings input[type=number]')]
  .find(box => box.ariaLabel?.includes('Temperature'))?.value === value"""


def put(field, value: str) -> None:
    field.fill("")
    field.press_sequentially(value)
    field.blur()


def test_a_number_out_of_range_is_refused_in_words(served, open_tab):
    tab, answers = open_tab(), []
    tab.on("response", lambda response: answers.append(response.status))
    tab.click("#settings button")
    for label, value, said in WRONG:
        field = tab.locator("#settings").get_by_label(label).first
        field.wait_for()
        before = field.input_value()
        put(field, value)
        tab.wait_for_function(SAID, arg=said)
        tab.fill("#box textarea", "hello")
        tab.click("#send")
        tab.wait_for_function(SAID_TWICE, arg=said)
        assert tab.input_value("#box textarea") == "hello"
        put(field, before)
        tab.wait_for_function(NOT_SAID, arg=said)
    assert not [status for status in answers if status >= 500]
    assert served.runner.prompts == []


def test_an_emptied_slider_keeps_its_value_until_another_is_typed(open_tab):
    tab, answers = open_tab(), []
    tab.on("response", lambda response: answers.append(response.status))
    tab.click("#settings button")
    field = tab.locator("#settings input[type=number][aria-label*=Temperature]").first
    field.fill("0.5")
    field.blur()
    for typed, kept in (("", "0.5"), ("0.25", "0.25")):
        put(field, typed)
        tab.wait_for_function(TEMPERATURE, arg=kept)
    tab.fill("#box textarea", "hello")
    tab.click("#send")
    tab.wait_for_selector("#chat .bot-row, #chat .bot")
    assert not [status for status in answers if status >= 400]
