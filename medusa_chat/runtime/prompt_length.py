"""How long a text may be to be tokenised: far too long ones are refused before they take gigabytes.

A tokenizer takes some hundred bytes and a microsecond or more for each character.
"""

from typing import Any

from medusa_chat.errors import ContextError

PART = 250_000  # characters: shorter texts are not looked at, of longer ones so many at a time
MANY = 100_000  # tokens that are counted whatever the context holds
REMEDY = "shorten it, start a new chat, or raise --max-context where the model allows it"


def refuse_endless(tokenizer: Any, text: str, context: int) -> None:
    """Raises ContextError for a text that cannot fit: of more characters than the longest tokens
    stand for, as many as the context holds, or of far more tokens than that, counted part by part:
    cuts between parts make a few more of them, so twice the context is not too much."""
    if len(text) <= PART:
        return
    most = context * max(map(len, tokenizer.get_vocab()))
    if len(text) > most:
        raise ContextError(
            f"the prompt has {len(text):,} characters and the context holds {context:,} tokens, "
            f"at most {most:,} characters: {REMEDY}"
        )
    limit = max(2 * context, MANY)
    count = 0
    for start in range(0, len(text), PART):
        part = text[start : start + PART]
        count += len(tokenizer(part, add_special_tokens=False)["input_ids"])
        if count > limit:
            raise ContextError(
                f"the prompt has more than {limit:,} tokens and the context holds {context:,}: "
                f"{REMEDY}"
            )
