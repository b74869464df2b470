"""A conversation as a Markdown file: whatever a message leaves open, the next one begins."""

import random
import time
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from medusa_chat.runtime.answer_figures import AnswerFigures
from medusa_chat.runtime.stored_conversation import MessageTree, StoredConversation
from medusa_chat.ui.chat.saved_file import SavedFile

COMMONMARK = MarkdownIt("commonmark")
SPEAKERS = ["You", "medusa-chat", "You", "medusa-chat"]


def saved(text, note="", model="demo"):
    """The file of a conversation in which every message, and its system prompt, is this text."""
    tree, figures = MessageTree().plus("user", text), AnswerFigures(model)
    tree = tree.plus("assistant", text, note, figures=figures).plus("user", text)
    tree = tree.plus("assistant", text)
    return SavedFile.of(StoredConversation(tree, system=text, given_title="Talk")).text


def headings(markdown):
    tokens = COMMONMARK.parse(markdown)
    places = [at for at, one in enumerate(tokens) if one.type == "heading_open" and not one.level]
    return [tokens[at + 1].content for at in places]


FENCES = ("```python\nx = 1", "~~~~\n```\n~~~", "a\n\n   `````\n```", "```\n<pre>\n")
IN_OTHERS = ("- a\n  ```\n  x", "> ```\n> x", "- ```\nx\n```", "1. <!-- x")
HTML = ("<!-- so", "a <!-- so", "<script>\nlet x = '", "<pre>\n\na", "<STYLE>a\n\nb", "<?php")
MORE = ("<!DOCTYPE", "<![CDATA[ x", "<textarea>\n", "<pre><!--\n")


@pytest.mark.parametrize("text", (*FENCES, *IN_OTHERS, *HTML, *MORE))
def test_a_message_that_is_cut_anywhere_takes_in_no_later_one(text):
    markdown = saved(text)
    found = [one for one in headings(markdown) if one in (*SPEAKERS, "System prompt")]
    assert found == ["System prompt", *SPEAKERS]
    assert markdown.count(text) == 5


def test_a_note_and_the_name_of_a_model_take_in_nothing_either():
    found = headings(saved("x", note="stopped\n```\n", model="m\n~~~"))
    assert found[1:] == ["System prompt", *SPEAKERS]


def test_what_leaves_nothing_open_stays_as_it_is():
    text = "```\n<pre>\n```\n\n<b>x</b> `<script>` <!-- y --> a<b\n\n<details>z</details>"
    assert saved(text, model="").endswith(f"## You\n\n{text}\n\n## medusa-chat\n\n{text}\n")


def test_random_messages_take_in_no_later_one():
    chance = random.Random(2)
    parts = ["```", "~~~~", "<!--", "-->", "<script>", "</script>", "<pre>", "<?", "<!X", "]]>"]
    parts += ["<div>", "- ", "> ", "1. ", "  ", "\t", "\n", "\n\n", "a", "`", "\\", "[a]: ", "\r"]
    for _ in range(300):
        text = "".join(chance.choice(parts) for _ in range(chance.randint(1, 12)))
        assert headings(saved(text))[-1] == "medusa-chat", text


OPENED = ("script", "style", "textarea", "title", "details", "template", "video", "datalist")


class Shown(HTMLParser):
    """The text of headings that a browser shows, outside of what it hides."""

    def __init__(self):
        super().__init__()
        self.hidden, self.headings = [], []

    def handle_starttag(self, tag, _):
        if tag in (*OPENED, "h2"):
            self.hidden.append(tag)

    def handle_endtag(self, tag):
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]

    def handle_data(self, data):
        if self.hidden == ["h2"]:
            self.headings.append(data)


@pytest.mark.parametrize("name", OPENED)
def test_an_element_that_a_message_opens_in_passing_hides_no_later_one(name):
    shown = Shown()
    shown.feed(COMMONMARK.render(saved(f"Use the <{name}> tag, as in `<{name}>x`.")))
    assert shown.headings == ["System prompt", *SPEAKERS]


@pytest.mark.parametrize("text", ["<div>\n<!-- x", "<div>\n<!-- x\n\ny", "a\n\n<p>\n<!--"])
def test_a_comment_that_stays_open_in_another_element_hides_no_later_message(text):
    shown = Shown()
    shown.feed(COMMONMARK.render(saved(text)))
    assert shown.headings == ["System prompt", *SPEAKERS]


@pytest.mark.parametrize("text", ["<b <!--", "`<!--`"])
def test_a_message_of_many_comments_is_saved_at_once(text):
    """A guest's 56,000 characters held every tab for nine seconds."""
    begin = time.process_time()
    saved(text * 8000)
    assert time.process_time() - begin < 4
