"""An answer that was cut inside a character."""

from types import SimpleNamespace

import pytest
from support.tokenizers import byte_tokenizer

from medusa_chat.decoding.events import Finished, Stats
from medusa_chat.runtime.prompt import PromptIds, cached_text


@pytest.mark.parametrize(("left_off", "is_kept"), [(0, True), (1, False)])
def test_no_prompt_goes_on_from_half_a_character(left_off, is_kept):
    """Its other bytes would come as bytes of no character."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("ok \U0001f642")["input_ids"]
    ids = tuple(ids[: len(ids) - left_off])
    text = tokenizer.decode(list(ids))
    event = Finished("length", ids, text, "", Stats.of(len(ids), 0, 0, 0.0, 0.0, 0.0))
    prompt = PromptIds([1, 2], "u:hi\na:")
    kept = cached_text(SimpleNamespace(tokenizer=tokenizer), prompt, event)
    assert (kept and kept.ids) == ([1, 2, *ids] if is_kept else None)
