"""Training: labels, loss, trainer, self-distillation, accuracies and the tree they ask for."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from support.families import BY_LENGTH, tiny
from support.training_models import LETTERS, letter_tokenizer, random_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.kv_cache import layer_shapes
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import DeviceMemory
from medusa_chat.training import answerers
from medusa_chat.training import loss as loss_module
from medusa_chat.training.answerers import BatchAnswerer, PromptBatch, batch_rows, fastest_answerer
from medusa_chat.training.calibration import RANKS, accuracies_of, ranks_after, ranks_of
from medusa_chat.training.conversations import read_conversations
from medusa_chat.training.distill import DistillRecipe, answer_prompts, read_answers
from medusa_chat.training.events import Evaluated, HiddenStates, TrainStep
from medusa_chat.training.examples import (
    Example,
    collate,
    encode,
    group_by_length,
)
from medusa_chat.training.loss import (
    IGNORED,
    HeadInputs,
    cache_inputs,
    head_inputs,
    head_targets,
    keep_inputs,
    medusa_loss,
)
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import new_heads, share_of_peak, train_heads, write_state
from medusa_chat.trees.calibration import Calibration, likeliest
from medusa_chat.trees.expected_length import expected_lengths, node_value

END = 1
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHAT = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cde"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "gh"},
]


QUICK = Recipe(learning_rate=1.5e-2)  # the heads' rate is four times as high


def make_tokenizer(template: str = CHAT) -> PreTrainedTokenizerFast:
    special = ("<pad>", "</s>", "<user>", "<assistant>")
    return letter_tokenizer(template, special, f"{LETTERS}\n<>/")


def make_model() -> LlamaForCausalLM:
    return random_llama(32)


def make_examples(count: int = 12, seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for number in range(count):
        length = int(torch.randint(8, 20, (1,), generator=generator))
        ids = torch.randint(2, 32, (length,), generator=generator).tolist()
        is_label = (False,) * 3 + (True,) * (length - 3)
        examples.append(Example(tuple(ids), is_label, f"row {number}"))
    return examples


# ------------------------------------------------------------------------------------ data


def write_rows(path, *rows) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def test_conversations_keep_their_file_and_line(tmp_path):
    path = tmp_path / "data.jsonl"
    write_rows(path, {"messages": TALK, "source": "x"}, "", {"messages": TALK})
    conversations = read_conversations(path).conversations
    assert [c.place for c in conversations] == [f"{path}:1", f"{path}:3"]
    assert list(conversations[0].messages) == TALK


@pytest.mark.parametrize(
    "bad",
    [
        "{oops",
        [1],
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "only asked"}]},
    ],
)
def test_a_bad_row_is_left_out_with_its_line_and_alone_refused(tmp_path, bad):
    path = tmp_path / "data.jsonl"
    write_rows(path, {"messages": TALK}, bad, {"messages": TALK})
    read = read_conversations(path)
    assert [found.place for found in read.conversations] == [f"{path}:1", f"{path}:3"]
    (note,) = read.notes
    assert note.startswith("1 of 3 rows of data.jsonl left out; the first: ")
    assert f"{path}:2: " in note and "\n" not in note
    write_rows(path, bad, bad)
    with pytest.raises(UsageError, match=r"data.jsonl:1: .* \(none of the 1 other rows"):
        read_conversations(path)


def test_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(UsageError, match="chat template"):
        encode(make_tokenizer(FORGETFUL), TALK)


def test_template_without_generation_prompt_never_labels_the_user():
    labelled = make_tokenizer().convert_ids_to_tokens(encode(make_tokenizer(PLAIN), TALK).labels)
    assert not {"a", "b", "f", "<user>"} & set(labelled)


def test_batches_hold_every_example_once_within_the_budget():
    examples = make_examples(40)
    for seed in range(3):
        groups = group_by_length(examples, 60, seed)
        held = sorted(e.place for group in groups for e in group)
        assert held == sorted(e.place for e in examples)
        assert all(collate(group).ids.numel() <= 60 for group in groups)
        assert len(groups) == len(group_by_length(examples, 60, seed + 1))


def test_padding_changes_no_hidden_state_and_is_no_label():
    model, examples = make_model(), make_examples(6)
    together, _, wanted = head_inputs(model, collate(examples), 3)
    alone = [head_inputs(model, collate([example]), 3) for example in examples]
    torch.testing.assert_close(together, torch.cat([hidden for hidden, *_ in alone]))
    assert torch.equal(wanted, torch.cat([targets for *_, targets in alone]))


# ------------------------------------------------------------------------------------ loss


def test_head_k_is_asked_for_the_token_at_t_plus_k_plus_2():
    ids = torch.arange(10, 18).unsqueeze(0)
    targets = head_targets(ids, torch.ones_like(ids, dtype=torch.bool), 2)[0]
    assert targets[:, 0].tolist() == [12, 13, 14, 15, 16, 17, IGNORED, IGNORED]
    assert targets[:, 1].tolist() == [13, 14, 15, 16, 17, IGNORED, IGNORED, IGNORED]


def test_no_target_lies_outside_an_answer_or_across_two():
    is_label = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    ids = torch.arange(8).unsqueeze(0)
    targets = head_targets(ids, is_label, 5)[0]
    found = {(t, k): int(targets[t, k]) for t, k in (targets != IGNORED).nonzero().tolist()}
    assert found == {(1, 0): 3, (2, 0): 4, (5, 0): 7, (1, 1): 4}


def test_text_shorter_than_the_heads_has_no_targets():
    for length in (1, 2, 3):
        ids = torch.zeros(1, length, dtype=torch.long)
        targets = head_targets(ids, torch.ones_like(ids, dtype=torch.bool), 5)
        assert (targets != IGNORED).sum() == max(0, length - 2)


@pytest.mark.parametrize("own", [False, True])
def test_untrained_head_says_what_the_lm_head_says(own):
    model = make_model()
    heads = new_heads(model.lm_head, 3, own_lm_head=own)
    hidden = torch.randn(7, 32)
    logits = heads(hidden, torch.arange(7), model.lm_head)
    torch.testing.assert_close(logits, model.lm_head(hidden).expand(3, -1, -1))


def test_the_loss_and_all_its_gradients_are_those_of_its_formula_however_it_is_chunked():
    model, heads = make_model(), MedusaHeads(3, 32, vocabulary=32)
    torch.nn.init.normal_(heads.weight, std=0.1)
    torch.nn.init.normal_(heads.lm_weight, std=0.3)
    shared = MedusaHeads(3, 32)
    torch.nn.init.normal_(shared.weight, std=0.1)
    found, roots, targets = head_inputs(model, collate(make_examples()), 3)
    hidden = found.clone().requires_grad_()
    for some, rows in itertools.product((heads, shared), (7, 50, 1000)):
        learning = [hidden, *some.parameters(), model.lm_head.weight]
        logits = some(hidden, roots, model.lm_head)
        direct = sum(
            0.8 ** (k + 1)
            * torch.nn.functional.cross_entropy(logits[k], targets[:, k], ignore_index=IGNORED)
            for k in range(3)
        )
        expected = torch.autograd.grad(direct, learning, materialize_grads=True)
        inputs = HeadInputs(hidden, roots, targets)
        trainable = [model.lm_head.weight]
        result = medusa_loss(some, model.lm_head, inputs, 0.8, rows, trainable=trainable)
        torch.testing.assert_close(result.total, direct)
        got = torch.autograd.grad(3 * result.total, learning, materialize_grads=True)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, 3 * theirs, atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        assert not medusa_loss(shared, model.lm_head, inputs).total.requires_grad


# --------------------------------------------------------------------------------- trainer


def planted(distance: int, count: int = 48) -> list[Example]:
    """Random text in which only the token `distance` places back tells anything."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for _ in range(count):
        ids = torch.randint(2, 10, (24,), generator=generator).tolist()
        for place in range(distance, 24):
            if place % (2 * distance) >= distance:
                ids[place] = ids[place - distance] + 10
        examples.append(Example(tuple(ids), (True,) * 24))
    return examples


