"""A chat session without a browser: messages, what waits, versions, failures, what is kept."""

import json

import pytest
from support.conversations import ended, owner, roles, turn
from support.waiting import wait_for

from medusa_chat.errors import UsageError
from medusa_chat.ui.chat import answer_run
from medusa_chat.ui.chat import chat_session as session_module
from medusa_chat.ui.chat import session_store as store_module
from medusa_chat.ui.chat.answer import chatbot_row, pieces_before
from medusa_chat.ui.chat.session_store import OWNER, SessionStore
from medusa_chat.ui.chat.view import rows_of
from medusa_chat.ui.page.markup import MARK


def test_a_message_sent_while_one_runs_waits_and_goes_out_at_the_end(chat):
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.ask(turn("dropped"))
    chat.ask(turn("three"))
    assert [inputs.text for inputs in chat.pending] == ["two", "dropped", "three"]
    before = list(chat.pending)
    chat.drop(1, "what moved on")
    chat.drop(7, before[1].text)
    assert chat.pending == before
    chat.drop(1, before[1].text)
    chat.enter()
    wait_for(lambda: len(chat.transcript.messages) == 6)
    ended(chat)
    sent = [prompt[-1]["content"] for prompt in chat.session.runner.prompts]
    assert sent == ["one", "two", "three"] and chat.pending == []


def test_messages_that_were_not_read_are_told_below_the_answer(chat):
    chat.session.runner.left_out = 1
    chat.ask(turn("one"))
    assert chat._run.job.request.drops_oldest
    ended(chat)
    chat.session.runner.left_out = 4
    chat.ask(turn("two", max_new_tokens=16))
    ended(chat)
    room = "not read: the context holds 2,048 tokens"
    assert chat.transcript.notes[1] == f"the oldest message was {room}"
    limit = "stopped: the limit of new tokens is reached"
    assert chat.transcript.notes[3] == f"{limit}; the oldest 4 messages were {room}"


def test_what_waits_goes_out_after_a_stop_too(chat, monkeypatch):
    monkeypatch.setattr(chat.session.runner, "delay", 0.05)
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.enter()
    wait_for(lambda: chat.session.runner.last)
    chat.stop()
    wait_for(
        lambda: (
            chat._run
            and chat._run.job.request.prompt[-1]["content"] == "two"
            and chat._run.job.trace
        )
    )
    chat.stop()
    ended(chat)
    assert [m["content"] for m in chat.transcript.messages if m["role"] == "user"] == ["one", "two"]


def test_a_crowd_of_waiting_messages_is_refused(chat):
    chat.ask(turn("one"))
    for number in range(session_module.MAX_PENDING):
        chat.ask(turn(f"next {number}"))
    with pytest.raises(UsageError, match="are already waiting"):
        chat.ask(turn("too many"))
    chat.end()


def test_one_room_has_one_job_and_rooms_take_turns(controller):
    one, two = controller.sessions.open(), controller.sessions.open()
    for at, chat in enumerate((one, two)):
        chat.enter()
        chat.ask(turn(f"{at} a"))
    one.ask(turn("0 b"))
    assert controller._waiting_for(two._run.job) == "waiting: 1 ahead"
    wait_for(lambda: len(one.transcript.messages) == 4 and len(two.transcript.messages) == 2)
    ended(one)
    sent = [prompt[-1]["content"] for prompt in controller.session.runner.prompts]
    assert sent == ["0 a", "1 a", "0 b"]


def test_regenerate_keeps_the_earlier_version_and_sends_the_same(chat):
    chat.ask(turn())
    ended(chat)
    first = chat.answer
    chat.regenerate(turn(seed="11"))
    assert roles(chat) == ["user"]
    ended(chat)
    assert roles(chat) == ["user", "assistant"]
    assert chat.transcript.answers == {1: chat.answer} and chat.answer is not first
    prompts = chat.session.runner.prompts
    assert prompts[0] == prompts[1] and chat.session.runner.settings[1].seed == 11
    assert chat.transcript.version(1) == (2, 2)
    chat.show_version(1, 1)
    assert chat.transcript.answers == {1: first} and chat.answer is first
    for wrong in (0, 3):
        with pytest.raises(UsageError, match="no longer exists"):
            chat.show_version(1, wrong)


def rejected(answer, index):
    """(node, token) of a drafted token of step `index` that did not come."""
    step = answer.steps[index]
    node = next(
        n for n, up in enumerate(step.draft.parents) if up in step.path and n not in step.path
    )
    return node, step.draft.tokens[node]


