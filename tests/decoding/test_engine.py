"""The engine's invariants, on tiny random models in fp32."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.engines import NEW, PROMPT, TREES, Oracle, decode, drafters_of, engine_of, tokens
from support.families import BY_LENGTH, COMMON, CONTEXT, FAMILIES, SLOW, VOCABULARY, tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Finished, Prefilled
from medusa_chat.decoding.families import TEXTLESS, refuse_unfit, windows
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, ModelError, UsageError
from medusa_chat.runtime.traces import from_json, to_json
from medusa_chat.trees.shapes import cartesian, chain

IMPLEMENTATIONS = ("medusa_tree", "eager")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_gives_plain_tokens(family, implementation):
    """Each family and implementation meets every tree and every drafter, greedy and sampled; every
    pair of a tree and a drafter is met by a family whose layers have windows, and one without.
    The six pairs that the others meet differ from one implementation and temperature to the next.
    """
    engine = engine_of(tiny(family), implementation)
    assert check_steps(engine.backbone) < 1e-4
    is_every_pair = family in ("llama", "qwen2-mixed")
    shift = 2 * IMPLEMENTATIONS.index(implementation)
    for at, temperature in enumerate((0.0, 1.2)):
        plain = tokens(engine, temperature=temperature)
        assert len(set(plain)) > 3
        for row, (name, tree) in enumerate(TREES.items()):
            for column, drafter in enumerate(drafters_of(engine, plain, tree, temperature)):
                if is_every_pair or (row + column + at + shift) % 4 == 0:
                    got = tokens(engine, drafter=drafter, temperature=temperature)
                    assert got == plain, (temperature, name, type(drafter))


@pytest.mark.parametrize("family", FAMILIES | SLOW)
def test_greedy_equals_transformers_generate(family):
    model = tiny(family)
    plain = tokens(engine_of(model))
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    assert plain == expected


@pytest.mark.parametrize("kinds", [None, ["sliding_attention", "full_attention"]])
def test_a_window_that_the_family_has_not_is_ignored_as_transformers_does(kinds):
    plain = tokens(engine_of(tiny("llama")))
    assert tokens(engine_of(tiny("llama", sliding_window=4, layer_types=kinds))) == plain


@pytest.mark.parametrize("context", [16, CONTEXT])
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rope_that_follows_the_length_is_chosen_once(kind, context):
    """A tree reaches over the length at which it changes before a row does, and what the cache
    holds was turned before."""
    rope = {"rope_type": kind, "rope_theta": 100.0} | BY_LENGTH[kind]
    engine = engine_of(
        tiny("llama", rope_parameters=rope, max_position_embeddings=16), context=context
    )
    assert check_steps(engine.backbone) < 1e-4
    settings = {"max_new_tokens": context - len(PROMPT), "temperature": 0.0}
    plain = tokens(engine, **settings)
    assert len(plain) == context - len(PROMPT)
    for tree in (TREES["chain"], TREES["dense"]):
        drafter = Oracle(plain, tree)
        assert tokens(engine, drafter=drafter, **settings) == plain
    whole = engine.backbone.model(torch.tensor([[*PROMPT, *plain]])).logits[0]
    assert whole[len(PROMPT) - 1 : -1].argmax(-1).tolist() == plain


@pytest.mark.parametrize(
    "options",
    [
        *({"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.5}),
        *({"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}),
        *({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}),
        {"repetition_penalty": 1.5, "presence_penalty": -1.0, "top_k": 9},
    ],
)
def test_seeded_sampling_with_filters_and_penalties_equals_plain(options):
    engine = engine_of(tiny("llama"))
    for seed in range(5):
        plain = tokens(engine, temperature=1.2, seed=seed, **options)
        assert plain != tokens(engine, temperature=1.2, seed=seed)
        for drafter in drafters_of(engine, plain, TREES["dense"], 1.2):
            events = decode(engine, drafter=drafter, temperature=1.2, seed=seed, **options)
            assert list(events[-1].token_ids) == plain
        assert events[-1].stats.acceleration_rate > 1.5  # of the oracle, the last


@st.composite
def trees(draw) -> Tree:
    choices, size = [()], draw(st.integers(1, 23))
    for _ in range(size):
        parent = draw(st.sampled_from([c for c in choices if len(c) < 4]))
        ranks = [c[-1] for c in choices if c[:-1] == parent and c]
        choices.append((*parent, max(ranks, default=-1) + 1))
    return Tree.from_choices(choices[1:])


@pytest.fixture(scope="module")
def llama() -> Engine:
    return engine_of(tiny("llama"))


@hypothesis_settings(max_examples=30)
@given(tree=trees(), seed=st.integers(0, 2**63 - 1), hot=st.booleans(), period=st.integers(1, 6))
def test_any_tree_gives_plain_tokens(llama, tree, seed, hot, period):
    temperature = 1.1 if hot else 0.0
    plain = tokens(llama, temperature=temperature, seed=seed, max_new_tokens=16)
    for drafter in (Oracle(plain, tree, period), llama.drafter(medusa(), tree)):
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": 16}
        assert tokens(llama, drafter=drafter, **options) == plain


def medusa(**options) -> GenerationSettings:
    return GenerationSettings(drafter="medusa", **options)


def test_a_right_draft_is_accepted_whole(llama):
    """The oracle's tree holds the answer among wrong siblings: every step but the last, which
    the budget cuts, takes a whole path of it."""
    plain = tokens(llama)
    events = decode(llama, drafter=Oracle(plain, cartesian(2, 2, 2), period=10**6))
    assert list(events[-1].token_ids) == plain
    assert {len(step.path) for step in events[1:-2]} == {4}
    assert {len(step.token_ids) for step in events[1:-2]} == {4}


def test_wrong_drafts_are_never_accepted(llama):
    plain = tokens(llama)
    wrong = [(token + 1) % VOCABULARY for token in plain]
    events = decode(llama, drafter=Oracle(wrong, cartesian(1, 1), period=10**6))
    assert list(events[-1].token_ids) == plain
    assert {step.path for step in events[1:-1]} == {(0,)}


def test_padding_is_never_accepted():
    """Token id 0, the padding of every shorter path, is the argmax everywhere."""
    model = tiny("llama")
    model.lm_head.weight.zero_()  # all logits equal: the lowest index, 0, wins
    engine = engine_of(model)
    ragged = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    events = decode(engine, drafter=Oracle([7] * 60, ragged, period=10**6))
    assert list(events[-1].token_ids) == [0] * NEW
    assert {step.path for step in events[1:-1]} == {(0,)}
    lookup = decode(
        engine, drafter=engine.drafter(GenerationSettings(drafter="prompt-lookup", nodes=12), ROOT)
    )
    assert list(lookup[-1].token_ids) == [0] * NEW


@pytest.mark.parametrize("fault", ["nan", "constant", "adversarial", "infinite"])
def test_bad_heads_never_change_exact_output(fault):
    engine = engine_of(tiny("qwen3"))
    for temperature in (0.0, 1.0):
        plain = tokens(engine, temperature=temperature)
        weight = engine.heads.weight
        if fault == "nan":
            weight.fill_(torch.nan)
        elif fault == "infinite":
            engine.heads.bias.fill_(torch.inf)
        elif fault == "constant":
            weight.zero_()
        else:
            weight.normal_(std=50.0)
        drafter = engine.drafter(medusa(), TREES["dense"])
        assert tokens(engine, drafter=drafter, temperature=temperature) == plain


def test_cache_after_500_steps_equals_a_fresh_prefill(llama):
    steps = 0
    for seed in range(20):
        options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 80}
        plain = tokens(llama, **options)
        drafter = Oracle(plain, TREES["dense"], period=3)
        steps += decode(llama, drafter=drafter, **options)[-1].stats.steps
    assert steps > 500
    length, ids = llama.backbone.cache.length, list(llama._ids)
    assert length == len(ids)
    kept = [block[:, :, :, :length].clone() for block in llama.backbone.cache._blocks]
    fresh = engine_of(tiny("llama"))
    with torch.inference_mode():
        fresh.backbone.run_chunk(torch.tensor(ids))
    for mine, theirs in zip(kept, fresh.backbone.cache._blocks, strict=True):
        assert torch.allclose(mine, theirs[:, :, :, :length], atol=1e-5)


def test_cancel_at_any_step_leaves_the_engine_usable():
    engine = engine_of(tiny("llama"))
    plain = tokens(engine)
    for cut in range(12):
        events = engine.generate(PROMPT, Oracle(plain, TREES["dense"]), greedy())
        list(itertools.islice(events, cut))
        events.close()
        assert engine.backbone.cache.length == len(engine._ids)
        assert tokens(engine, drafter=Oracle(plain, TREES["chain"])) == plain


@pytest.mark.parametrize("count", [0, 3, NEW - 1])
def test_who_asks_to_stop_gets_what_was_said_unless_the_end_had_come(count):
    engine = engine_of(tiny("llama"))
    plain, asked = tokens(engine), iter([*[False] * count, True])
    drafter = engine.drafter(greedy(), ROOT)
    *_, last = engine.generate(PROMPT, drafter, greedy(), should_stop=lambda: next(asked))
    assert last.reason == ("length" if count == NEW - 1 else "cancelled")
    assert list(last.token_ids) == plain[: count + 1] and last.stats.steps == count
    assert tokens(engine) == plain


def greedy() -> GenerationSettings:
    return GenerationSettings(drafter="none", max_new_tokens=NEW)


def test_a_failing_pass_leaves_the_engine_usable(monkeypatch):
    engine = engine_of(tiny("llama"))
    plain = tokens(engine)
    for failing in range(6):
        calls = itertools.count()
        run = engine.backbone._run

        def broken(*arguments, calls=calls, run=run, failing=failing):
            if next(calls) == failing:
                raise torch.OutOfMemoryError("planted")
            return run(*arguments)

        monkeypatch.setattr(engine.backbone, "_run", broken)
        engine._ids = engine._ids[:4]
        with pytest.raises(torch.OutOfMemoryError):
            tokens(engine)
        monkeypatch.setattr(engine.backbone, "_run", run)
        assert tokens(engine) == plain


def test_multi_turn_equals_one_shot():
    kept = engine_of(tiny("mistral-window"))
    text = list(PROMPT)
    for turn in range(3):
        fresh = engine_of(tiny("mistral-window"))
        events = decode(kept, text, max_new_tokens=12, temperature=0.9, seed=turn)
        assert events[0].reused_tokens == (len(text) - 5 if turn else 0)
        answer = list(events[-1].token_ids)
        assert answer == tokens(fresh, text, max_new_tokens=12, temperature=0.9, seed=turn)
        text += [*answer, 3, 4, 6 + turn, 7]


def test_an_edited_turn_reuses_the_part_before_it():
    engine = engine_of(tiny("llama"))
    decode(engine)
    events = decode(engine, [*PROMPT[:6], 40, 41])
    assert events[0].reused_tokens == 6
    assert events[-1].token_ids == tuple(tokens(engine_of(tiny("llama")), [*PROMPT[:6], 40, 41]))


def two_texts(context):
    """An engine of this context, and two texts of 100 tokens that share their first."""
    torch.manual_seed(5)
    texts = torch.randint(3, VOCABULARY - 1, (2, 100))
    texts[:, 0] = 1
    return Engine(TorchStep(Backbone(tiny("llama"), context))), texts.tolist()


def test_two_conversations_that_take_turns_keep_what_was_read_of_them():
    engine, talks = two_texts(1024)
    reused = []
    for turn in range(6):
        text = talks[turn % 2]
        first, *_, last = decode(engine, text, max_new_tokens=12, temperature=0.9, seed=turn)
        reused.append(len(text) - first.reused_tokens)
        alone = two_texts(1024)[0]
        assert list(last.token_ids) == tokens(
            alone, text, max_new_tokens=12, temperature=0.9, seed=turn
        )
        text += [*last.token_ids, 3, 4]
    assert reused[:2] == [100, 99] and all(read <= 4 for read in reused[2:])


def test_a_conversation_that_needs_the_room_takes_it_from_the_one_that_is_set_aside():
    engine, (one, other) = two_texts(768)
    decode(engine, one, max_new_tokens=2)
    decode(engine, other, max_new_tokens=2)
    assert engine.backbone.cache.aside == 101
    long = [*other, *range(3, 23)] * 4
    grown = decode(engine, long, max_new_tokens=200)[-1].token_ids
    assert engine.backbone.cache.aside == 0
    assert list(grown) == tokens(two_texts(768)[0], long, max_new_tokens=200)
    first, *_, last = decode(engine, one, max_new_tokens=20)
    assert first.reused_tokens == 1
    assert list(last.token_ids) == tokens(two_texts(768)[0], one, max_new_tokens=20)


def test_nothing_follows_an_end_token():
    model = tiny("llama")
    plain = tokens(engine_of(model))
    for place in (0, 1, 4, 9):
        end = plain[place]
        first = plain.index(end)
        engine = engine_of(model, eos=[end, 47 if 47 not in plain else end])
        for drafter in drafters_of(engine, plain, TREES["dense"], 0.0):
            events = decode(engine, drafter=drafter)
            assert events[-1].reason == "eos" and list(events[-1].token_ids) == plain[:first]
            shown = [t for event in events[:-1] for t in event.token_ids]
            assert shown == plain[:first]
            if first:
                last = events[-2]
                assert len(last.path) - len(last.token_ids) in (1, 2)  # 2: the end was drafted


def test_an_end_token_counts_as_emitted():
    model = tiny("llama")
    plain = tokens(engine_of(model))
    end = next(t for i, t in enumerate(plain) if i > 3 and t not in plain[:i])
    stats = decode(engine_of(model, eos=[end]))[-1].stats
    assert stats.acceleration_rate == 1.0 and stats.steps == stats.new_tokens


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_the_budget_is_in_tokens(llama, budget):
    plain = tokens(llama)
    events = decode(llama, drafter=Oracle(plain, TREES["dense"]), max_new_tokens=budget)
    assert list(events[-1].token_ids) == plain[:budget] and events[-1].reason == "length"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
def test_the_context_is_filled_and_never_overrun(family):
    model = tiny(family)
    for length in (20, 25, 30, 31):
        engine = engine_of(model, context=32)
        prompt = [(3 * i) % VOCABULARY for i in range(length)]
        plain = decode(engine, prompt, max_new_tokens=100)
        assert plain[-1].reason == "context"
        assert len(plain[-1].token_ids) == 32 - length
        for drafter in drafters_of(engine, list(plain[-1].token_ids), TREES["dense"], 0.0):
            drafted = decode(engine, prompt, drafter=drafter, max_new_tokens=100)
            assert drafted[-1].token_ids == plain[-1].token_ids
            assert drafted[-1].reason == "context"


def test_an_answer_that_just_fits_ends_by_its_length():
    engine = engine_of(tiny("llama"), context=32)
    assert decode(engine, [5] * 20, max_new_tokens=12)[-1].reason == "length"


def test_no_draft_goes_beyond_the_last_position():
    engine = engine_of(tiny("gpt2"))  # its positions are a table of CONTEXT rows
    prompt = [(3 * i) % VOCABULARY for i in range(CONTEXT - 6)]
    plain = tokens(engine, prompt, max_new_tokens=100)
    for drafter in drafters_of(engine, plain, TREES["dense"], 0.0):
        assert tokens(engine, prompt, drafter=drafter, max_new_tokens=100) == plain


def test_a_prompt_that_leaves_no_room_is_refused(llama):
    with pytest.raises(ContextError, match=r"96 tokens and the context holds 96"):
        tokens(llama, [5] * CONTEXT)
    with pytest.raises(UsageError, match="empty"):
        tokens(llama, [])


def test_invalid_numbers_end_with_an_error_and_are_not_kept():
    model = tiny("llama")
    engine = engine_of(model)
    plain = tokens(engine)
    weight = model.lm_head.weight.clone()
    model.lm_head.weight.fill_(torch.nan)
    events = decode(engine)
    assert events[-1].reason == "error" and "invalid numbers" in events[-1].message
    model.lm_head.weight.copy_(weight)
    assert tokens(engine) == plain


def test_a_tree_deeper_than_the_heads_is_refused(llama):
    with pytest.raises(UsageError, match="depth 5 and the checkpoint 4 heads"):
        llama.drafter(medusa(), chain(5))


def test_a_checkpoint_without_heads_says_what_to_use():
    engine = Engine(TorchStep(Backbone(tiny("llama"), CONTEXT)))
    with pytest.raises(UsageError, match="prompt-lookup"):
        engine.drafter(medusa(), ROOT)


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError])
def test_what_the_code_of_a_family_raises_is_one_line(kind, monkeypatch):
    def broken(*_, **__):
        raise kind("no such thing\n in this family")

    model = tiny("llama")
    backbone = Backbone(model, CONTEXT)
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", broken)
    for work in (lambda: Backbone(model, CONTEXT), lambda: check_steps(backbone)):
        with pytest.raises(ModelError, match="family llama .* fails: no such thing$"):
            work()


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("Mamba", {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}, "recurrent"),
        ("Bloom", {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "ALiBi"),
        ("Jamba", {"vocab_size": 32}, "recurrent"),
        ("GPTNeo", {"vocab_size": 32}, "local attention"),
        ("Llama4Text", {"vocab_size": 32}, "local attention"),
        ("Llava", {}, "a vision-language model"),
        ("Mllama", {}, "cross attention"),
        ("T5", {}, "an encoder"),
        ("Mistral4", {}, "no language model of it that could be read alone"),
    ],
)
def test_families_that_cannot_work_are_refused_by_name(name, values, why):
    config = getattr(transformers, f"{name}Config")(**values)
    with pytest.raises(ModelError, match=f"{config.model_type} is not supported: .*{why}"):
        refuse_unfit(config)


def test_transformers_has_no_class_for_what_is_refused_for_that():
    assert not {*TEXTLESS} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def test_a_decoder_of_another_kind_is_refused_in_one_line():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["modernbert-decoder"](**COMMON))
    with pytest.raises(ModelError, match="is not supported: a pass over one token fails"):
        Backbone(model, CONTEXT)


def test_a_family_of_hybrids_is_read_where_all_layers_attend():
    """Granite 4's dense models; a config.json calls such a layer "attention"."""
    values = {"num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 8}
    config = CONFIG_MAPPING["granitemoehybrid"](
        **COMMON | values | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"}
    )
    backbone = Backbone(AutoModelForCausalLM.from_config(config).eval(), CONTEXT)
    assert check_steps(backbone) < 1e-4
    refuse_unfit(SimpleNamespace(model_type="granitemoehybrid", layer_types=["attention"] * 2))
    with pytest.raises(ModelError, match="recurrent"):
        refuse_unfit(SimpleNamespace(model_type="granitemoehybrid", layer_types=["mamba"]))


def test_a_config_that_says_alibi_is_refused():
    with pytest.raises(ModelError, match="ALiBi"):
        refuse_unfit(SimpleNamespace(model_type="falcon", alibi=True))


def test_a_window_that_is_switched_off_is_none():
    on = Qwen2Config(sliding_window=4, use_sliding_window=True, max_window_layers=0)
    off = Qwen2Config(sliding_window=4, use_sliding_window=False)
    assert set(windows(on)) == {4} and set(windows(off)) == {None}


FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
FEW |= {"n_routed_experts": 4, "num_local_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
WINDOWED = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
CHANGE_SCORES = ("gpt_oss", "granite_swa", "mimo_v2_flash", "gptj", "falcon")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpt_oss", FEW),
        ("granite_swa", WINDOWED),
        ("mimo_v2_flash", FEW | WINDOWED | {"v_head_dim": 8}),
        ("gptj", {"rotary_dim": 4}),
        ("falcon", {"num_ln_in_parallel_attn": 1}),
        ("deepseek_v3", FEW | LATENT),
        ("glm4_moe_lite", FEW | LATENT),
        ("glm4_moe", FEW),
        ("minimax_m2", FEW | {"rotary_dim": 4}),
        ("ernie4_5", {}),
        ("hunyuan_v1_dense", {"head_dim": 8}),
        ("apertus", {}),
        ("nemotron", {}),
    ],
)
def test_a_tree_of_other_families_is_that_of_their_own_attention(name, values):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**COMMON | values)
    backbone = Backbone(AutoModelForCausalLM.from_config(config).eval(), CONTEXT)
    assert check_steps(backbone) < 1e-4
    assert (backbone.implementation == "eager") == (name in CHANGE_SCORES)


