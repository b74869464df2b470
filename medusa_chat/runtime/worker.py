"""Worker: holds the model of a process and does what is asked of it. Imports torch."""

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import refuse_out_of_memory
from medusa_chat.checkpoints.precision import smaller_precisions
from medusa_chat.decoding.events import Event, Finished, changed
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import (
    Fresh,
    LoadRequest,
    Message,
    Peek,
    PeekRequest,
    Prompt,
    Ranked,
    Request,
    Text,
)
from medusa_chat.runtime.model_slot import ModelSlot
from medusa_chat.runtime.requests import MeasureMemory, Reply, Tune, UseTree
from medusa_chat.runtime.tuner import governor_of, tune_unless_known, use_tree

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_chat.decoding.candidate_budget import Grower
    from medusa_chat.decoding.draft_budget import Governor


class Worker:
    """The model of a process. The one place where a request becomes a call."""

    def __init__(self) -> None:
        self.slot = ModelSlot()

    def handle(
        self, request: Request[Any], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """What a request brings, value by value. should_stop is asked between values; closing the
        iterator stops at once. Raises MedusaChatError for what is refused."""
        slot = self.slot
        match request:
            case LoadRequest():
                yield from slot.load(request, should_stop)
            case Reply(prompt, settings):
                yield from reply(slot.require(), prompt, settings, should_stop)
            case PeekRequest():
                yield peek(slot.require(), request)
            case Tune(again):
                yield from tune_unless_known(slot.require(), should_stop, again)
            case UseTree(tree):
                yield use_tree(slot.require(), tree)
            case MeasureMemory(device):
                yield slot.measure_memory(device)
            case _:
                raise TypeError(f"a worker cannot handle {type(request).__name__}")


def reply(
    loaded: LoadedModel,
    prompt: Prompt,
    settings: GenerationSettings,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Answer a conversation, or continue a raw text. Raises what cannot be answered."""
    if isinstance(prompt, Fresh):
        loaded.engine.forget()
        loaded.said, prompt = ("", []), prompt.text
    resolved, tree = resolve(loaded, settings)
    ids, text = encode(loaded, prompt)
    advice = _Advice(loaded, resolved)
    answer = decode(loaded, ids, resolved, tree, governor_of(loaded, settings), should_stop)
    with refuse_out_of_memory(advice), closing(answer) as events:
        for event in events:
            advice.has_begun = True
            if isinstance(event, Finished):
                event = _with_plain(loaded, ids, resolved, event)
                if not isinstance(prompt, str):
                    loaded.said = _said(loaded, text, ids, event)
            yield event


def decode(
    loaded: LoadedModel,
    ids: Sequence[int],
    settings: GenerationSettings,
    tree: Tree,
    governor: "Governor | Grower | None",
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Event, None, None]:
    """The events of the answer to token ids, with details and texts: what the page, `generate` and
    the speed study of `bench` all run. settings: resolved."""
    from medusa_chat.decoding.detokenizer import with_text

    drafter = loaded.engine.drafter(settings, tree, governor=governor)
    with closing(loaded.engine.generate(ids, drafter, settings)) as events:
        yield from with_text(events, loaded.tokenizer, loaded.texts, settings.stop, should_stop)


def _with_plain(
    loaded: LoadedModel, ids: Sequence[int], settings: GenerationSettings, last: Finished
) -> Finished:
    """The end of an answer with the time of a plain step beside it, where one can be timed."""
    if last.reason in ("error", "cancelled"):
        return last
    found = loaded.plain_clock.seconds(ids, settings, last)
    return changed(last, stats=replace(last.stats, plain_step_seconds=found))


class _Advice:
    """The message of an answer that ran out of memory: what to try, before or after its start."""

    def __init__(self, loaded: LoadedModel, settings: GenerationSettings) -> None:
        self.info, self.nodes, self.has_begun = loaded.info, settings.nodes or 1, False

    def __call__(self) -> str:
        less = smaller_precisions(self.info.precision)
        tries = [f"--nodes {self.nodes // 2}"] if self.has_begun and self.nodes > 1 else []
        tries += [f"a --max-context below {self.info.context}", "a shorter chat"]
        tries += [f"--precision {less[-1]}"] if less else []
        when = "in the middle of the answer" if self.has_begun else "while the prompt was read"
        return f"out of memory {when}: try {', '.join(tries[:-1])} or {tries[-1]}"


def peek(loaded: LoadedModel, request: PeekRequest) -> Peek:
    """The most probable tokens after a text, from the backbone and from one of its heads."""
    with refuse_out_of_memory(lambda: "out of memory: try a shorter chat"):
        logits, drafted = loaded.engine.peek(request.token_ids, request.path, request.head)
    found = _ranked(loaded, logits, request.temperature or 1.0, request)
    at_head = ((), ()) if drafted is None else _ranked(loaded, drafted, 1.0, request)
    return Peek(found[0], at_head[0], found[1], at_head[1])


def _ranked(
    loaded: LoadedModel, logits: "Tensor", temperature: float, request: PeekRequest
) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
    """(the first `top`, the tokens asked for), with their probabilities."""
    shares = (logits.float() / temperature).softmax(-1).cpu()
    best = shares.topk(min(request.top, len(shares))).indices.tolist()

    def places(tokens: Sequence[int]) -> tuple[Ranked, ...]:
        return tuple(
            Ranked(t, loaded.texts(t), float(shares[t]), int((shares > shares[t]).sum()) + 1)
            for t in tokens
        )

    known = [token for token in request.tokens if 0 <= token < len(shares)]
    return places(best), places(known)


def _said(loaded: LoadedModel, text: str, ids: list[int], event: Finished) -> tuple[str, list[int]]:
    """The conversation with the answer, text and ids, for the next turn to begin with; empty where
    the answer's text is not that of its ids (a stop string, half a character, an error)."""
    whole = loaded.tokenizer.decode(list(event.token_ids), clean_up_tokenization_spaces=False)
    if event.reason == "error" or whole != event.text:
        return "", []
    return text + event.text, [*ids, *event.token_ids]


def resolve(loaded: LoadedModel, settings: GenerationSettings) -> tuple[GenerationSettings, Tree]:
    """Fill in drafter, tree, nodes and seed; the tree itself. Raises UsageError."""
    from medusa_chat.trees.presets import load_tree

    info = loaded.info
    drafter = settings.drafter or ("medusa" if info.heads else "prompt-lookup")
    if drafter == "none":
        tree, name = ROOT, "none"
    elif settings.tree != "auto":
        tree, name = load_tree(settings.tree, settings.nodes), settings.tree
    else:
        tree, name = loaded.auto_tree(settings.nodes)[0], "auto"
    if drafter == "prompt-lookup":
        name = "prompt-lookup"  # its tree is made anew at every step; only the size was chosen
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    return settings.resolved(drafter=drafter, tree=name, nodes=len(tree), seed=seed), tree


def encode(loaded: LoadedModel, prompt: Text) -> tuple[list[int], str]:
    """The prompt's token ids and the text they stand for.

    A conversation is rendered by the tokenizer's chat template; where its last message is the
    assistant's, the text ends inside it and the answer continues it. The text up to the end of
    the last answer keeps its ids: only what follows is tokenised, so that the cache is reused.
    """
    tokenizer = loaded.tokenizer
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"], prompt
    if not tokenizer.chat_template:
        raise UsageError(f"{loaded.info.name} has no chat template: use --raw with --prompt")
    messages = [_neutral(tokenizer, message) for message in prompt]
    text = _rendered(loaded, messages)
    said, ids = loaded.said
    if said and text.startswith(said):
        rest = tokenizer(text[len(said) :], add_special_tokens=False)["input_ids"]
        return [*ids, *rest], text
    return tokenizer(text, add_special_tokens=False)["input_ids"], text


def _rendered(loaded: LoadedModel, messages: list[Message]) -> str:
    """The conversation as text, up to where the assistant's next token belongs. Raises UsageError:
    a template may refuse roles or their order in its own words."""
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    text = loaded.renderer.render(loaded.tokenizer, messages, continues)
    if continues:
        ending = messages[-1]["content"]
        trimmed = ending.rstrip()  # some templates strip a message; what it ends with is its own
        if not text.endswith(ending) and text.endswith(trimmed):
            text += ending[len(trimmed) :]
    return text


def _neutral(tokenizer: Any, message: Message) -> Message:
    """The message with special tokens in its text broken up, so that they stay plain text."""
    content = message["content"]
    added = tokenizer.added_tokens_decoder.values()
    for token in {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}:
        content = content.replace(token, f"{token[:1]}\u200b{token[1:]}")
    return {**message, "content": content}
