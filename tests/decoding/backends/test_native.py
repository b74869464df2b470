"""The C decoder against torch's operators, and its promise: a row has the bits it has alone."""

import os
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from support.children import load_demo
from support.engines import TREES, decode, drafters_of, engine_of, on, tokens
from support.families import BY_LENGTH, CONTEXT, VOCABULARY, tiny
from support.native_engines import lay_out, made_native, native_engine

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_step import NativeHeads, NativeTexts
from medusa_chat.decoding.backends.native_weights import (
    FLOATS,
    UNCHANGED,
    UPPERS,
    NativeLinear,
    Quantised,
    convert_parameters,
)
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError

NATIVE = (
    *("llama", "mistral", "mistral-window", "qwen2", "qwen2-mixed", "phi3", "phi3-part", "qwen3"),
    *("gemma", "gemma2", "gemma3", "ministral3", "smollm3", "smollm3-window", "granite"),
    *("qwen3-moe", "mixtral", "granite-moe", "gpt-oss", "gemma4-small", "gemma4-large"),
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("outs", "ins", "has_bias"), [(40, 24, True), (1003, 19, False), (8, 8, True), (83, 96, True)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_has_the_same_bits_whatever_the_rows(library, outs, ins, has_bias, threads, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(ins, outs, has_bias).requires_grad_(False).to(dtype)
    ours = NativeLinear(linear, NativeLibrary(library, threads))
    alone = NativeLinear(linear, NativeLibrary(library, 1))
    x = torch.randn(33, ins)
    whole = ours(x)
    bias = None if linear.bias is None else linear.bias.float()
    expected = torch.nn.functional.linear(x.to(dtype).float(), linear.weight.float(), bias)
    assert torch.allclose(whole, expected, atol=1e-5)
    for rows in range(1, 12):
        assert torch.equal(ours(x[:rows]), whole[:rows])
        assert torch.equal(alone(x[20 : 20 + rows]), whole[20 : 20 + rows])
    assert ours(x[None, :3]).shape == (1, 3, outs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outs", "ins"), [(40, 24), (1003, 18), (83, 96)])
def test_fp32_weights_that_bf16_holds_take_half_the_memory_and_change_no_bit(
    library, outs, ins, threads
):
    """The same weights beside one that bf16 does not hold, which keeps them all in fp32."""
    torch.manual_seed(0)
    short = torch.nn.Linear(ins, outs).requires_grad_(False)
    short.weight.copy_(short.weight.bfloat16())
    whole = torch.nn.Linear(ins, outs + 1).requires_grad_(False)
    whole.weight[:outs], whole.bias[:outs] = short.weight, short.bias
    whole.weight[outs] = 1.0 + 2.0**-20
    made = [NativeLinear(one, NativeLibrary(library, threads)) for one in (short, whole)]
    assert [one.weights.kind for one in made] == [UPPERS, FLOATS]
    assert made[0].panels.nbytes < 0.6 * made[1].panels.nbytes
    x = torch.randn(33, ins)
    for rows in range(1, 12):
        found, expected = (one(x[:rows]) for one in made)
        assert torch.equal(found, expected[:, :outs])


def test_what_is_multiplied_with_bf16_is_rounded_as_torch_rounds(library):
    """To the nearest, ties to even; what is infinite or no number stays that."""
    linear = torch.nn.Linear(8, 8, False).requires_grad_(False).bfloat16()
    linear.weight.copy_(torch.eye(8))
    ours = NativeLinear(linear, NativeLibrary(library, 1))
    ties = torch.tensor([[1.00390625, 1.01171875, -1.00390625, 3.1415927, 1e30, -2e-30, 0.0, 7.0]])
    assert torch.equal(ours(ties), ties.bfloat16().float())
    for odd in (float("inf"), -float("inf"), float("nan")):
        x = torch.zeros(1, 8)
        x[0, 3] = odd
        assert not ours(x).isfinite().all()


@pytest.mark.parametrize("family", NATIVE)
def test_it_decodes_to_what_torch_decodes_to(family, library):
    """By three threads; that one gives the same bits is tested below."""
    engine, twin = native_engine(family, library, 3), engine_of(tiny(family))
    assert check_steps(engine.backbone) < 1e-4
    for temperature in (0.0, 0.8):
        plain = tokens(engine, temperature=temperature)
        assert plain == tokens(twin, temperature=temperature)
        for tree in TREES.values():
            for drafter in drafters_of(engine, plain, tree, temperature):
                assert tokens(engine, drafter=drafter, temperature=temperature) == plain


@pytest.mark.parametrize("context", [16, CONTEXT])
@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        *(("llama", kind, {}) for kind in BY_LENGTH),
        ("phi3", "longrope", {}),
        ("phi3", "longrope", {"partial_rotary_factor": 0.5, "hidden_size": 64}),
    ],
)
def test_rope_that_follows_the_length_decodes_to_what_torch_decodes_to(
    family, kind, changes, context, library
):
    rope = {"rope_type": kind, "rope_theta": 100.0} | BY_LENGTH[kind]
    sizes = {"max_position_embeddings": 16} | changes
    model = tiny(family, rope_parameters=rope, **sizes)
    twin = engine_of(deepcopy(model), context=context)
    lay_out(model, library)
    engine = made_native(engine_of(model, context=context), library)
    settings = {"max_new_tokens": 60, "temperature": 0.8}
    assert tokens(engine, **settings) == tokens(twin, **settings)


@pytest.mark.parametrize("keep", [UNCHANGED, Quantised(8), Quantised(4)])
def test_a_matrix_of_zeros_is_multiplied_like_any_other(keep, library, caplog):
    """Some checkpoints have them: layers that were added for training, heads that were cut."""
    model = tiny("llama", hidden_size=64, intermediate_size=64)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    convert_parameters(model, torch.bfloat16)
    lay_out(model, library, keep)
    engine = made_native(engine_of(model), library)
    assert not caplog.records
    down = engine.backbone.model.model.layers[0].down
    assert (down.panels.dtype == torch.uint8) == isinstance(keep, Quantised)
    assert check_steps(engine.backbone) < 0.05


@pytest.mark.parametrize("family", NATIVE)
def test_in_bf16_every_drafter_gives_plain_tokens(family, library):
    engine = native_engine(family, library, 2, torch.bfloat16)
    check_steps(engine.backbone)
    for temperature in (0.0, 0.8):
        plain = tokens(engine, temperature=temperature)
        for tree in TREES.values():
            for drafter in drafters_of(engine, plain, tree, temperature):
                assert tokens(engine, drafter=drafter, temperature=temperature) == plain


def test_the_first_step_beyond_the_window_does_not_see_the_first_token(library):
    engine, twin = native_engine("mistral-window", library), engine_of(tiny("mistral-window"))
    ids = torch.arange(40) * 7 % VOCABULARY
    draft = Draft(torch.tensor([5]), TreeTensors.of(ROOT, torch.device("cpu")))
    for length in range(2, 40):
        logits = []
        for one in (engine, twin):
            one.forget()
            with torch.inference_mode():
                one.backbone.run_chunk(ids[:length])
                logits.append(one.backend.run(draft)[1])
        assert torch.allclose(*logits, atol=1e-4), length


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("length", [40, 300])
def test_in_bf16_it_is_nearer_to_fp32_than_torchs_operators(family, length, library):
    ids, found = torch.arange(length) * 7 % VOCABULARY, []
    sizes = {"max_position_embeddings": 320, "head_dim": 32}
    for engine in (
        engine_of(tiny(family, **sizes).bfloat16().float(), context=320),
        engine_of(tiny(family, **sizes).bfloat16(), context=320),
        native_engine(family, library, 1, torch.bfloat16, context=320, head_dim=32),
    ):
        with torch.inference_mode():
            found.append(engine.backbone.run_chunk(ids).float())
    exact_ones, torchs, ours = found  # by row: near a tie one may go to another expert
    off = [(one - exact_ones).norm(dim=1).median() for one in (ours, torchs)]
    assert off[0] < off[1] < 0.1 * exact_ones.norm(dim=1).median()


WIDE = {"head_dim": 32, "intermediate_size": 64}  # heads that AMX tiles take
MANY_GROUPS = {
    "hidden_size": 288,
    "num_attention_heads": 36,
    "num_key_value_heads": 2,
}  # a key head's queries are more than a block


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in NATIVE), ("llama", WIDE), ("qwen2", {"intermediate_size": 13})],
)
def test_a_row_of_a_tree_has_the_bits_of_the_row_alone(family, changes, dtype, library):
    """Behind texts of several lengths, for every path, by one thread, by two and by three."""
    rows_have_their_bits(family, (1, 7, 16, 40), library, dtype, **changes)


