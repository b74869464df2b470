"""Products with NF4 weights: the torch twin against bitsandbytes, and the kernel against its twin
where Triton is there (in its interpreter, so that no GPU is needed)."""

import pytest
import torch
from support.bad_kernels import assert_bad_kernels_are_refused
from support.linear4 import linear4, quantised_model, weights_of

from medusa_chat.decoding.backends import nf4
from medusa_chat.decoding.backends.linear4 import absmax
from medusa_chat.decoding.backends.nf4_tiles import decoder
from medusa_chat.decoding.backends.replacements import replace_submodules

SIZES = [(64, 128), (96, 320), (200, 64), (320, 1088)]  # outputs, inputs; some no whole tiles


def test_the_layout_is_what_its_docstring_says():
    linear = linear4(96, 320)
    tiles, weights = nf4.tiles_of(linear), linear.weight.data.flatten()
    n, k = torch.meshgrid(torch.arange(96), torch.arange(320), indexing="ij")
    place = n * 320 + k
    wanted = torch.where(k % 2 == 0, weights[place // 2] >> 4, weights[place // 2] & 15)
    found = tiles.codes[n // 64, k // 128, n % 64, k % 64]
    assert torch.equal(torch.where(k % 128 >= 64, found >> 4, found & 15), wanted)
    scales = absmax(linear.weight.quant_state)[place // 64]
    assert torch.equal(tiles.scales[n // 64, k // 128, k % 128 // 64, n % 64], scales)
    assert tiles.codes.is_contiguous() and tiles.scales.is_contiguous()
    assert not tiles.scales[1, :, :, 32:].any() and not tiles.scales[:, 2, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [1, 8])
def test_the_twin_multiplies_by_what_bitsandbytes_dequantises(seed, dtype):
    for outputs, inputs in SIZES:
        linear = linear4(outputs, inputs, seed=seed, dtype=dtype)
        state = linear.weight.quant_state
        assert torch.equal(state.code, torch.tensor(nf4.TABLE))
        found = nf4.decoded(linear.weight.data, absmax(state), outputs, inputs)
        assert torch.equal(found.to(dtype), weights_of(linear))  # to the last bit


def test_the_kernel_is_for_1_to_64_rows():
    buckets = {rows: nf4.bucket_of(rows) for rows in (1, 2, 16, 17, 32, 33, 64, 65)}
    assert list(buckets.values()) == [1, 16, 16, 32, 32, 64, 64, None]


def test_by_default_no_model_has_the_kernel_and_without_one_none_gets_it(folder):
    model = quantised_model(folder["llama"])
    replace_submodules(model)
    assert not any(isinstance(module, nf4.Nf4Linear) for module in model.modules())
    notes = nf4.replace_where_faster(
        model, lambda call: pytest.fail("timed what cannot run"), 2**40
    )
    assert notes == ["no kernel of ours for 4-bit products here"]
    assert not any(isinstance(module, nf4.Nf4Linear) for module in model.modules())


def quantised_and_merged(folder):
    model = quantised_model(folder["llama"])
    replace_submodules(model)
    return model


def bytes_of_tiles(place):
    tiles = nf4.tiles_of(place[2])
    return tiles.codes.nbytes + tiles.scales.nbytes


def test_it_is_adopted_where_it_measures_faster_and_nowhere_else(folder, monkeypatch):
    model = quantised_model(folder["llama"])
    replace_submodules(model)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted, calls = model(ids).logits, []

    def own(self, hidden):
        calls.append(hidden.shape[-2])
        x = hidden.flatten(0, -2)
        out = x @ weights_of(self.stock).to(x.dtype).T
        return out.unflatten(0, hidden.shape[:-1])

    def timer(call):  # as if ours were faster at 32 rows only
        before = len(calls)
        call()
        return 0.5 if calls[before:] == [32] else 0.7 if len(calls) > before else 0.6

    monkeypatch.setattr(nf4, "has_kernel", lambda *device: True)
    monkeypatch.setattr(nf4.Nf4Linear, "own", own)
    held = sum(map(bytes_of_tiles, nf4._linears(model)))
    assert nf4.replace_where_faster(model, timer, 0) == []
    most = max(bytes_of_tiles(one) for one in nf4._linears(model))
    assert len(nf4.replace_where_faster(quantised_and_merged(folder), timer, 2 * most)) in (1, 2, 3)
    notes = nf4.replace_where_faster(model, timer, held)
    layer = model.model.layers[1]
    assert {type(p) for p in (layer.qkv, layer.out, layer.gate_up, layer.down)} == {nf4.Nf4Linear}
    assert layer.qkv.buckets == {32} and len(notes) == 4 and all(": 32" in n for n in notes)
    calls.clear()
    model.set_attn_implementation("medusa_tree")
    assert torch.allclose(model(ids).logits, wanted, atol=2e-4)
    assert calls == [20] * 8  # four products of each of two layers
    model(ids[:, :4])
    assert len(calls) == 8


def test_a_kernel_that_fails_or_is_wrong_is_said_once_and_not_used(monkeypatch, caplog):
    assert_bad_kernels_are_refused(nf4, monkeypatch, caplog)


def prmt(a, b, selector):
    """PTX's byte permutation (PTX ISA, prmt, default mode)."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picks = [(selector >> 4 * i) & 15 for i in range(4)]
    chosen = [pool[p & 7] if p < 8 else 255 * (pool[p & 7] >> 7) for p in picks]
    return int.from_bytes(bytes(chosen), "little")


def executed(text, word):
    """What the assembler leaves in $0 to $3 for four bytes in $4."""
    steps = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "shr": lambda a, b: a >> b,
        "prmt": prmt,
    }
    held = {"$4": word}
    for line in text.splitlines()[2:-1]:
        name, _, rest = line.rstrip(";").partition(" ")
        target, *sources = rest.split(", ")
        values = [held[s] if s in held else int(s, 0) for s in sources]
        held[target] = steps[name.partition(".")[0]](*values)
    return [held[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_assembler_decodes_every_byte(dtype):
    text, table = decoder(dtype), torch.tensor(nf4.TABLE).to(dtype)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, 256, 4):
        four = order[start : start + 4]
        out = executed(text, int.from_bytes(bytes(four), "little"))
        data = b"".join(word.to_bytes(4, "little") for word in out)
        numbers = torch.frombuffer(bytearray(data), dtype=dtype)
        wanted = [table[b & 15] for b in four] + [table[b >> 4] for b in four]
        assert torch.equal(numbers, torch.stack(wanted)), four