def test_another_token_of_a_step_gives_another_version_with_the_text_up_to_there(chat):
    chat.ask(turn())
    ended(chat)
    first = chat.answer
    node, token = rejected(first, 2)
    chat.branch_off(first, turn(step=2, node=node, token=token))
    ended(chat)
    assert chat.transcript.version(1) == (2, 2)
    asked, runner = chat.session.runner.prompts[-1], chat.session.runner
    assert asked.ids[-1] == token and asked.ids[: len(asked.ids) - asked.begun] == tuple(range(12))
    before = pieces_before(first, 2, node)
    text = "".join(piece for piece, _ in before)
    assert list(chat.answer.before) == before and chat.answer.text.startswith(text)
    begun = asked.ids[-asked.begun :]
    said = "".join(runner.pieces[one % len(runner.pieces)] for one in begun)
    assert chat.transcript.messages[1]["content"].startswith(said)
    assert len(chat.answer.steps) == runner.steps
    chat.show_version(1, 1)
    assert chat.answer is first


def test_another_token_is_refused_where_nothing_was_recorded_or_the_message_is_gone(chat):
    chat.ask(turn())
    ended(chat)
    answer = chat.answer
    for wrong in ({"step": 99}, {"node": 999}):
        with pytest.raises(UsageError):
            chat.branch_off(answer, turn(**{"step": 1, "node": 1, "token": 3} | wrong))
    chat.regenerate(turn())
    ended(chat)
    with pytest.raises(UsageError, match="no longer exists"):
        chat.branch_off(answer, turn(step=1, node=1, token=3))


def test_a_regenerate_that_comes_to_nothing_gives_the_old_answer_back(chat):
    chat.ask(turn())
    ended(chat)
    transcript = chat.transcript
    chat.session.runner.reply = lambda prompt, settings: iter(_raise())
    chat.regenerate(turn())
    ended(chat)
    assert chat.transcript == transcript and "wanted failure" in chat.error


def test_continue_keeps_the_text_and_puts_the_new_one_after_it(chat):
    chat.ask(turn(max_new_tokens=30))
    ended(chat)
    before = chat.transcript.messages[1]["content"]
    assert "limit of new tokens" in chat.transcript.notes[1]
    chat.proceed(turn())
    assert chat.answer.live.startswith(f"[1,{json.dumps(chat.answer.pieces[0][0])}")
    ended(chat)
    prompt = chat.session.runner.prompts[-1]
    assert prompt[-1] == {"role": "assistant", "content": before}
    after = chat.transcript.messages[1]["content"]
    assert after == before + chat.answer.finished.text and len(after) > len(before)
    assert "".join(text for text, _ in chat.answer.pieces) == after and not chat.transcript.notes
    assert chat.transcript.version(1) == (1, 1)  # the longer one takes the place of the shorter


def test_undo_gives_the_turn_back(chat):
    chat.ask(turn("first"))
    ended(chat)
    chat.ask(turn("second"))
    ended(chat)
    assert chat.undo() == "second" and roles(chat) == ["user", "assistant"]
    assert chat.undo() == "first" and roles(chat) == [] and chat.transcript.answers == {}
    with pytest.raises(UsageError, match="nothing to undo"):
        chat.undo()


def test_undo_takes_back_the_last_thing_that_was_done(chat):
    """It took a question with all versions of its answer, or left an edited one with nothing."""
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    for seed in ("5", "6"):
        chat.regenerate(turn(seed=seed))
        ended(chat)
    assert chat.transcript.version(3) == (3, 3)
    for left in (2, 1):
        assert chat.undo() == "" and chat.transcript.version(3) == (left, left)
        assert chat.answer is chat.transcript.answers[3]
    chat.edit(rows_of(chat.transcript)[0], turn("changed"))
    ended(chat)
    assert len(chat.transcript.messages) == 2
    assert chat.undo() == "" and chat.transcript.version(0) == (1, 1)
    assert [m["content"] for m in chat.transcript.messages][::2] == ["first", "second"]
    assert [chat.undo(), chat.undo()] == ["second", "first"]
    assert not chat.answer.steps and not chat.answer.pieces


