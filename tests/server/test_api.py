"""The API as the clients of OpenAI see it: the real package against a server in a thread."""

import json
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import openai
import pytest
import uvicorn
from support.checkpoints import write_checkpoint
from support.waiting import wait_for

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import PortInUseError, UsageError
from medusa_chat.messages import Fresh, LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess
from medusa_chat.runtime.session import Session
from medusa_chat.server.app import ApiOptions
from medusa_chat.server.serve import ServeOptions, bound_socket, open_api

ASKED = [{"role": "user", "content": "hello"}]
SITE = "https://editor.example"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if enable_thinking is defined %}t{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Recorded(Session):
    """A session that keeps the tickets of what it was asked."""

    def __init__(self, runner):
        super().__init__(runner)
        self.tickets = []

    def submit(self, request, guest=""):
        self.tickets.append(super().submit(request, guest))
        return self.tickets[-1]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("api") / "model", template=TEMPLATE)
    made = Recorded(InProcess())
    made.submit(LoadRequest(str(folder), precision="fp32")).done.wait()
    assert made.state.status == "ready"
    yield made
    made.close()


@pytest.fixture(scope="module")
def serving(session):
    """Starts servers of the session: options -> (address, client of its own)."""
    running = []

    def start(**options):
        api = ApiOptions(**options)
        listening = bound_socket("127.0.0.1", 0)
        config = uvicorn.Config(
            open_api(session, ServeOptions(api=api)), log_level="warning", lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(serving):
    return serving(origins=[SITE])


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "gpt-4o", "messages": ASKED} | options)


def text_of(answer):
    return answer.choices[0].message.content


def plain_text(session, prompt, seed, temperature, most):
    """The same by the session, without drafting."""
    settings = GenerationSettings(
        drafter="none", temperature=temperature, seed=seed, max_new_tokens=most
    )
    ticket = session.submit(Reply(Fresh(prompt), settings))
    ticket.done.wait()
    return ticket.trace[-1].text


def test_the_model_is_listed_with_its_context(client, session):
    model, *with_presets = client.models.list().data
    assert {one.id for one in with_presets} >= {f"{model.id}@precise", f"{model.id}@code"}
    assert client.models.retrieve(f"{model.id}@code").max_model_len == 256
    assert model.id == session.state.model.name and model.max_model_len == 256
    assert client.models.retrieve(model.id).owned_by == "medusa-chat"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_a_request_stands_over_a_preset_and_that_over_the_models_own_sampling(
    client, session, monkeypatch
):
    state = session.lifecycle.state
    own = replace(state.model, sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    monkeypatch.setattr(session.lifecycle, "state", replace(state, model=own))

    def used(**options):
        answer = chat(client, max_tokens=1, **options)
        return answer, session.tickets[-1].request

    settings = used()[1].settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.6, 0.9, 20)
    answer, request = used(model="any@code", top_p=0.7)
    assert answer.model == f"{own.name}@code"
    settings = request.settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.2, 0.7, 20)
    assert [one["role"] for one in request.prompt] == ["system", "user"]
    own_system = [{"role": "system", "content": "mine"}, *ASKED]
    assert used(model="any@code", messages=own_system)[1].prompt == own_system
    assert used(model="hf:some/model@main")[0].model == own.name
    with pytest.raises(openai.NotFoundError, match="there is no preset 'nothing'"):
        chat(client, model=f"{own.name}@nothing")


def test_a_request_that_names_no_temperature_gets_1_where_the_model_names_none(client, session):
    chat(client, max_tokens=1)
    settings = session.tickets[-1].request.settings
    assert settings.temperature == 1 and not settings.has_penalties


def test_an_answer_names_our_model_whatever_was_asked(client, session):
    answer = chat(client, max_tokens=8, temperature=0)
    assert answer.model == session.state.model.name
    assert text_of(answer) == plain_text(session, ASKED, 0, 0, 8)
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("u:hello\na:"), 8)
    assert usage.total_tokens == usage.prompt_tokens + 8


def test_the_same_seed_gives_the_text_of_plain_decoding(client, session):
    for seed in range(3):
        texts = {text_of(chat(client, seed=seed, temperature=1.2, max_tokens=24)) for _ in "ab"}
        assert texts == {plain_text(session, ASKED, seed, 1.2, 24)}
    assert text_of(chat(client, seed=-1, max_tokens=8))  # OpenAI takes any whole number


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_whole_answer_in_pieces(client, seed):
    """Of a model whose tokens are bytes: characters are split over tokens."""
    options = {"seed": seed, "temperature": 2.0, "max_tokens": 60}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    *told, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.model_extra["medusa"]["steps"] > 0
    assert {(chunk.id, chunk.created, chunk.usage) for chunk in told} == {
        (told[0].id, told[0].created, None)
    }
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == text_of(whole)
    reasons = [chunk.choices[0].finish_reason for chunk in told]
    assert reasons == [*[None] * (len(told) - 1), whole.choices[0].finish_reason]
    assert any(ord(character) > 127 for character in text_of(whole))


