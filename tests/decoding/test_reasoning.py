"""Reasoning told from what is said: by the prompt, by markers, and never by a literal one."""

import pytest
from support.tokenizers import byte_tokenizer
from tokenizers import AddedToken

from medusa_chat.decoding.answer import Answer
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.reasoning import (
    HARMONY,
    MARKUPS,
    THINK,
    Part,
    ReasoningReader,
    markup_of,
    read,
)
from medusa_chat.decoding.step import StepResult

GEMMA = next(one for one in MARKUPS if one.open == "<|channel>")
MAGISTRAL = next(one for one in MARKUPS if one.open == "[THINK]")
KINDS = (HARMONY, GEMMA, MAGISTRAL, THINK)
IDS = dict(enumerate((text for kind in KINDS for text in kind.markers), start=300))
ID_OF = {text: id for id, text in IDS.items()}


def told(markup, text, state="begin", length=1, special=()):
    """What is told of an answer that comes in parts of so many characters, and as how many parts.
    special: the markers that are special tokens."""
    reader = ReasoningReader(markup, {ID_OF[one]: one for one in special}, state)
    whole, parts = Part(), []
    while text:
        marker = next((one for one in special if text.startswith(one)), "")
        cut = min((at for one in special if (at := text.find(one)) > 0), default=len(text))
        size = len(marker) or min(length, cut)
        if not marker:
            parts.append(reader.push(text[:size]))
        elif reader.is_marker(ID_OF[marker]):  # else the detokenizer leaves it out
            parts.append(reader.mark(ID_OF[marker]))
        text = text[size:]
    for part in (*parts, reader.finish()):
        whole = whole.plus(part)
    return whole


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "state", "reasoning", "said"),
    [
        ("plain", "begin", "", "plain"),
        (" <b> & < c", "begin", "", " <b> & < c"),
        ("<think>\nHm </think\n\nso.\n</think>\n\nYes.", "begin", "Hm </think\n\nso.", "Yes."),
        ("\n<think>a</think>b", "begin", "a", "b"),
        ("a</think>b", "begin", "", "a</think>b"),  # nothing was opened
        ("x<think>a</think>y", "begin", "", "x<think>a</think>y"),
        ("`<think>` opens", "begin", "", "`<think>` opens"),
        ("<think>a</think>say <think>, `</think>`", "begin", "a", "say <think>, `</think>`"),
        ("<think>never ends ", "begin", "never ends ", ""),
        ("<think>\n\n</think>\n\nb", "begin", "", "b"),  # an empty block vanishes
        ("\nHm\n</think>\n\nb", "opened", "Hm", "b"),  # by the prompt
        ("\nHm\n</think>\n\nb", "reasoning", "\nHm", "b"),  # it goes on
        ("b <think> c", "answer", "", "b <think> c"),
        ("<thi", "begin", "", "<thi"),
    ],
)
def test_tags_count_at_the_beginning_alone(text, state, reasoning, said, length):
    assert told(THINK, text, state, length) == (reasoning, said)


CHANNELS = [
    (HARMONY, "header", "<|channel|>analysis<|message|>Hm <think><|end|><|start|>assistant"
     "<|channel|>final<|message|>Yes </think>", "Hm <think>", "Yes </think>"),
    (HARMONY, "header", "<|channel|>final<|message|>Yes", "", "Yes"),
    (HARMONY, "header", "<|message|>Yes", "", "Yes"),
    (HARMONY, "header", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>"
     "commentary<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c", "a\n\nb", "c"),
    (HARMONY, "header", "<|channel|>analysis<|message|>cut in ", "cut in ", ""),
    (HARMONY, "header", "no channel at all", "", "no channel at all"),
    (HARMONY, "reasoning", "on<|end|><|start|>assistant<|channel|>final<|message|>c", "on", "c"),
    (GEMMA, "begin", "<|channel>thought\nHm\n<channel|>Yes", "Hm", "Yes"),
    (GEMMA, "begin", "<|channel>thought\n<channel|>Yes", "", "Yes"),
    (GEMMA, "reasoning", "Hm<channel|>Yes", "Hm", "Yes"),
    (GEMMA, "begin", "Yes <channel|>no", "", "Yes no"),
    (THINK, "begin", "\n<think>\nHm\n</think>\n\nSay <think>, `</think>`", "Hm", "Say , ``"),
    (MAGISTRAL, "begin", "[THINK]2+2[/THINK]4", "2+2", "4"),
    (MAGISTRAL, "begin", "Let me.[THINK]2+2[/THINK]4", "2+2", "Let me.\n\n4"),
]  # fmt: skip


