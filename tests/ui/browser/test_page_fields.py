"""Numbers out of range: the field says why, Send says why, and nothing breaks."""

import pytest

WRONG = [
    ("Nodes", "99999", "nodes is 99999"),
    ("Nodes", "0", "nodes is 0"),
    ("Top-k", "-3", "top_k is -3"),
    ("Max new tokens", "-5", "max_new_tokens is -5"),
    ("Max new tokens", "0", "max_new_tokens is 0"),
    ("Max new tokens", "1.5", "max_new_tokens is 1.5"),
    ("Seed", "-1", "seed is -1"),
]


@pytest.mark.parametrize(("label", "value", "said"), WRONG)
def test_a_number_out_of_range_is_refused_in_words(open_tab, label, value, said):
    tab, answers = open_tab(), []
    tab.on("response", lambda response: answers.append(response.status))
    tab.click("#settings button")
    field = tab.locator("#settings").get_by_label(label).first
    field.fill("")
    field.press_sequentially(value)
    field.blur()
    tab.wait_for_function(
        "said => document.querySelector('#settings').innerText.includes(said)", arg=said
    )
    tab.fill("#box textarea", "hello")
    tab.click("#send")
    tab.wait_for_function(
        "said => document.querySelector('#chat').innerText.split(said).length > 2", arg=said
    )
    assert not [status for status in answers if status >= 500]


@pytest.mark.parametrize(("typed", "kept"), [("", "0.5"), ("0.25", "0.25")])
def test_an_emptied_slider_keeps_its_value_until_another_is_typed(open_tab, typed, kept):
    tab, answers = open_tab(), []
    tab.on("response", lambda response: answers.append(response.status))
    tab.click("#settings button")
    field = tab.locator("#settings input[type=number][aria-label*=Temperature]").first
    field.fill("0.5")
    field.blur()
    field.fill("")
    field.press_sequentially(typed)
    field.blur()
    tab.wait_for_function(
        "kept => [...document.querySelectorAll('#settings input[type=number]')]"
        ".find(box => box.ariaLabel?.includes('Temperature'))?.value === kept",
        arg=kept,
    )
    tab.fill("#box textarea", "hello")
    tab.click("#send")
    tab.wait_for_selector("#chat .bot-row, #chat .bot")
    assert not [status for status in answers if status >= 400]
