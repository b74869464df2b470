// Which step is shown, and where it comes from: what was received is kept, the rest asked for.
import { hideCard } from "./card.js";
import { learnFrom, nothingKnown, stepOfText } from "./known_steps.js";
import { LARGEST, panel, root, schedule, trigger } from "./panel.js";
import { emptyChart } from "./rates.js";
import { show } from "./show.js";
import { barRow, bars, stepWords, stopPlay } from "./timeline.js";
import { hideTip, showTip } from "./walk.js";

const KEPT_STEPS = 600;
const PATIENCE = 4000; // ms until a step that did not come is asked for again

export function goTo(step) {
  if (!panel.data?.figures.steps) return;
  panel.pinned = Math.max(0, Math.min(panel.data.figures.steps - 1, step));
  if (!panel.play) panel.isScrolledByHand = false;
  if (panel.asked && panel.asked.step !== panel.pinned) hideCard();
  if (panel.steps.has(panel.pinned)) panel.shown = panel.steps.get(panel.pinned);
  else request();
  schedule();
}

export function goLive() {
  stopPlay();
  hideCard();
  panel.pinned = null;
  if (panel.live) panel.shown = panel.live;
  if (panel.flying) panel.flying.isDropped = true;
  if (!show.isOn()) trigger("pick", { step: null, answer: panel.data ? panel.data.answer : null });
  schedule();
}

// One request at a time: a drag over a hundred bars asks for as many as the server can give.
export function request() {
  if ((panel.flying && !panel.flying.isDropped) || show.isOn()) return;
  const mine = (panel.flying = { step: panel.pinned });
  trigger("pick", { step: panel.pinned, answer: panel.data.answer });
  setTimeout(() => {
    if (panel.flying !== mine) return; // it came
    panel.flying = null;
    if (panel.pinned !== null && !panel.steps.has(panel.pinned) && root.isConnected) request();
  }, PATIENCE);
}

export function keep(step) {
  if (!step) return;
  panel.steps.delete(step.index);
  panel.steps.set(step.index, step);
  if (panel.steps.size > KEPT_STEPS) panel.steps.delete(panel.steps.keys().next().value);
}

export function forget() {
  stopPlay();
  [panel.pinned, panel.flying, panel.shown, panel.live, panel.shape] = [null, null, null, null, null];
  [panel.widest, panel.largest, panel.asIf, panel.isScrolledByHand] = [0, LARGEST, null, false];
  panel.known = nothingKnown();
  panel.steps = new Map();
  panel.chart = emptyChart();
  panel.line = { total: 0, pitch: 14, now: 0, from: 0 };
  panel.scrolled = 0;
  hideCard();
  hideTip();
}

export function learn(next) {
  if (next.bars.length && next.first < panel.chart.next && panel.known.bars[next.first] === undefined)
    panel.chart = emptyChart();
  learnFrom(panel.known, next);
}

// From the words of the answer to its steps (hover.js).
export const answerWords = {
  isShown: (answer) => panel.data?.answer === answer && Boolean(panel.data.ended),
  stepAt: (at) => stepOfText(panel.known, at),
  point(step) {
    const before = barRow.querySelector(".pointed");
    before?.classList.remove("pointed");
    if (step === null) return before && hideTip();
    const bar = barRow.querySelector(`[data-step="${step}"]:not([display])`);
    bar?.classList.add("pointed");
    const row = bars.getBoundingClientRect();
    const left = bar ? bar.getBoundingClientRect().left : row.left;
    showTip({ left, top: row.top, bottom: innerHeight }, stepWords(panel.known, step, panel.line.total), []);
  },
  go(step) {
    stopPlay();
    goTo(step);
  },
};