def test_sums_and_records_hold(llama):
    events = decode(llama, drafter=llama.drafter(medusa(), TREES["dense"]), temperature=0.9)
    prefilled, steps, finished = events[0], events[1:-1], events[-1]
    assert isinstance(prefilled, Prefilled) and isinstance(finished, Finished)
    assert prefilled.token_ids + tuple(t for s in steps for t in s.token_ids) == finished.token_ids
    assert finished.stats.steps == len(steps)
    for step in steps:
        draft = step.draft
        for node in range(1, len(draft.tokens)):
            parent_sample = draft.sampled[draft.parents[node]]
            is_child = node in step.path
            reachable = draft.parents[node] in step.path
            assert is_child == (reachable and draft.tokens[node] == parent_sample)
            assert 0 <= draft.probabilities[node] <= 1
            assert 0 <= draft.draft_probabilities[node] <= 1
        assert all(entropy >= 0 for entropy in draft.entropies)


def test_the_parts_of_a_step_fit_into_it(llama):
    for name, tree in (("medusa", TREES["dense"]), ("none", ROOT)):
        drafter = llama.drafter(GenerationSettings(drafter=name), tree)
        for step in decode(llama, drafter=drafter)[1:-1]:
            assert step.backbone_seconds > 0 and step.heads_seconds >= 0
            assert step.backbone_seconds + step.heads_seconds <= step.seconds


