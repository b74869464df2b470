// Which step is shown, and where it comes from: what was received is kept, the rest asked for.
const KEPT_STEPS = 600;
const PATIENCE = 4000; // ms until a step that did not come is asked for again

function goTo(step) {
  if (!data || !data.figures.steps) return;
  pinned = Math.max(0, Math.min(data.figures.steps - 1, step));
  if (!play) isScrolledByHand = false;
  if (asked && asked.step !== pinned) hideCard();
  if (steps.has(pinned)) shown = steps.get(pinned);
  else request();
  schedule();
}

function goLive() {
  stopPlay();
  hideCard();
  pinned = null;
  if (live) shown = live;
  if (flying) flying.isDropped = true;
  if (!window.medusaShow?.isOn()) trigger("pick", { step: null, answer: data ? data.answer : null });
  schedule();
}

// One request at a time: a drag over a hundred bars asks for as many as the server can give.
function request() {
  if ((flying && !flying.isDropped) || window.medusaShow?.isOn()) return;
  const mine = (flying = { step: pinned });
  trigger("pick", { step: pinned, answer: data.answer });
  setTimeout(() => {
    if (flying !== mine) return; // it came
    flying = null;
    if (pinned !== null && !steps.has(pinned) && element.isConnected) request();
  }, PATIENCE);
}

function keep(step) {
  if (!step) return;
  steps.delete(step.index);
  steps.set(step.index, step);
  if (steps.size > KEPT_STEPS) steps.delete(steps.keys().next().value);
}

function forget() {
  stopPlay();
  [pinned, flying, shown, live, shape] = [null, null, null, null, null];
  [widest, largest, asIf, isScrolledByHand] = [0, LARGEST, null, false];
  known = { bars: [], times: [], nodes: [], ends: [] };
  steps = new Map();
  chart = emptyChart();
  line = { total: 0, pitch: 14, now: 0, from: 0 };
  scrolled = 0;
  hideCard();
  hideTip();
}

function learn(next) {
  let end = next.at;
  if (!next.first) known.begin = next.at;
  if (next.bars.length && next.first < chart.next && known.bars[next.first] === undefined)
    chart = emptyChart();
  next.bars.forEach((tokens, place) => {
    known.bars[next.first + place] = tokens;
    known.times[next.first + place] = next.times[place];
    known.nodes[next.first + place] = next.nodes[place];
    known.ends[next.first + place] = end += next.lengths[place];
  });
}

// ---- from the words of the answer (hover.js) ----

window.medusaWords = {
  isShown: (answer) => data?.answer === answer && Boolean(data.ended),
  // The step that a character of the answer's text came in: {step, from, to}, or null. What stands
  // before the first step came with the prompt.
  stepAt(at) {
    const step = known.ends.findIndex((end) => at < end);
    const from = step > 0 ? known.ends[step - 1] : known.begin;
    if (step < 0 || from === undefined || at < from) return null;
    return { step, from, to: known.ends[step] };
  },
  point(step) {
    const before = barRow.querySelector(".pointed");
    before?.classList.remove("pointed");
    if (step === null) return before && hideTip();
    const bar = barRow.querySelector(`[data-step="${step}"]:not([display])`);
    bar?.classList.add("pointed");
    const row = bars.getBoundingClientRect();
    const left = bar ? bar.getBoundingClientRect().left : row.left;
    showTip({ left, top: row.top, bottom: innerHeight }, stepWords(known, step, line.total), []);
  },
  go(step) {
    stopPlay();
    goTo(step);
  },
};