@pytest.mark.parametrize("changes", [{"head_dim": 64}, {"head_dim": 96}, {"head_dim": 160}])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_row_behind_a_long_text_has_the_bits_of_the_row_alone(family, changes, library):
    """In bf16, where AMX tiles add groups of 32 keys: rows of a tree on both sides of a group's
    end, for which the tree stands 64 tokens behind it."""
    lengths = (62, 63, 92, 95, 96, 125, 127, 160, 253)
    rows_have_their_bits(family, lengths, library, torch.bfloat16, context=320, **changes)


def rows_have_their_bits(family, lengths, library, dtype, **changes):
    """Rows of a tree behind texts of these lengths have the bits that they have alone."""
    backbone = native_engine(family, library, 1, dtype, **changes).backbone
    others = [native_engine(family, library, n, dtype, **changes).backbone for n in (2, 3)]
    tree = Tree.from_choices([(0,), (1,), (0, 0), (2,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 0, 0)])
    tensors = TreeTensors.of(tree, backbone.device)
    ids = torch.arange(len(tree)) * 5 % VOCABULARY
    with torch.inference_mode():
        for length in lengths:
            text = torch.arange(length) * 3 % VOCABULARY
            for one in (backbone, *others):
                one.cache.crop(0)
                one.run_chunk(text)
            logits = backbone.lm_head(backbone.run_tree(ids, tensors))
            for other in others:
                assert torch.equal(logits, other.lm_head(other.run_tree(ids, tensors)))
            for leaf in tree.leaves:
                backbone.cache.crop(length)
                path = list(tree.paths[leaf])
                rows = [backbone.lm_head(backbone.run_chunk(ids[i : i + 1])) for i in path]
                assert torch.equal(torch.cat(rows), logits[path])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {}), ("gemma3", {}), ("llama", WIDE), ("llama", MANY_GROUPS)],
)
def test_a_row_among_other_texts_has_the_bits_of_the_row_alone(family, changes, dtype, library):
    """Texts of several lengths in slots of any order, by one thread, by two and by three."""
    lengths, slots = [1, 7, 130, 40], [2, 0, 4, 1]
    alone = native_engine(family, library, 1, dtype, context=160, **changes)
    others = [native_engine(family, library, n, dtype, context=160, **changes) for n in (1, 2, 3)]
    rooms = [NativeTexts(other.backend.decoder, 5, 144) for other in others]
    texts = [torch.arange(n) * (3 + n) % VOCABULARY for n in lengths]
    new = torch.arange(12).view(3, 4) * 5 % VOCABULARY  # [steps, texts]
    expected = torch.empty(3, len(lengths), alone.backbone.config.hidden_size)
    with torch.inference_mode():
        for row, text in enumerate(texts):
            for room, other in zip(rooms, others, strict=True):
                other.backbone.cache.crop(0)
                other.backbone.run_chunk(text)
                room.put(slots[row], other.backbone.cache)
            alone.backbone.cache.crop(0)
            alone.backbone.run_chunk(text)
            for step in range(3):
                expected[step, row] = alone.backbone.run_chunk(new[step, row : row + 1])[0]
        for room in rooms:
            for step in range(3):
                places = torch.tensor(lengths) + step
                assert torch.equal(room.run(new[step], places, torch.tensor(slots)), expected[step])


