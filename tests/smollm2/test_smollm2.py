"""A real model: its GGUF file as it is, answering with the heads that ship for it, and had in
the page by one click."""

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support.access import findings
from support.hub_files import use
from support.hub_server import HubRepo, serving
from support.loading import answer
from support.page import READY, chromium, opened_on, page_of
from support.smollm2 import BASE, NAME, repo_files

from medusa_chat.bench.answers import question_of
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.exactness import (
    DRAFTERS,
    MODES,
    TIE,
    answers,
    differences,
    differences_from,
)
from medusa_chat.bench.hf_baseline import read_baseline
from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.errors import ContextError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.runner import InProcess
from medusa_chat.runtime.session import Session

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = (
    FRANCE[0]["content"],
    "Write a haiku about rain.",
    "Repeat: the cat sat on the mat, the cat sat on the hat, the cat sat on the bat.",
    "How many legs do two spiders have? Think step by step.",
)
NAMES = {"token_embd": "embed_tokens", "blk.7.ffn_up": "layers.7.mlp.up_proj"}


def test_weights_are_those_of_the_file(real_gguf, unpacked):
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(real_gguf).tensors}
    ours = load_file(unpacked / "model.safetensors")
    assert len(ours) == len(reader)
    for theirs, name in NAMES.items():
        tensor = reader[f"{theirs}.weight"]
        plain = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(ours[f"model.{name}.weight"], plain.bfloat16())


def test_heads_come_by_the_name_of_the_file_and_by_their_own(model):
    notes = " ".join(model.info.notes)
    assert model.info.heads >= 3 and model.calibration is not None
    assert ("heads that ship with medusa-chat" in notes) == (model.info.name != NAME)
    assert "first answers: " in notes
    assert "are not those that the heads were trained for" not in notes


def test_the_chat_template_is_the_models_and_its_turn_ends(model):
    text = renderer().render(model.tokenizer, FRANCE, continues=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    if model.info.precision == "fp32":  # in 8 bits a near tie has another first word
        last = answer(model, FRANCE, max_new_tokens=60)[-1]
        assert last.reason == "eos" and "Paris" in last.text and "<|" not in last.text


@pytest.mark.parametrize("mode", MODES)
def test_every_drafter_gives_the_text_of_plain_decoding(model, unpacked, mode):
    """As `bench --study exactness` says it; in fp32, which is slow, greedily and with transformers
    beside it."""
    request, settings = LoadRequest(NAME, str(unpacked), device="cpu"), MODES[mode]
    if model.info.precision == "fp32" and not settings.is_greedy:
        return
    context = BenchContext(request, model, "auto", 1, 24, lambda message: None)
    runs = answers(context, [question_of(context, text) for text in PROMPTS], settings)
    for drafter in DRAFTERS:
        assert differences(context, runs["none"], runs[drafter], settings) == [], drafter
    assert sum(run.steps for run in runs["auto"]) < sum(run.steps for run in runs["none"])
    if settings.is_greedy and model.info.precision == "fp32":
        found = differences_from(read_baseline(context, "float32"), runs["none"])
        assert all(one.gap < TIE for one in found), found


def test_memory_is_estimated_within_a_tenth_and_the_context_is_whole(model):
    info = model.info
    assert info.context == 8192
    assert info.estimated_bytes == pytest.approx(info.memory_bytes, rel=0.1)
    with pytest.raises(ContextError, match="8192"):
        answer(model, "a" * 8 + " b" * 8192)


def test_a_long_text_is_read_and_continued_as_plain_decoding_does(model):
    text = "The list: " + " ".join(f"{n} and {n * n % 97}." for n in range(60))
    plain, medusa = (answer(model, text, drafter=name)[-1] for name in ("none", "medusa"))
    assert plain.token_ids == medusa.token_ids


# ---- the page ----


@pytest.fixture(scope="module")
def page(unpacked, place):
    """The page with the demo, and a Hub that has the real model."""
    patch = pytest.MonkeyPatch()
    with serving({BASE: HubRepo(repo_files(unpacked))}) as running:
        use(running, patch, place)
        session = Session(InProcess())
        session.submit(LoadRequest(device="cpu"))
        with page_of(session) as served:
            yield served
    patch.undo()


@pytest.fixture
def tab(page):
    with chromium() as chrome, opened_on(chrome, page, "Chat", READY) as opened:
        yield opened


def test_one_click_downloads_the_model_switches_and_answers(tab, page):
    tab.wait_for_selector(".offer-take")
    assert "a toy" in tab.inner_text("#offer")
    assert findings(tab) == []
    tab.click("#offer button")
    tab.wait_for_function("document.querySelector('#live-text')?.textContent.trim()")
    tab.evaluate("document.querySelector('#stop')?.click()")  # it may end by itself as well
    tab.wait_for_selector("#history .bot .message-content")
    tab.wait_for_selector("#stop", state="hidden")
    assert page.session.state.model.name == NAME
    assert page.session.state.model.parameters == 134_515_008
    assert tab.inner_text("#history .bot .message-content").strip()  # however short it is
    assert not tab.is_visible("#offer")
    tab.get_by_role("tab", name="Models").click()
    first = tab.locator(".model").first
    first.locator(".model-loaded").wait_for()
    assert "heads ship with medusa-chat" in first.inner_text()
    assert BASE in first.inner_text()