def test_redo_brings_back_what_undo_took_step_by_step(chat):
    chat.ask(turn("first"))
    ended(chat)
    chat.regenerate(turn(seed="5"))
    ended(chat)
    again = chat.transcript
    chat.edit(rows_of(again)[0], turn("changed"))
    ended(chat)
    changed = chat.transcript
    assert [chat.undo(), chat.undo()] == ["", ""]
    chat.redo()
    assert chat.transcript.tree.path == again.tree.path and chat.answer is again.answers[1]
    chat.redo()
    assert chat.transcript == changed and chat.answer is changed.answers[1]
    with pytest.raises(UsageError, match="nothing to redo"):
        chat.redo()
    chat.undo()
    chat.ask(turn("something else"))  # what was taken back would not fit behind it
    ended(chat)
    assert chat.undone == []
    assert chat.undo() == "something else" and chat.undone == [], "the box has it"


def test_a_stop_before_any_text_gives_back_what_waits_too(chat):
    """What waited was sent without the text that it was about."""
    chat.session.runner.prefill = 240
    chat.ask(turn("a long text"))
    chat.ask(turn("Summarise it."))
    chat.enter()
    chat.stop()
    ended(chat)
    assert chat.pop_returned() == "a long text\n\nSummarise it." and chat.pending == []
    assert chat.transcript.messages == () and not chat.error


def test_a_continue_that_adds_nothing_leaves_the_steps_that_were_shown(chat):
    chat.ask(turn("first"))
    ended(chat)
    answer = chat.answer
    chat.session.runner.steps, chat.session.runner.pieces = 0, ("",) * 50
    chat.proceed(turn())
    ended(chat)
    assert chat.answer is answer and answer.steps
    assert "nothing to add" in chat.news and not chat.error


def test_an_edited_question_is_sent_and_the_old_branch_stays_reachable(chat):
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    chat.edit(rows_of(chat.transcript)[0], turn("changed"))
    ended(chat)
    assert [m["content"] for m in chat.transcript.messages if m["role"] == "user"] == ["changed"]
    assert chat.session.runner.prompts[-1] == [{"role": "user", "content": "changed"}]
    assert chat.transcript.version(0) == (2, 2)
    chat.show_version(0, 1)
    said = [m["content"] for m in chat.transcript.messages if m["role"] == "user"]
    assert said == ["first", "second"] and len(chat.transcript.messages) == 4


@pytest.mark.parametrize("position", [1, 3])
def test_an_edited_answer_is_another_version_and_nothing_is_sent(chat, position):
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    before = chat.transcript
    chat.edit(rows_of(before)[position], turn("my own words"))
    assert not chat.is_running and len(chat.session.runner.prompts) == 2
    said = [one["content"] for one in before.messages]
    said[position] = "my own words"
    assert [one["content"] for one in chat.transcript.messages] == said
    assert set(chat.transcript.answers) == {1, 3} - {position}
    assert chat.transcript.version(position) == (2, 2)
    chat.show_version(position, 1)
    assert chat.transcript.messages == before.messages
    chat.show_version(position, 2)
    assert chat.undo() == "" and chat.transcript.tree.said == before.tree.said
    assert chat.transcript.messages == before.messages and set(chat.transcript.answers) == {1, 3}
    chat.edit(rows_of(before)[position], turn(before.messages[position]["content"]))
    assert chat.transcript.tree.said == before.tree.said, "nothing was changed"


def test_undo_takes_nothing_back_that_was_not_done_last(chat):
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    chat.regenerate(turn())  # the second answer
    ended(chat)
    chat.show_version(3, 1)
    before = chat.transcript
    chat.edit(rows_of(before)[1], turn("my own words"))
    edited = chat.transcript
    chat.show_version(1, 1)  # to compare: the answer as it was is no edit
    assert chat.undo() in ("", "second") and before.tree.path[1].id in chat.transcript.tree.said
    chat._set_transcript(edited)
    assert chat.undo() == "" and chat.transcript.tree.leaf == before.tree.leaf
    assert chat.transcript.tree.said == before.tree.said


def test_an_answer_has_marks_outside_its_formulas_by_which_the_page_gives_them_back(chat):
    chat.session.runner.pieces = ("It is $a^2$ for $5", " or `$b$`.", *[""] * 20)
    chat.session.runner.steps = 1
    chat.ask(turn("how large?"))
    ended(chat)
    row = rows_of(chat.transcript)[1]
    shown = chatbot_row(row, "assistant")["content"][0]["text"]
    assert shown == rf"It is {MARK}\(a^2\){MARK} for $5 or `$b$`."
    chat.edit(row, turn("It is $a^2$ for $5 or `$b$`. Sure."))  # as the box has it
    assert chat.transcript.messages[1]["content"] == "It is $a^2$ for $5 or `$b$`. Sure."