@pytest.mark.parametrize("head", [0, 1, 2])
def test_planted_pattern_is_learnt_by_the_right_head_only(head):
    model = make_model()
    with torch.no_grad():  # the hidden state at t tells of the token at t, and of nothing else
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    examples = planted(head + 2)
    heads = new_heads(model.lm_head, 3)
    recipe = replace(QUICK, max_steps=150, batch_tokens=1024, warmup_steps=2)
    list(train_heads(model, model.lm_head, heads, examples, recipe))
    batch = collate(examples)
    right = [pattern_hits(model, heads, batch, head + 2, k) for k in range(3)]
    assert right[head] > 0.9
    assert all(share < 0.5 for k, share in enumerate(right) if k != head)


def test_heads_that_read_the_root_learn_what_follows_from_it_alone():
    model = make_model()
    with torch.no_grad():  # the hidden state at t tells of the token at t, and of nothing else
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    examples = planted(1)  # what is at t + 2 repeats the root, which is at t + 1
    recipe = replace(QUICK, max_steps=150, batch_tokens=1024, warmup_steps=2)
    batch, embedding, right = collate(examples), model.get_input_embeddings(), []
    for reads in (None, embedding):
        heads = new_heads(model.lm_head, 1, embedding=reads)
        list(train_heads(model, model.lm_head, heads, examples, recipe))
        right.append(pattern_hits(model, heads, batch, 1, 0))
    assert right[0] < 0.5 and right[1] > 0.9