def test_the_events_of_a_stream_are_as_the_standard_has_them(url):
    body = {"messages": ASKED, "stream": True, "max_tokens": 4}
    answer = httpx.post(f"{url}/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *events, done, rest = answer.content.decode().split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    assert not any("usage" in json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 2}])
def test_log_probabilities_are_the_backbones_own_whatever_is_drafted(client, session, options):
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 24, **options}
    answer = chat(client, **asked)
    told = answer.choices[0].logprobs.content
    assert len(told) == answer.usage.completion_tokens
    plain = chat(client, extra_body={"drafter": "none"}, **asked).choices[0].logprobs.content
    assert [one.token for one in told] == [one.token for one in plain]
    for one, alone in zip(told, plain, strict=True):
        assert one.logprob == pytest.approx(alone.logprob, abs=1e-3)
        assert len(one.top_logprobs) == 3 and len(one.bytes) == 1  # a byte a token
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0001
        if options["temperature"] == 0:
            assert one.logprob == one.top_logprobs[0].logprob
    streamed = []
    for chunk in chat(client, stream=True, **asked):
        part = chunk.choices[0].logprobs
        streamed += [] if part is None else part.content
    assert [one.logprob for one in streamed] == [one.logprob for one in told]
    first, text = told[0].top_logprobs, "u:hello\na:"
    loaded = session.runner.worker.loaded
    row = loaded.engine.peek(loaded.tokenizer(text)["input_ids"], ())[0]  # its own pass
    assert first[0].logprob == pytest.approx(float(row.log_softmax(-1).max()), abs=1e-3)