def test_the_backbones_share_is_the_backbones(llama, monkeypatch):
    run_tree, passes, looks = llama.backbone.run_tree, itertools.count(1), itertools.count()
    waited = 0

    def clock():
        """A second for each pass of the backbone, a thousandth for each look at it."""
        return waited + next(looks) / 1000

    def slow(*arguments):
        nonlocal waited
        waited = next(passes)
        return run_tree(*arguments)

    monkeypatch.setattr("medusa_chat.decoding.engine.perf_counter", clock)
    monkeypatch.setattr("medusa_chat.decoding.step.perf_counter", clock)

    monkeypatch.setattr(llama.backbone, "run_tree", slow)
    steps = decode(llama, drafter=llama.drafter(medusa(), TREES["dense"]))[1:-1]
    for step in steps:
        assert step.backbone_seconds == pytest.approx(1, abs=0.01)
        assert step.heads_seconds == pytest.approx(0, abs=0.01)


def test_a_trace_line_of_another_version_is_read(llama):
    step = decode(llama)[1]
    line = to_json(step) | {"surprise": [1]}
    assert from_json(line) == step
    del line["backbone_seconds"]
    assert from_json(line).backbone_seconds == 0.0


MERGED = ("llama", "mistral", "mistral-window", "qwen2", "qwen2-mixed", "phi3", "phi3-part")


