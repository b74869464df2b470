"""Penalties: lower logits for tokens that the text already has, at each node for its own text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.draft import Draft
from medusa_chat.decoding.settings import GenerationSettings


class Penalties:
    """The penalties of one answer, and the tokens that its text has so far.

    A repetition penalty (Keskar et al., arXiv 1909.05858, section 4.1) is for tokens of the prompt
    and the answer, as transformers applies it; presence and frequency penalties are for those of
    the answer alone, as OpenAI's API defines them. They come before the temperature.
    """

    def __init__(self, settings: GenerationSettings, prompt: Sequence[int]) -> None:
        self._settings = settings
        self._counts: dict[int, int] = dict.fromkeys(prompt, 0)  # in the answer

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens that the answer has now."""
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, logits: Tensor, draft: Draft) -> None:
        """Change logits [n, V] of any floating dtype in place: at each node for the text so far,
        which ends with the root, and the nodes on its path.

        Each number is computed by itself, so that a row is the same in any tree.
        """
        settings, counts = self._settings, self._counts
        drafted = draft.tokens.tolist()
        tokens = list(dict.fromkeys((*counts, *drafted[1:])))
        places = {token: place for place, token in enumerate(tokens)}
        columns = torch.tensor([places[token] for token in drafted[1:]], dtype=torch.long)
        on_path = draft.tensors.others[:, 1:].logical_not().cpu().float()
        added = torch.zeros(len(drafted), len(tokens)).index_add_(1, columns, on_path)
        before = torch.tensor([counts.get(token, -1) for token in tokens])
        in_answer = (before.clamp(min=0) + added).to(logits.device)
        is_seen = ((before >= 0) | (added > 0)).to(logits.device)
        at = torch.tensor(tokens, device=logits.device)
        values = logits[:, at].float()
        factor = settings.repetition_penalty
        repeated = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(is_seen, repeated, values)
        values -= settings.frequency_penalty * in_answer
        values -= settings.presence_penalty * (in_answer > 0)
        logits[:, at] = values.to(logits.dtype)