def test_completions_give_log_probabilities_as_they_did(client):
    options = {"prompt": "ab", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    told = client.completions.create(model="", **options).choices[0].logprobs
    assert told.text_offset == [0, 1, 2, 3, 4] and len(told.tokens) == 5
    for logprob, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == max(top.values())


def test_a_stop_text_ends_the_answer_and_is_not_in_it(client):
    whole = text_of(chat(client, temperature=0, max_tokens=30))
    stop = whole[5:7]
    answer = chat(client, temperature=0, max_tokens=30, stop=["", stop, *"0123456789"])
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_without_a_limit_ends_with_the_context(client):
    answer = chat(client, temperature=0, logit_bias={}, max_tokens=None)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.total_tokens > 100


def test_one_token_is_an_answer(client):
    assert chat(client, max_tokens=90, max_completion_tokens=1).usage.completion_tokens == 1


def test_messages_come_in_every_form_that_clients_send(client, session):
    asked = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}],
        },
        {"role": "assistant", "content": None, "refusal": None, "name": None},
        {"role": "user", "content": "more"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    nulls = dict.fromkeys(("stop", "seed", "top_p", "n", "logprobs", "user", "metadata", "store"))
    answer = chat(client, messages=asked, max_tokens=4, temperature=0, tools=[tool], **nulls)
    text = "s:Be brief.\nu:hey\na:\nu:more\na:"
    assert answer.usage.prompt_tokens == len(text)
    assert text_of(answer) == plain_text(session, text, 0, 0, 4)


def test_a_last_message_of_the_assistant_is_continued_where_that_is_asked(client, session):
    begun = [*ASKED, {"role": "assistant", "content": "well"}]
    for extra, text in (
        ({}, "u:hello\na:well\na:"),
        ({"continue_final_message": True}, "u:hello\na:well"),
    ):
        answer = chat(client, messages=begun, extra_body=extra, temperature=0, max_tokens=5)
        assert text_of(answer) == plain_text(session, text, 0, 0, 5)


def test_the_template_is_told_what_a_client_tells_it(client, session):
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = chat(client, extra_body=extra, temperature=0, max_tokens=5)
    assert text_of(answer) == plain_text(session, "u:hello\ntFalsea:", 0, 0, 5)


def test_completions_take_texts_and_token_ids(client, session):
    complete = client.completions.create
    both = complete(model="", prompt=["ab", "xyz"], max_tokens=6, temperature=0)
    texts = [plain_text(session, prompt, 0, 0, 6) for prompt in ("ab", "xyz")]
    assert [choice.text for choice in both.choices] == texts
    assert both.usage.prompt_tokens == 5 and both.usage.completion_tokens == 12
    alphabet = session.runner.worker.loaded.tokenizer
    ids = alphabet("ab")["input_ids"]
    assert complete(model="", prompt=ids, max_tokens=6, temperature=0).choices[0].text == texts[0]
    chunks = list(
        complete(model="", prompt=["ab", "xyz"], max_tokens=6, temperature=0, stream=True)
    )
    for index, text in enumerate(texts):
        own = [chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(own) == text
    with pytest.raises(openai.BadRequestError, match="256"):
        complete(model="", prompt=[256])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 2}, "one answer"),
        ({"stop": [3]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"drafter": "wizard"}}, "drafter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, options, named):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **options)
    assert named in refused.value.message and refused.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_clients_look_for(
    client, is_streamed
):
    asked = [{"role": "system", "content": "x" * 30_000}, *ASKED]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as refused:
        chat(client, messages=asked, stream=is_streamed)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request_gets_an_error_of_openais_form(url, body):
    answer = httpx.post(f"{url}/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_address_gets_an_error_of_openais_form(url):
    for method, path in (("GET", "/chat/completions"), ("POST", "/responses")):
        answer = httpx.request(method, f"{url}{path}")
        assert answer.status_code == 404 and path in answer.json()["error"]["message"]


def test_a_client_that_goes_away_ends_its_answer(client, session):
    stream = chat(client, stream=True, temperature=0, extra_body={"drafter": "none"})
    next(iter(stream))
    ticket = session.tickets[-1]
    stream.close()
    wait_for(ticket.done.is_set)
    assert ticket.trace[-1].reason == "cancelled"


def test_two_requests_at_once_get_their_own_answers(client, session):
    answers = {}

    def ask(text):
        messages = [{"role": "user", "content": text}]
        answers[text] = text_of(chat(client, messages=messages, temperature=0, max_tokens=30))

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    assert client.models.list(timeout=5).data  # not behind the answers
    for thread in threads:
        thread.join()
    for text, answer in answers.items():
        assert answer == plain_text(session, [{"role": "user", "content": text}], 0, 0, 30)


def test_what_a_conversation_repeats_is_read_from_the_cache(client):
    first = chat(client, temperature=0, max_tokens=4)
    asked = [*ASKED, {"role": "assistant", "content": text_of(first)}, *ASKED]
    again = chat(client, messages=asked, temperature=0, max_tokens=4)
    assert again.usage.prompt_tokens_details.cached_tokens >= len("u:hello\na:")


def test_a_key_is_asked_for_but_not_by_a_preflight(serving):
    url = serving(key="secret", origins=[SITE])
    for header in ({}, {"authorization": "Bearer wrong"}, {"api-key": "sécret".encode()}):
        answer = httpx.get(f"{url}/models", headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for header in ({"authorization": "Bearer secret"}, {"api-key": "secret"}):
        assert httpx.get(f"{url}/models", headers=header).status_code == 200
    assert httpx.options(f"{url}/models", headers={"origin": SITE}).status_code == 204


def test_scripts_of_an_allowed_site_may_ask_and_no_others(url):
    asked = {
        "origin": SITE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    answer = httpx.options(f"{url}/chat/completions", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == SITE
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert answer.headers["access-control-allow-private-network"] == "true"
    allowed = httpx.get(f"{url}/models", headers={"origin": SITE})
    assert allowed.headers["access-control-allow-origin"] == SITE
    for method in ("GET", "OPTIONS"):
        other = httpx.request(method, f"{url}/models", headers=asked | {"origin": "https://x.y"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


def test_a_name_that_another_site_has_bound_to_this_machine_is_refused(url):
    assert httpx.get(f"{url}/models", headers={"host": "evil.example"}).status_code == 403


def test_what_others_can_reach_needs_a_key(session):
    with pytest.raises(UsageError, match="api-key"):
        open_api(session, ServeOptions(host="0.0.0.0"))
    assert open_api(session, ServeOptions(host="0.0.0.0", api=ApiOptions("k")))
    with pytest.raises(UsageError, match="not an address"):
        open_api(session, ServeOptions(host="192.0.2.1", api=ApiOptions("k")))


def test_a_port_in_use_is_told():
    with bound_socket("127.0.0.1", 0) as taken, pytest.raises(PortInUseError, match="--port"):
        bound_socket("127.0.0.1", taken.getsockname()[1])


def test_while_no_model_is_loaded_clients_are_told_to_try_again(monkeypatch, url, session):
    failed = SimpleNamespace(status="failed", model=None, message="the demo is broken")
    monkeypatch.setattr(type(session), "state", failed)
    answer = httpx.post(f"{url}/chat/completions", json={"messages": ASKED})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "the demo is broken" in answer.json()["error"]["message"]
