"""NativeTexts: several texts side by side, of each of which a pass reads the next token."""

import torch
from torch import Tensor

from medusa_chat.decoding.backends.native import structs
from medusa_chat.decoding.backends.native.decoder import NativeDecoder, Passes
from medusa_chat.decoding.kv_cache import KVCache


class NativeTexts:
    """Keys and values of `slots` texts of up to `capacity` tokens each, and passes over them.

    A text's row has the bits that it has in a pass alone, whatever texts are beside it. native: the
    decoder of one text, whose weights these passes read.
    """

    def __init__(self, native: NativeDecoder, slots: int, capacity: int) -> None:
        """capacity: at most the decoder's own."""
        decoder = native.structure
        shape = slots, decoder.kv_heads, capacity, decoder.head_dim
        # not zeros: memory is taken where a text writes, not for all that it might
        dtype = torch.bfloat16 if decoder.is_half else torch.float32
        self._kv = torch.empty(2 * decoder.count, *shape, dtype=dtype)
        self._layers = (structs.Layer * decoder.count)(*decoder.layers[: decoder.count])
        for layer, keys, values in zip(self._layers, self._kv[::2], self._kv[1::2], strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        fields = {name: getattr(decoder, name) for name, *_ in decoder._fields_}
        fields |= {"capacity": capacity, "layers": self._layers}
        self._passes = Passes(structs.Decoder(**fields), native.threads)

    @staticmethod
    def bytes_of(native: NativeDecoder, capacity: int) -> int:
        """Memory of one text of `capacity` tokens."""
        decoder = native.structure
        numbers = 2 * decoder.count * decoder.kv_heads * capacity * decoder.head_dim
        return int(numbers * (2 if decoder.is_half else 4))

    def put(self, slot: int, cache: KVCache) -> None:
        """Copy the cache's text to a slot. Its keys and values have one shape in all layers."""
        (rows,) = cache.rows(0, cache.length)
        self._kv[:, slot, :, : cache.length] = rows[:, 0]

    def run(self, tokens: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """tokens, places and slots int64 [n] -> float32 [n, d] after the final norm: of each slot
        the token behind the first `place` ones of its text. No slot may come twice. Raises
        IndexError for a token or a place out of range."""
        job = self._passes.job
        job.texts = slots.data_ptr()
        places = places.contiguous()
        return self._passes.run(tokens, places.data_ptr(), int(places.max()) + 1)
