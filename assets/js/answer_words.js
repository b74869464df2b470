// From the words of the answer to its steps (hover.js).
import { panel } from "./panel.js";
import { goTo } from "./steps.js";
import { barRow, bars, stepWords, stopPlay } from "./timeline.js";
import { hideTip, showTip } from "./walk.js";

export const answerWords = {
  isShown: (answer) => panel.data?.answer === answer && Boolean(panel.data.ended),
  // The step that a character of the answer's text came in: {step, from, to}, or null. What stands
  // before the first step came with the prompt.
  stepAt(at) {
    const step = panel.known.ends.findIndex((end) => at < end);
    const from = step > 0 ? panel.known.ends[step - 1] : panel.known.begin;
    if (step < 0 || from === undefined || at < from) return null;
    return { step, from, to: panel.known.ends[step] };
  },
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
