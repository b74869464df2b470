"""Chat templates: rendered as transformers does, and never for long, whatever they are."""

import errno
import json
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from support.tokenizers import byte_tokenizer
from support.waiting import wait_for

from medusa_chat.checkpoints import chat_template
from medusa_chat.checkpoints.chat_template import TemplateRenderer
from medusa_chat.errors import UsageError
from medusa_chat.paths import preset

TALK = [
    {"role": "system", "content": " Be  brief.\n"},
    {"role": "user", "content": "Hi </s> \U0001f600 <b>"},
    {"role": "assistant", "content": "Hello. "},
    {"role": "user", "content": "1 < 2\n\n"},
]
KINDS = {
    "tags": "{%- for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m.content | trim }}\n"
    "  {% endif %}\n{%- endfor %}{{ eos_token }}",
    "loops": "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
    "{{ m.content | tojson }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}",
    "names": "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}"
    "{% endfor %}{{ ns.a }}{{ dict(b=1) }}{{ bos_token }}{{ messages }}",
    "end": "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "product": "{{ 'a' * 10**9 }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "format": "{{ '%099999999d' % 1 }}",
    "format filter": "{{ '%0999999999d' | format(1) }}",
    "join": "{{ (['a' * 99999] * 99999) | join('b') }}",
    "sort": "{{ (range(99999) | list * 9999) | sort }}",
    "date": "{{ strftime_now('%Y' * 10**8) }}",
    "self": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "large": "a" * 70_000,
}


@pytest.fixture(scope="module")
def renderer():
    made = TemplateRenderer()
    made.start()
    return made


def tokenizer_with(template):
    made = byte_tokenizer()
    made.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
    made.chat_template = template
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_renders_as_transformers_does(renderer, kind):
    tokenizer = tokenizer_with(KINDS[kind])
    wanted = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert renderer.render(tokenizer, TALK) == wanted


def test_it_continues_a_message_as_transformers_does(renderer):
    tokenizer = tokenizer_with(KINDS["end"])
    conversation = TALK[:3]
    wanted = tokenizer.apply_chat_template(
        conversation, tokenize=False, continue_final_message=True
    )
    assert renderer.render(tokenizer, conversation, continues=True) == wanted


def test_the_shipped_templates_render_as_transformers_does(renderer):
    files = list(preset("templates").glob("*"))
    assert files
    for file in files:
        tokenizer = tokenizer_with(file.read_text("utf-8"))
        conversation = TALK[1:]
        wanted = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        assert renderer.render(tokenizer, conversation) == wanted


@pytest.mark.parametrize("kind", BOMBS)
def test_a_template_without_end_or_measure_is_refused_and_the_next_one_renders(renderer, kind):
    with pytest.raises(UsageError, match="chat template") as refusal:
        renderer.render(tokenizer_with(BOMBS[kind]), TALK)
    assert len(str(refusal.value)) < 500
    assert renderer.render(tokenizer_with("{{ messages[0].role }}"), TALK) == "system"


# as LLaVA's and SmolVLM's: no text where a message is not a list; an error at a system message
OF_PARTS = {
    "lists": "{% for m in messages %}{{ m.role }}:{% for part in m['content'] | "
    "selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %}{{ '\n' }}{% endfor %}",
    "first parts": "{% for m in messages %}{{ m.role + ': ' + m['content'][0]['text'] + '\n' }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("kind", OF_PARTS)
@pytest.mark.parametrize("continues", [False, True])
def test_a_template_of_pictures_and_texts_gets_texts_as_parts(renderer, kind, continues):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}]
    talk += [{"role": "assistant", "content": "Hello"}] if continues else []
    text = renderer.render(tokenizer_with(OF_PARTS[kind]), talk, continues=continues)
    wanted = "system: Be brief.\nuser:  Hi\n\n" + "assistant: Hello" * continues
    assert text == wanted


def test_a_short_message_is_not_taken_for_the_templates_own_words(renderer):
    """SmolVLM's: of a message that is a text nothing but the role is written."""
    template = "{% for m in messages %}{{ m.role | capitalize }}:{% if m.content is not string %} "
    template += "{{ m.content[0]['text'] }}{% endif %}|{% endfor %}Assistant:"
    for said in ("a", "User", "s"):
        talk = [{"role": "user", "content": said}]
        assert renderer.render(tokenizer_with(template), talk) == f"User: {said}|Assistant:"


def test_a_template_that_changes_what_is_said_gets_texts(renderer):
    upper = "{% for m in messages %}{{ m.content | upper if m.content is string else m.content }}"
    upper += "{% endfor %}"
    assert renderer.render(tokenizer_with(upper), TALK[1:2]) == TALK[1]["content"].upper()


def test_a_template_refuses_in_its_own_words(renderer):
    with pytest.raises(UsageError, match="refuses this conversation: no system here"):
        renderer.render(tokenizer_with("{{ raise_exception('no system here') }}"), TALK)


def test_where_the_system_counts_no_processor_time_the_clock_ends_it(monkeypatch):
    assert chat_template.PATIENCE >= 10 * chat_template.SECONDS
    monkeypatch.setattr(chat_template, "PATIENCE", 1.0)
    made = TemplateRenderer()
    with pytest.raises(UsageError, match="takes more than 1 seconds: try again when the machine"):
        made.render(tokenizer_with(BOMBS["nested loops"]), TALK)


def test_a_child_that_is_gone_is_made_anew_whatever_the_pipe_says(monkeypatch):
    def gone(data: bytes) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")  # so Windows says of a broken pipe

    made, tokenizer = TemplateRenderer(), tokenizer_with("{{ messages[0].role }}")
    made.render(tokenizer, TALK)
    made._child.kill()
    monkeypatch.setattr(made._child, "stdin", SimpleNamespace(write=gone, close=lambda: None))
    with pytest.raises(UsageError, match="ends the process it runs in"):
        made.render(tokenizer, TALK)
    assert made.render(tokenizer, TALK) == "system"


def test_no_child_is_left_when_its_owner_is_gone_in_the_middle_of_a_template(tmp_path):
    """A template that ran in the worker left an orphan that took the processor for ever."""
    reading, writing = os.pipe()
    owner = os.fork()
    if not owner:
        made = TemplateRenderer()
        made.start()
        os.write(writing, json.dumps(made._child.pid).encode())
        made.render(tokenizer_with(BOMBS["nested loops"]), TALK)
        os._exit(0)
    child = psutil.Process(int(os.read(reading, 100)))
    wait_for(lambda: child.cpu_times().user > 0.5 or not child.is_running())
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 60)
    os.close(reading), os.close(writing)


@pytest.mark.skipif(not hasattr(os, "getpgid"), reason="a terminal of POSIX")
def test_ctrl_c_in_a_terminal_ends_an_answer_and_not_the_templates_process(renderer):
    renderer.start()
    assert os.getpgid(renderer._child.pid) != os.getpgid(0)