@pytest.mark.parametrize("act", ["regenerate", "proceed", "edit", "undo", "redo"])
def test_nothing_of_the_past_changes_while_an_answer_runs(chat, act):
    chat.ask(turn())
    arguments = {"edit": (0, turn("x")), "undo": (), "redo": ()}.get(act, (turn(),))
    with pytest.raises(UsageError, match="still running"):
        getattr(chat, act)(*arguments)
    assert roles(chat) == ["user"] and chat.pending == []
    chat.end()


def _raise():
    raise UsageError("wanted failure")
    yield


def test_a_long_prompt_is_told_while_it_is_read_and_given_back_when_it_is_stopped(controller):
    runner = controller.session.runner
    runner.parts, runner.prefill = 4, 240
    tab = owner()
    controller.send(tab, turn("a long story"))
    chat = controller.session_of(tab)
    told = "reading the conversation: 3,000 of 4,000 tokens …"
    wait_for(lambda: controller._waiting_for(chat._run.job) == told)
    job = chat._run.job
    chat.stop()
    ended(chat)
    assert [event.reason for event in job.trace] == ["cancelled"]
    assert controller._waiting_for(job) == "stopping …"
    assert chat.transcript.messages == () and chat.pop_returned() == "a long story"


def test_a_failure_before_any_text_gives_the_messages_back(controller):
    controller.session.runner.reply = lambda prompt, settings: iter(_raise())
    tab = owner()
    controller.send(tab, turn("keep me"))
    chat = controller.session_of(tab)
    ended(chat)
    assert chat.transcript.messages == ()
    view = controller.refresh(tab)
    line = json.loads(view.next)
    assert (line["given"], line["back"]) == (1, "keep me") and "wanted failure" in view.live
    assert json.loads(controller.refresh(tab).next)["given"] == 1  # given back once


def test_a_failure_in_the_middle_keeps_the_text_and_gives_back_what_waits(chat):
    chat.session.runner.fail_at = 5
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.enter()
    ended(chat)
    assert chat.transcript.messages[1]["content"]
    assert chat.transcript.notes[1].startswith("stopped: the script says")
    assert "the script says" in chat.error and chat.pop_returned() == "two"


def test_sessions_leave_the_memory_by_age_and_by_number(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_SESSIONS", 3)
    sessions = SessionStore(controller.session, lambda answer: None)
    made = [sessions.open() for _ in range(3)]
    made[1].audience.seen_at -= 10
    sessions.open()
    assert sessions.find(OWNER, made[1].id) is None
    assert sessions.find(OWNER, made[0].id) is made[0]
    made[0].audience.seen_at -= answer_run.IDLE_SECONDS + 1
    sessions.open()
    assert sessions.find(OWNER, made[0].id) is None


def test_steps_of_old_answers_are_let_go(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_STEPS_KEPT", 70)
    chat = controller.sessions.open()
    for _ in range(3):
        chat.ask(turn())
        ended(chat)
    assert [len(chat.transcript.answers[place].steps) for place in (1, 3, 5)] == [0, 30, 30]
    assert chat.transcript.answers[1].pieces  # the tint is still there


def test_an_answer_that_was_cut_while_it_thought_goes_on_thinking(chat):
    """What came is there, folded; the request and what is kept have it apart from the text."""
    runner = chat.session.runner
    runner.pieces, runner.steps = ("<think>", *["Hm, "] * 400), 3
    chat.ask(turn())
    ended(chat)
    (_, said) = chat.transcript.messages
    assert said["content"] == "" and set(said["reasoning"].split()) == {"Hm,"}
    assert [row.kind for row in rows_of(chat.transcript)] == ["text", "reasoning"]
    assert '{"thought":' in chat.answer.live and not chat.answer.pieces
    chat.proceed(turn())
    ended(chat)
    prompt = runner.prompts[-1]
    assert prompt[-1] == {"role": "assistant", "content": "", "reasoning": said["reasoning"]}
    assert chat.transcript.messages[1]["reasoning"].startswith(said["reasoning"])
    chat.ask(turn())
    ended(chat)
    assert runner.prompts[-1][1]["reasoning"].startswith(said["reasoning"])