@pytest.mark.parametrize("length", [1, 4, 1000])
@pytest.mark.parametrize(("markup", "state", "text", "reasoning", "said"), CHANNELS)
def test_special_tokens_count_wherever_they_are(markup, state, text, reasoning, said, length):
    found = told(markup, text, state, length, special=markup.markers)
    assert found == (reasoning, said)


def test_what_is_certain_is_told_at_once():
    reader = ReasoningReader(THINK)
    parts = [
        reader.push(text) for text in ("<thi", "nk>\n", "Hm", " so</", "th", "ink>", "\n", "A")
    ]
    assert [part.reasoning for part in parts] == ["", "", "Hm", " so", "", "", "", ""]
    assert [part.text for part in parts] == ["", "", "", "", "", "", "", "A"]


@pytest.mark.parametrize(
    ("markup", "prompt", "state"),
    [
        (THINK, "<|im_start|>assistant\n", "begin"),
        (THINK, "<|im_start|>assistant\n<think>\n", "opened"),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "begin"),
        (HARMONY, "<|start|>assistant", "header"),
        (HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", "opened"),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>", "answer"),
        (GEMMA, "<|turn>model\n", "begin"),
        (GEMMA, "<|turn>model\n<|channel>thought\n", "opened"),
        (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "begin"),
    ],
)
def test_the_prompt_decides_where_an_answer_begins(markup, prompt, state):
    assert markup.after(prompt) == state


@pytest.mark.parametrize("markup", MARKUPS)
def test_an_answer_is_written_as_it_is_read(markup):
    prompt, part = "<|start|>assistant", Part("Hm, so", "Yes.")
    special = markup.markers if set(markup.markers) <= set(ID_OF) else ()
    for wanted in (part, Part("Hm, ")):
        text = markup.written(wanted, prompt)
        assert told(markup, text, markup.after(prompt), special=special) == wanted
        opened = prompt + markup.begin
        text = markup.written(wanted, opened)
        assert text.startswith("Hm") and markup.after(opened) == "opened"
        assert told(markup, text, "opened", special=special) == wanted


def test_a_model_has_the_markup_of_its_template_or_vocabulary():
    assert markup_of("a {{ b }}", ()) == markup_of("<think>", ("<think>",)) == THINK
    assert markup_of("<|channel|>analysis<|message|>", ()) == HARMONY
    assert markup_of("", ("[THINK]", "[/THINK]", "<s>")) == MAGISTRAL
    assert markup_of("x", ("<|channel>", "<channel|>")) == GEMMA


def test_an_answer_that_is_one_text_is_read_at_its_beginning():
    assert read("<think>a</think>b") == read("\n<think>\na\n</think>\n\nb") == ("a", "b")
    assert read("[THINK]a[/THINK]b") == ("a", "b") and read("<think>a") == ("a", "")
    assert read("say <think>a</think>") == ("", "say <think>a</think>")


def test_the_events_of_an_answer_tell_its_reasoning_apart_by_the_ids_of_its_markers():
    """The detokenizer leaves special tokens out: Harmony's channels have no text."""
    tokenizer = byte_tokenizer()
    special = [AddedToken(text, special=True) for text in HARMONY.markers]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    marks = {tokenizer.convert_tokens_to_ids(text): text for text in HARMONY.markers}
    raw = "<|channel|>analysis<|message|>H\u00e9, <|end|><|start|>assistant<|channel|>final"
    ids = tokenizer(f"{raw}<|message|>Ouf \u00e0 </think>").input_ids
    for size in (1, 3, 40):
        reader = ReasoningReader(HARMONY, marks, "header")
        answer = Answer(frozenset(), 999, "length", TokenTexts(tokenizer), ("XX",), reader)
        parts = [Part()]
        for at in range(0, len(ids), size):
            tokens = ids[at : at + size]
            result = StepResult(list(range(len(tokens))), [], 0, is_finite=True)
            step = answer.step(tokens, result, 0.0, 0.0, "")
            parts.append(Part(step.reasoning, step.text))
        answer.reason = "eos"
        last = answer.finished()
        assert (last.reasoning, last.text) == ("H\u00e9,", "Ouf \u00e0 </think>")
        assert "".join(part.text for part in parts) + last.tail == last.text
        assert last.reasoning.startswith("".join(part.reasoning for part in parts))