def test_a_token_or_place_outside_is_refused_of_any_text(library):
    room = NativeTexts(native_engine("llama", library).backend.decoder, 2, 16)
    slots, fine = torch.tensor([0, 1]), torch.tensor([0, 0])
    for wrong in (-1, VOCABULARY):
        with pytest.raises(IndexError):
            room.run(torch.tensor([0, wrong]), fine, slots)
    for wrong in (-1, 16):
        with pytest.raises(IndexError):
            room.run(fine, torch.tensor([0, wrong]), slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_read_in_pieces_leaves_the_same_bits(library, dtype):
    backbone = native_engine("llama", library, 1, dtype, context=256, head_dim=32).backbone
    text = torch.arange(230) * 7 % VOCABULARY
    with torch.inference_mode():
        whole = backbone.run_chunk(text)
        backbone.cache.crop(0)
        pieces = [backbone.run_chunk(part) for part in text.split([9, 1, 117, 3, 1, 99])]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("size", [32, 40])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_heads_give_what_torch_gives(library, layers, has_root, dtype, limit, size):
    torch.manual_seed(5)
    heads = MedusaHeads(4, size, layers, dtype=dtype, has_root=has_root).requires_grad_(False)
    if has_root:
        torch.nn.init.normal_(heads.root_weight, std=0.3)
    embedding, roots = torch.nn.Embedding(9, size, dtype=dtype), torch.tensor([4])
    heads.read_roots(embedding.requires_grad_(False))
    torch.nn.init.normal_(heads.weight, std=0.3)
    torch.nn.init.normal_(heads.bias)
    threads = NativeLibrary(library, 2)
    twin = NativeHeads(heads, threads)
    hidden = torch.randn(1, size)
    root = heads.embed(roots) if has_root else None
    for count in (1, 4):
        expected = heads.hidden_states(hidden, roots, count).float()
        difference = (twin.hidden_states(hidden, root, count) - expected).abs().max()
        assert difference < limit * expected.abs().max()


def guesses_of(library, row, count):
    """The best of a row of logits by C: of a head without layers, whose LM head changes nothing."""
    size, width = len(row), -(-len(row) // 16) * 16
    linear = torch.nn.Linear(width, size, bias=False).requires_grad_(False)
    torch.nn.init.eye_(linear.weight)
    heads = MedusaHeads(1, width, 0).requires_grad_(False)
    assert heads.shorten(range(size), LogitHead(linear, SimpleNamespace()))
    twin = NativeHeads(heads, NativeLibrary(library, 1))
    hidden = torch.nn.functional.pad(row, (0, width - size))[None]
    return [found[0] for found in twin.guesses(hidden, None, 1, count)]


def test_the_best_guesses_are_torchs_in_any_order_and_number(library):
    """Rising and falling logits, ties, and sizes beyond whole vectors."""
    for size in (7, 32, 33, 100, 1003):
        rising = torch.arange(size).float()
        for row in (rising, -rising, torch.randn(size), torch.zeros(size)):
            for count in (1, 5, min(40, size)):
                values, places, total = guesses_of(library, row, count)
                assert torch.equal(values, row.topk(count).values)
                assert torch.equal(row[places], values) and len(set(places.tolist())) == count
                assert torch.allclose(total, row.logsumexp(-1), atol=1e-5)
    row = torch.randn(1003)
    row[3] = row[700] = 9.0
    assert guesses_of(library, row, 10)[1].tolist()[:2] == [3, 700]


def test_weights_that_were_laid_out_anew_are_not_kept_as_they_were(library):
    engine = native_engine("llama", library, tie_word_embeddings=True)
    names = [name for name, _ in engine.backbone.model.named_parameters()]
    assert names and all("norm" in name or "embed_tokens" in name for name in names)


def test_invalid_numbers_end_the_answer(library):
    engine = native_engine("llama", library)
    engine.backbone.decoder._kept[-1].fill_(float("nan"))
    last = decode(engine)[-1]
    assert last.reason == "error" and "invalid numbers" in last.message


def test_fp16_and_a_mixture_of_numbers_are_not_its():
    assert not native_step.can_run(tiny("llama").half())
    mixed = tiny("llama").bfloat16()
    mixed.lm_head.float()
    assert not native_step.can_run(mixed)


def test_wrong_numbers_leave_torchs_operators(library, monkeypatch, caplog):
    model = tiny("llama")
    lay_out(model, library)
    engine = engine_of(model)
    threads = NativeLibrary(library, 1)
    monkeypatch.setattr(threads.c, "run", lambda job: 0)  # it leaves what memory holds
    assert native_step.attach(engine.backbone, engine.heads, threads) is None
    assert "native backend disabled: its output is off by" in caplog.text
    assert tokens(engine) == tokens(engine_of(tiny("llama")))


def load_with(place, **environment):
    """The demo in a process that has a folder and a cache of its own at `place`."""
    place.joinpath("said").mkdir(exist_ok=True)
    own = {"MEDUSA_CHAT_DATA_DIR": str(place), "MEDUSA_CHAT_NATIVE": ""}
    return load_demo(place / "said", **own | environment)


def test_the_demo_is_decoded_by_it_and_the_library_kept(library, tmp_path):
    """Its compiler has compiled it before: that takes ten seconds of a processor."""
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo 1; exit; fi\n'
        f'while [ "$1" != -o ]; do shift; done; cp {shlex.quote(library._name)} "$2"\n'
    )
    script.chmod(0o700)
    assert "each step runs by the pass in C" in load_with(tmp_path, CC=str(script)).stdout
    (file,) = (tmp_path / "cache" / "native").iterdir()
    before = file.stat().st_mtime_ns
    assert "each step runs by the pass in C" in load_with(tmp_path, CC=str(script)).stdout
    assert file.stat().st_mtime_ns == before


def test_what_a_killed_compiler_left_is_cleared_away(library, tmp_path, monkeypatch):
    monkeypatch.setenv(native_build.PLACE, str(tmp_path))
    old, young = tmp_path / "tmpold.tmp", tmp_path / "tmpnew.tmp"
    for file in (old, young):
        file.touch()
    os.utime(old, (0, 0))
    made = library._name  # a compiler takes seconds
    monkeypatch.setattr(native_build, "_compile", lambda _, file: shutil.copy(made, file))
    assert native_build.opened.__wrapped__(native_build.compiler()) is not None
    assert not old.exists() and young.exists(), "the young one may still be written"


def test_its_folder_is_the_cache_or_a_whole_path(library, tmp_path, monkeypatch):
    """A switch or a word is never taken for the name of a folder here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native_build.paths, "cache_dir", lambda: tmp_path / "cache")
    for place, folder in (("", "cache/native"), ("1", "cache/native"), (str(tmp_path / "a"), "a")):
        monkeypatch.setenv(native_build.PLACE, place)
        assert native_build._folder() == tmp_path / folder
    for place in ("true", "on", "./native"):
        monkeypatch.setenv(native_build.PLACE, place)
        with pytest.raises(UsageError, match=f"{native_build.PLACE} is '{place}': give 0, 1 or"):
            native_build.opened.__wrapped__(native_build.compiler())
    assert not list(tmp_path.iterdir())


def test_the_library_follows_from_every_file(library, tmp_path, monkeypatch):
    """A changed header is a library of another name."""
    command = native_build.compiler()
    name = native_build._name(command)
    for file in native_build.SOURCES.glob("*.[ch]"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)
    assert native_build._name(command) == name
    assert native_build._name([*command, "-O0"]) != name
    with (tmp_path / "vectors.h").open("a") as header:
        header.write("/* changed */")
    assert native_build._name(command) != name


@pytest.mark.parametrize(
    ("family", "changes", "is_reached"),
    [
        *((family, {}, True) for family in NATIVE),
        *(("olmo2", {}, False), ("cohere", {}, False), ("gemma3", {"head_dim": 12}, False)),
        ("gemma3", {"hidden_activation": "gelu"}, False),
        ("llama", {"hidden_size": 36, "head_dim": 8}, False),
        ("llama", {"hidden_act": "gelu"}, False),
    ],
)
def test_the_estimate_and_the_model_agree_on_what_c_decodes(family, changes, is_reached):
    model = tiny(family, **changes)
    assert native_step.can_run(model) == sizes(model.config.to_dict()).is_reached == is_reached


@pytest.mark.parametrize("variables", [{"MEDUSA_CHAT_NATIVE": "0"}, {"CC": "no-such-compiler"}])
def test_without_a_compiler_torch_does_it(variables, tmp_path):
    done = load_with(tmp_path, **variables)
    assert "the pass in C" not in done.stdout and "Traceback" not in done.stderr
    assert "with a C compiler several times faster (pip install ziglang, or" in done.stdout


def test_a_compiler_that_fails_is_told_once_and_torch_does_it(tmp_path):
    done = load_with(tmp_path, CC=shutil.which("false") or "false")
    assert "the pass in C" not in done.stdout
    assert done.stderr.count("the C library cannot be used") == 1
    assert not list((tmp_path / "cache" / "native").iterdir())


def test_two_answers_at_once_and_a_fork_do_not_wait_for_each_other(library):
    """The threads have one job at a time; who comes meanwhile, or after a fork, works alone."""
    import threading

    linear = torch.nn.Linear(64, 256).requires_grad_(False)
    ours = NativeLinear(linear, NativeLibrary(library, 3))
    x = torch.randn(40, 64)
    expected = ours(x)
    wrong = []

    def work() -> None:
        for _ in range(300):
            if not torch.equal(ours(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    busy = threading.Thread(target=work)
    busy.start()
    for _ in range(8):  # into the midst of the other thread's job
        child = os.fork()
        if child == 0:
            os._exit(0 if all(torch.equal(ours(x), expected) for _ in range(20)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    busy.join(60)
    assert not wrong


def test_what_lies_outside_is_refused_as_torch_refuses_it(library):
    backbone = native_engine("llama", library).backbone
    with torch.inference_mode(), pytest.raises(IndexError):
        backbone.run_chunk(torch.tensor([3, VOCABULARY]))
    with torch.inference_mode(), pytest.raises(IndexError):
        backbone.run_chunk(torch.tensor([-1]))
    backbone.cache.length = backbone.cache.capacity - 1
    with torch.inference_mode(), pytest.raises(IndexError):
        backbone.run_chunk(torch.tensor([3, 3]))


def steps_of(engine, tree, drafter, **settings):
    """(path, tokens, record) of every step of an answer."""
    asked = GenerationSettings(drafter=drafter, seed=0, nodes=len(tree))
    events = decode(engine, drafter=engine.drafter(asked, tree), **settings)
    return [(e.path, e.token_ids, e.draft) for e in events if isinstance(e, Step)]


@pytest.mark.parametrize(("threads", "dtype"), [(1, DTYPES[0]), (3, DTYPES[0]), (2, DTYPES[1])])
@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "none"},
        {"drafter": "medusa"},
        {"drafter": "prompt-lookup"},
        {"drafter": "medusa", "temperature": 0.8},
        {"drafter": "medusa", "temperature": 0.8, "acceptance": "typical"},
    ],
)
def test_a_step_in_c_is_what_torch_makes_of_the_same_decoder(library, settings, threads, dtype):
    engine = native_engine("llama", library, threads, dtype)
    tree = Tree.from_choices([(0,), (1,), (0, 0), (2,), (0, 0, 0), (0, 1), (1, 0)])
    whole = steps_of(engine, tree, **settings)
    assert len(whole) > 3
    engine.forget()
    engine = on(engine, TorchStep(engine.backbone))
    for ours, theirs in zip(whole, steps_of(engine, tree, **settings), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2].tokens == theirs[2].tokens and ours[2].sampled == theirs[2].sampled
        for name in ("probabilities", "entropies", "thresholds", "draft_probabilities"):
            for a, b in zip(getattr(ours[2], name), getattr(theirs[2], name), strict=True):
                assert a == pytest.approx(b, abs=1e-5), name


def test_a_team_whose_cores_are_taken_computes_the_same(library):
    """Where a thread waits for one that is not running, the caller goes on alone."""
    engine = native_engine("llama", library, 2)
    quiet = tokens(engine, temperature=0.8)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for _ in range(5):
            engine.forget()
            assert tokens(engine, temperature=0.8) == quiet
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("threads", [2, 3])
def test_a_long_text_is_mixed_in_stretches_to_the_same_bits(library, threads):
    """Values of so many dimensions leave the near cache, so that all pairs have some of the text
    before they have the rest: sums go on as they would have, in a tree too. By two threads, of
    which each has a key head, and by three, which share the keys and the dimensions of both."""
    model = tiny("llama", head_dim=256, max_position_embeddings=400)
    engine = engine_of(model, context=300)
    ids = torch.arange(280) * 11 % VOCABULARY
    expected = engine.backbone.run_chunk(ids)
    lay_out(model, library)
    engine = engine_of(model, context=300)
    engine = made_native(engine, library, threads)
    found = []
    for count in (280, 1, 5):
        engine.backbone.cache.crop(0)
        found.append(torch.cat([engine.backbone.run_chunk(part) for part in ids.split(count)]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0] - expected).abs().max() < 1e-4 * expected.abs().max()
