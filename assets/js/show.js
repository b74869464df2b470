// An answer that is shown slower than it comes: a stage between its stream and the blocks that draw
// it. Text and tree go on by one step index, at the pace of pace.js. The stream
// brings {answer, since, begin, thought, steps: [[text, view, reasoning]], ended, tail}.
import { blockOf } from "./block.js";
import { dueBy } from "./known_steps.js";
import { paceMode, paceOf } from "./pace.js";
import { store, stored, tell } from "./page.js";
import { setSaid } from "./said.js";

const { trigger } = blockOf("next");
const SHOWN_KEY = "medusa-chat-shown";
const LOOK = 30; // ms between two looks at the clock
const SURE = 4; // steps from which it is known whether this machine keeps the pace
let reel = null;
let before = { answer: null, doneAt: 0 }; // the reel that ended: a stream that begins anew goes on there

export const stage = { now: () => performance.now() }; // ms; a test has a clock of its own

function beginReel(line) {
  if (reel) clearInterval(reel.timer);
  const resumed = shownBefore(line.answer);
  reel = {
    ...{ answer: line.answer, steps: [], at: -1, ended: false, tail: "", whole: "", panel: null },
    ...{ doneAt: before.answer === line.answer ? before.doneAt : stage.now(), resumed, isPaused: false, isSkipped: false, isBehind: false, isOver: false },
    timer: setInterval(pump, LOOK),
  };
  addThought(line.thought);
  addPieces(line.begin);
  tellReel();
}

export function isReeling() {
  return Boolean(reel);
}

// What the panel shows beside its steps.
export function setReelPanel(line, panel) {
  if (reel?.answer !== line.answer) beginReel(line);
  reel.panel = panel;
}

export function endReel() {
  if (!reel) return;
  clearInterval(reel.timer);
  const { answer, doneAt, isBehind, isOver } = reel;
  [before, reel] = [{ answer, doneAt }, null];
  tell("medusa-show", { isBehind });
  if (isBehind && isOver) tell("medusa-replay");
}

export function takeReel(line) {
  if (!reel || reel.answer !== line.answer) beginReel(line);
  reel.steps.push(...line.steps.slice(reel.steps.length - line.since));
  reel.ended = line.ended;
  reel.tail = line.tail;
  noticeSpeed();
  pump();
}

// At the clock of a GPU that is faster than this machine the steps would stutter: they are shown as
// they come, and replayed at the end.
function noticeSpeed() {
  if (reel.isBehind || reel.steps.length < SURE || paceMode() !== "gpu") return;
  const mine = reel.steps.reduce((sum, [, view]) => sum + view.ms, 0);
  const theirs = reel.steps.reduce((sum, step) => sum + pauseOf(step), 0);
  if (mine <= theirs) return;
  reel.isBehind = true;
  tellReel();
}

function pauseOf([, view]) {
  return paceOf(view.nodes, view.ms);
}

function isRushed() {
  const mode = paceMode();
  return reel.isSkipped || reel.isBehind || mode === "full";
}

// Shows what is due by now.
function pump() {
  if (!reel || reel.isOver) return;
  const [now, last] = [stage.now(), reel.steps.length - 1];
  let to = Math.max(reel.at, Math.min(last, reel.resumed));
  if (isRushed()) to = last;
  else if (reel.isPaused) reel.doneAt = now;
  else to = dueBy(reel, now, to, pauseOf, paceMode() === "step");
  if (to > reel.at) showUpTo(to);
  if (reel.ended && reel.at === last && (isRushed() || isLastSeen(now))) finishReel();
}

function isLastSeen(now) {
  const isByHand = paceMode() === "step";
  return isByHand || !reel.steps.length || now >= reel.doneAt + pauseOf(reel.steps[reel.at]);
}

function showUpTo(to) {
  const from = reel.at + 1;
  const seen = reel.steps.slice(from, to + 1);
  reel.at = to;
  const at = reel.whole.length;
  addThought(seen.map(([, , thought]) => thought).join(""));
  addPieces(seen.flatMap(([text, view]) => [view.tokens, text]));
  const views = seen.map(([, view]) => view);
  const all = reel.steps.slice(0, to + 1);
  const tokens = all.reduce((sum, [, view]) => sum + view.tokens, 0);
  tell("medusa-panel", {
    ...reel.panel,
    ended: reel.ended && to === reel.steps.length - 1,
    figures: { ...reel.panel.figures, steps: to + 1, per_step: tokens / (to + 1), used: usedBy(views.at(-1)) },
    ...{ first: from, at, lengths: seen.map(([text]) => text.length) },
    bars: views.map((view) => view.tokens),
    times: views.map((view) => view.ms),
    nodes: views.map((view) => view.nodes),
    steps: views,
    step: views.at(-1),
  });
  store("sessionStorage", SHOWN_KEY, `${reel.answer}:${reel.at}`);
}

// Tokens in the context after a step: those before its root, the root, and its own.
function usedBy({ prefix, tokens }) {
  return prefix + 1 + tokens;
}

function addPieces(pieces) {
  const full = pieces.flatMap((_, at) => (at % 2 && pieces[at] ? [pieces[at - 1], pieces[at]] : []));
  if (!full.length) return;
  tell("medusa-lines", `${JSON.stringify(full)}\n`);
  for (let at = 1; at < full.length; at += 2) reel.whole += full[at];
  setSaid(reel.whole);
}

function addThought(thought) {
  if (thought) tell("medusa-lines", `${JSON.stringify({ thought })}\n`);
}

function finishReel() {
  addPieces([reel.steps.at(-1)?.[1].tokens ?? 1, reel.tail]);
  reel.isOver = true;
  store("sessionStorage", SHOWN_KEY, "");
  trigger("shown", { answer: reel.answer });
}

function tellReel() {
  tell("medusa-show", { isBehind: reel.isBehind });
}

// ---- where a reload goes on ----

function shownBefore(answer) {
  const [of, at] = (stored("sessionStorage", SHOWN_KEY) || "").split(":").map(Number);
  return of === answer && Number.isInteger(at) ? at : -1;
}

// ---- what is asked of it: by the play button, the keys, Stop, and a message that waits ----

export const show = {
  isOn: () => Boolean(reel) && !reel.isOver,
  look: pump, // at the clock, now
  received: () => Boolean(reel?.ended),
  isPaused: () => Boolean(reel?.isPaused),
  shown: () => (reel && !reel.isOver && !reel.isBehind ? reel.at + 1 : ""),
  toggle() {
    reel.isPaused = !reel.isPaused;
    tellReel();
  },
  next() {
    if (reel.at < reel.steps.length - 1) showUpTo(reel.at + 1);
    pump();
  },
  skip() {
    if (reel) reel.isSkipped = true;
    pump();
  },
};
