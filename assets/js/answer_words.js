// From the words of the answer to its steps (hover.js).
import { stepOfText } from "./known_steps.js";
import { panel } from "./panel.js";
import { goTo } from "./steps.js";
import { barRow, bars, stepWords, stopPlay } from "./timeline.js";
import { hideTip, showTip } from "./walk.js";

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