@pytest.mark.parametrize("family", MERGED)
def test_merged_layers_decode_like_the_stock_ones(family):
    expected = [tokens(engine_of(tiny(family)), temperature=t) for t in (0.0, 1.0)]
    model = tiny(family)
    notes = replace_submodules(model)
    assert "2 layers merged" in notes and "5 norms fused" in notes
    engine = engine_of(model)
    assert check_steps(engine.backbone) < 1e-4  # against the stock layers' eager attention
    for temperature, plain in zip((0.0, 1.0), expected, strict=True):
        assert tokens(engine, temperature=temperature) == plain
        for drafter in drafters_of(engine, plain, TREES["dense"], temperature):
            assert tokens(engine, drafter=drafter, temperature=temperature) == plain


@pytest.mark.parametrize("family", ["gpt2", "cohere"])
def test_layers_of_other_families_stay_as_they_are(family):
    assert not any("merged" in note for note in replace_submodules(tiny(family)))


def test_merged_weights_are_held_once():
    model = tiny("llama")
    replace_submodules(model)
    layer = model.model.layers[0]
    merged = layer.qkv.weight.untyped_storage().data_ptr()
    projections = (layer.stock.self_attn.q_proj, layer.stock.self_attn.v_proj)
    assert {p.weight.untyped_storage().data_ptr() for p in projections} == {merged}