def pattern_hits(model, heads, batch, distance: int, head: int) -> float:
    """Share of the planted tokens that the head foresees, each from k + 2 places before it."""
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=batch.ids).last_hidden_state
        roots = batch.ids.roll(-1, 1).flatten()
        best = heads(hidden.flatten(0, 1), roots, model.lm_head)[head]
        best = best.argmax(-1).view(batch.ids.shape)
    places = [p for p in range(distance, 24) if p % (2 * distance) >= distance and p >= head + 2]
    hits = [best[:, p - head - 2] == batch.ids[:, p] for p in places]
    return torch.stack(hits).float().mean().item()


def test_training_yields_falling_losses_and_evaluations():
    model, examples = make_model(), planted(2)
    heads = new_heads(model.lm_head, 2)
    recipe = Recipe(max_steps=20, batch_tokens=600, learning_rate=2.5e-3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    events = list(train_heads(model, model.lm_head, heads, examples, recipe, examples[:4]))
    steps = [event for event in events if isinstance(event, TrainStep)]
    assert [event.step for event in steps] == list(range(1, 21))
    assert steps[-1].loss < steps[0].loss and len(steps[0].top) == 2
    assert [e.step for e in events if isinstance(e, Evaluated)] == list(range(2, 21, 2))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_pass_that_keeps_hidden_states_tells_how_far_it_is():
    model, examples = make_model(), make_examples()
    recipe = Recipe(max_steps=2, batch_tokens=60)
    heads = new_heads(model.lm_head, 2)
    events = list(train_heads(model, model.lm_head, heads, examples, recipe))
    passed = [event for event in events if isinstance(event, HiddenStates)]
    assert events[: len(passed)] == passed and len(passed) > 1
    assert [event.done for event in passed] == sorted({event.done for event in passed})
    assert passed[-1].done == passed[-1].total == len(examples)
    assert passed[-1].tokens == sum(len(example.ids) for example in examples)


def test_kept_rows_that_a_caller_gives_are_those_of_the_examples():
    model, examples = make_model(), make_examples()
    recipe = Recipe(max_steps=4, batch_tokens=32)
    own, given = new_heads(model.lm_head, 2), new_heads(model.lm_head, 2)
    list(train_heads(model, model.lm_head, own, examples, recipe))
    kept = cache_inputs(model, 2, examples, recipe)
    list(train_heads(model, model.lm_head, given, examples, recipe, cached=kept))
    assert torch.equal(own.weight, given.weight)


def test_interrupted_run_gives_the_same_heads(tmp_path):
    model, examples = make_model(), make_examples()
    recipe = Recipe(max_steps=20, batch_tokens=60)
    whole = new_heads(model.lm_head, 2)
    list(train_heads(model, model.lm_head, whole, examples, recipe))
    for stop in (1, 4, 5):  # it is saved after every second step
        state = tmp_path / f"state{stop}.pt"
        first = new_heads(model.lm_head, 2)
        run = train_heads(model, model.lm_head, first, examples, recipe, state=state)
        list(itertools.islice(run, stop))
        run.close()
        again = new_heads(model.lm_head, 2)
        list(train_heads(model, model.lm_head, again, examples, recipe, state=state))
        assert torch.equal(again.weight, whole.weight) and torch.equal(again.bias, whole.bias)


def test_a_resumed_run_reads_the_hidden_states_that_are_kept(tmp_path):
    model, examples = make_model(), make_examples()
    recipe, state = Recipe(max_steps=6, batch_tokens=60), tmp_path / "state.pt"
    whole, heads = new_heads(model.lm_head, 2), new_heads(model.lm_head, 2)
    list(train_heads(model, model.lm_head, whole, examples, recipe))
    run = train_heads(model, model.lm_head, heads, examples, recipe, state=state)
    next(event for event in run if isinstance(event, TrainStep))
    run.close()
    model.get_decoder().forward = None  # it is not run again
    again = list(train_heads(model, model.lm_head, heads, examples, recipe, state=state))
    assert [event.step for event in again] == [2, 3, 4, 5, 6]
    assert torch.equal(heads.weight, whole.weight)


def test_hidden_states_that_cannot_be_kept_say_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(loss_module, "save_file", full)
    inputs = cache_inputs(make_model(), 2, make_examples(), Recipe(batch_tokens=60))
    with pytest.raises(MedusaChatError, match="No space left.*--resume"):
        keep_inputs(inputs, tmp_path / "inputs.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    state = tmp_path / "state.pt"
    write_state(state, {"step": 1})

    def full(saved, file):
        file.write_bytes(b"half")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(MedusaChatError, match="--resume"):
        write_state(state, {"step": 2})
    assert torch.load(state, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [state]


def test_state_of_another_recipe_is_refused(tmp_path):
    model, examples = make_model(), make_examples()
    heads, state = new_heads(model.lm_head, 2), tmp_path / "state.pt"
    list(train_heads(model, model.lm_head, heads, examples, Recipe(max_steps=1), state=state))
    with pytest.raises(UsageError, match="another recipe"):
        list(train_heads(model, model.lm_head, heads, examples, Recipe(max_steps=2), state=state))


def test_loss_that_is_not_finite_stops_before_it_is_learnt():
    model, examples = make_model(), make_examples()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = float("nan")
    poisoned = Example((3, 4, 0, 5, 6, 7), (True,) * 6, "data.jsonl:7")
    heads = new_heads(model.lm_head, 2)
    with pytest.raises(MedusaChatError, match="not finite at step 1: lower --learning-rate"):
        list(train_heads(model, model.lm_head, heads, [*examples, poisoned], Recipe(max_steps=3)))
    assert torch.equal(heads.weight, torch.zeros_like(heads.weight))


def test_rate_warms_up_and_falls_to_zero():
    recipe = Recipe(max_steps=100, warmup_steps=10)
    rates = [share_of_peak(step, recipe.steps, recipe.warmup_steps) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[100] < 1e-9
    assert rates[10:] == sorted(rates[10:], reverse=True)


# --------------------------------------------------------------------------------- distill

PROMPTS = [[5, 6, 7], [8], [9, 10], [3, 4, 5, 6], [7, 7]]
GREEDY = [PromptBatch(PROMPTS, 0.0, 0)]


@pytest.fixture(params=["batches", "engine"])
def who(request):
    """The two who answer, over the same model."""
    if request.param == "batches":
        return BatchAnswerer(make_model(), [END])
    request.getfixturevalue("library")  # which CI has to have
    found = fastest_answerer(make_model(), 128, [END])
    assert found.name == "our engine"
    return found


@pytest.mark.parametrize(("context", "name"), [(16, "our engine"), (64, "batches")])
def test_longrope_answers_with_the_factors_of_the_passes_that_train(context, name, library):
    """Those go by each text's length; our engine takes the same for every text."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0} | BY_LENGTH["longrope"]
    own = BY_LENGTH["longrope"]["original_max_position_embeddings"]
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=own)
    assert fastest_answerer(model, context, [2]).name == name


def test_greedy_answers_are_those_of_generate_one_by_one(tmp_path, who):
    model = make_model()
    recipe = DistillRecipe(max_new_tokens=12, temperatures=(0.0,), rows=2)
    answers = list(answer_prompts(who, PROMPTS, recipe, tmp_path / "a.jsonl"))
    assert sorted(answer.index for answer in answers) == list(range(5))
    for answer in answers:
        ids = torch.tensor([PROMPTS[answer.index]])
        plain = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=END)
        assert list(answer.answer_ids) == plain[0, ids.shape[1] :].tolist()
        assert END not in answer.answer_ids[:-1]
        assert sum(answer.example("here").is_label) == len(answer.answer_ids)


def test_interrupted_answers_go_on_where_they_were(tmp_path, who):
    recipe = DistillRecipe(max_new_tokens=8, rows=2)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    expected = list(answer_prompts(who, PROMPTS, recipe, whole))
    data = whole.read_bytes()
    twice = data[:200] + data  # a disk that was full took a half, and then all of it
    for left in (b"", data[:10], data[: len(data) // 2], data, twice, data[:-9] + bytes(8) + b"\n"):
        cut.write_bytes(left)
        assert list(answer_prompts(who, PROMPTS, recipe, cut)) == expected
        assert cut.read_bytes() == whole.read_bytes()
    assert list(read_answers(whole)) == expected


def test_an_answer_is_kept_as_soon_as_it_is_there(tmp_path, who):
    recipe, whole = DistillRecipe(max_new_tokens=8, rows=3), tmp_path / "whole.jsonl"
    expected, path = list(answer_prompts(who, PROMPTS, recipe, whole)), tmp_path / "stopped.jsonl"
    for count in range(1, len(PROMPTS)):
        answers = answer_prompts(who, PROMPTS, recipe, path)
        assert [next(answers) for _ in range(count)] == expected[:count]
        answers.close()
        assert list(read_answers(path)) == expected[:count]


def test_answers_to_other_prompts_are_refused(tmp_path, who):
    recipe = DistillRecipe(max_new_tokens=4, rows=2)
    path = tmp_path / "a.jsonl"
    list(answer_prompts(who, PROMPTS, recipe, path))
    with pytest.raises(UsageError, match="other prompts"):
        list(answer_prompts(who, [[11], *PROMPTS[1:]], recipe, path))


def test_who_began_goes_on(tmp_path, library):
    recipe, path = DistillRecipe(max_new_tokens=4, rows=2), tmp_path / "a.jsonl"
    engine, batches = fastest_answerer(make_model(), 128, [END]), BatchAnswerer(make_model(), [END])
    expected = list(answer_prompts(batches, PROMPTS, recipe, path))
    assert list(answer_prompts(engine, PROMPTS, recipe, path)) == expected  # nothing is asked
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="written by batches, and our engine samples differently"):
        list(answer_prompts(engine, PROMPTS, recipe, path))
    assert list(answer_prompts(batches, PROMPTS, recipe, path)) == expected


def test_what_a_generation_config_does_to_the_logits_is_left_out():
    model = make_model()
    expected = list(BatchAnswerer(model, [END]).answer(GREEDY, 12))
    model.generation_config.repetition_penalty = 50.0
    assert list(BatchAnswerer(model, [END]).answer(GREEDY, 12)) == expected
    assert model.generation_config.repetition_penalty == 50.0


def test_a_backbone_of_invalid_numbers_is_not_learnt_from(library):
    model = make_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(MedusaChatError, match="invalid numbers"):
        list(fastest_answerer(model, 128, [END]).answer(GREEDY, 4))


def test_sampled_answers_follow_the_seed_alone(who):
    batches = [PromptBatch(PROMPTS, 1.0, seed) for seed in (3, 4)]
    first = list(who.answer(batches[:1], 12))
    assert list(who.answer(batches[:1], 12)) == first
    assert list(who.answer(batches[1:], 12)) != first
    assert all(len(ids) == 12 or ids[-1] == END for ids in first)


def test_our_engine_leaves_the_model_as_it_was():
    model, ids = make_model(), torch.tensor([PROMPTS[0]])
    before = model(ids).logits
    list(fastest_answerer(model, 128, [END]).answer(GREEDY, 4))
    after = model(ids).logits
    assert torch.equal(before, after) and after.requires_grad
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_answers_of_batches_that_are_skipped_are_not_made():
    batches = [PromptBatch(PROMPTS[at : at + 2], 1.0, at) for at in range(0, 5, 2)]
    answerer = BatchAnswerer(make_model(), [END])
    whole = list(answerer.answer(batches, 6))
    for skip in range(len(PROMPTS) + 1):
        assert list(answerer.answer(batches, 6, skip)) == whole[skip:]


@pytest.mark.parametrize(
    ("gigabytes", "least", "most"), [(0.001, 16, 16), (0.2, 17, 511), (80, 512, 512)]
)
def test_a_gpu_answers_as_many_prompts_at_once_as_its_memory_holds(
    monkeypatch, gigabytes, least, most
):
    model = make_model()
    memory = DeviceMemory("cuda", 0, int(gigabytes * 1e9))
    monkeypatch.setattr(answerers, "device_memory", lambda device: memory)
    shapes = layer_shapes(model.get_decoder(), model.config, torch.device("cpu"))
    monkeypatch.setattr(answerers, "layer_shapes", lambda *asked: shapes)
    card = SimpleNamespace(
        model=model, config=model.config, device=torch.device("cuda"), length=2048
    )
    assert least <= batch_rows(card) <= most
    card.device = torch.device("cpu")
    assert batch_rows(card) == 16


def test_where_our_c_gives_other_numbers_batches_answer(library, monkeypatch):
    monkeypatch.setattr(answerers, "attached_native", lambda model, context: None)
    found = fastest_answerer(make_model(), 128, [END])
    assert found.name == BatchAnswerer.name
    expected = list(BatchAnswerer(make_model(), [END]).answer(GREEDY, 8))
    assert list(found.answer(GREEDY, 8)) == expected


def test_a_model_that_c_does_not_know_is_answered_in_batches():
    model = make_model().to(torch.float16)
    assert isinstance(fastest_answerer(model, 128, [END]), BatchAnswerer)
    other = tiny("cohere", eos_token_id=END)
    assert isinstance(fastest_answerer(other, 128, [END]), BatchAnswerer)
    adapted = make_model()
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)  # as an adapter on it is
    assert isinstance(fastest_answerer(adapted, 128, [END]), BatchAnswerer)


def test_making_answers_leaves_the_random_state_alone(tmp_path, who):
    recipe = DistillRecipe(max_new_tokens=4, rows=8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(answer_prompts(who, PROMPTS, recipe, tmp_path / "a.jsonl"))
    assert torch.equal(torch.rand(3), expected)


# -------------------------------------------------------------------------------- accuracy


def test_rank_accuracies_equal_a_count_by_hand():
    model, examples = make_model(), make_examples()
    heads = new_heads(model.lm_head, 3)
    torch.nn.init.normal_(heads.weight, std=0.2)
    hits, asked = torch.zeros(3, RANKS), torch.zeros(3)
    for example in examples:
        ids = torch.tensor([example.ids])
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
            order = heads(hidden, ids[0].roll(-1), model.lm_head).argsort(-1, descending=True)
        for k in range(3):
            for t in range(2, len(example.ids) - k - 2):
                asked[k] += 1
                for rank in range(RANKS):
                    hits[k, rank] += order[k, t, rank] == example.ids[t + k + 2]
    ranks = [rows for example in examples for rows in ranks_of(model, heads, example)]
    found, labels = accuracies_of(ranks, 3)
    torch.testing.assert_close(torch.tensor(found), hits / asked[:, None])
    assert labels == asked.int().tolist()


def test_every_run_of_labels_is_an_answer_and_no_head_looks_beyond_it():
    """As the heads are trained (head_targets), also where a text begins with a label."""
    model = make_model()
    heads = new_heads(model.lm_head, 3).requires_grad_(False)
    torch.nn.init.normal_(heads.weight, std=0.3)
    is_label = (True, True, True, False, True, False, True, True, True, True)
    example = Example(tuple(range(4, 14)), is_label)
    hidden, roots, targets = head_inputs(model, collate([example]), 3)
    best = heads(hidden, roots, model.lm_head).topk(RANKS).indices  # [heads, positions, RANKS]
    hits = (best == targets.T.unsqueeze(-1)).sum(1)
    answers = ranks_of(model, heads, example)
    assert [len(rows) for rows in answers] == [2, 1, 4]  # nothing predicts the first token
    found, labels = accuracies_of(answers, 3)
    counted = torch.tensor(found) * torch.tensor(labels)[:, None]
    assert counted.round().tolist() == hits.tolist() and hits.any()
    assert labels == (targets >= 0).sum(0).tolist()


def test_ranks_are_those_of_the_tokens_that_are_drafted():
    model = make_model()
    embedding = model.get_input_embeddings()
    heads = new_heads(model.lm_head, 3, embedding=embedding).requires_grad_(False)
    torch.nn.init.normal_(heads.weight, std=0.3)
    answer, lm_head = [6, 9, 7, 7, 8, 6], LogitHead(model.lm_head, model.config)
    hidden = torch.randn(len(answer), model.config.hidden_size)
    listed = [6, 7, 9, 11]
    found = ranks_after(hidden, answer, heads, model.lm_head, listed)
    assert found == ranks_after(hidden, answer, heads, lm_head, listed)  # of their rows alone
    assert heads.shorten(listed, lm_head)
    for place, row in enumerate(found):
        state, root = hidden[place : place + 1], torch.tensor(answer[place : place + 1])
        _, guesses, _ = heads.guesses(state, root, lm_head, 3, len(listed))
        for head, rank in enumerate(row):
            wanted, tokens = answer[place + 1 + head], guesses[head].tolist()
            assert rank == (tokens.index(wanted) if wanted in tokens else None)
    assert any(rank is not None for row in found for rank in row)
    assert ranks_after(hidden[:0], [], heads, model.lm_head) == []


def test_accuracies_that_rounding_sums_to_more_than_one_give_a_tree():
    row = [0.50001, 0.25001, 0.25]
    assert len(Calibration.search([row], 4, "everything", 9).choices) == 3


# ----------------------------------------------------------------------------- tree search

TABLE = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.1], [0.4, 0.1, 0.1]]


def test_node_is_worth_the_product_along_its_path():
    assert node_value((0, 1, 2), TABLE) == pytest.approx(0.6 * 0.3 * 0.1)
    tree = Tree.from_choices([(0,), (1,), (0, 1)])
    assert expected_lengths(tree, TABLE)[-1] == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.3)


def test_searched_trees_are_nested_in_order_of_worth():
    whole = likeliest(TABLE, 30)
    worth = [node_value(choice, TABLE) for choice in whole.choices]
    assert worth == sorted(worth, reverse=True) and len(whole) == 30
    for nodes in range(1, 31):
        assert likeliest(TABLE, nodes) == whole.head(nodes)


@pytest.mark.parametrize("table", [[[0.5, 0.4], [0.7, 0.2]], [[0.3, 0.6], [0.1, 0.8], [0.9, 0.0]]])
def test_searched_tree_is_as_good_as_the_best_of_all(table):
    places = [
        choice
        for depth in range(1, len(table) + 1)
        for choice in itertools.product(range(2), repeat=depth)
    ]
    for nodes in range(1, 6):
        best = max(
            1 + sum(node_value(choice, table) for choice in chosen)
            for chosen in itertools.combinations(places, nodes - 1)
            if all(choice[:-1] in {(), *chosen} for choice in chosen)
        )
        assert expected_lengths(likeliest(table, nodes), table)[-1] == pytest.approx(best)


def test_nodes_worth_nothing_are_left_out():
    assert len(likeliest([[0.5, 0.0], [0.0, 0.0]], 64)) == 2
    assert len(likeliest([], 64)) == 1


def test_tree_deeper_than_the_table_is_refused():
    with pytest.raises(UsageError, match="has depth 2"):
        expected_lengths(Tree.from_choices([(0,), (0, 0)]), [[0.5]])[-1]
