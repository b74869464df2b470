// Below an answer, before the buttons of its row: which model gave it and how fast, with a small
// timeline of its steps. It opens the microscope on that answer.
import { blockOf } from "./block.js";
import { button, make } from "./elements.js";
import { page, tell } from "./page.js";

const { trigger } = blockOf("versions");
const STRIP_HIGH = 22;
const MOST_SHOWN = 60; // bars; of more steps the most tokens of some neighbours
export const strips = new Map(); // row -> [model, speed, ratio, tokens of each step, are its steps known]

export function drawByline(bar, row) {
  const now = strips.get(row);
  const old = bar.querySelector(":scope > .answer-strip");
  const key = now ? JSON.stringify([row, now]) : "";
  if ((old?.dataset.key || "") === key) return;
  old?.remove();
  if (!now) return;
  const [model, speed, ratio, steps, isKnown] = now;
  const box = isKnown && speed ? button("answer-strip", "", () => openSteps(row)) : make("div", "answer-strip");
  box.dataset.key = key;
  box.title = [model, speed].filter(Boolean).join(" · ");
  const isShow = ratio < 1 && page.model?.isDemo; // it drafts 64 nodes, whether they pay here or not
  if (ratio && !isShow) {
    const gain = make("span", "gain");
    gain.append(make("b", ratio >= 1 ? "" : "under-one", `${ratio.toFixed(1)}×`), " plain");
    box.append(gain);
  }
  const words = [...(speed ? speed.split(" · ").reverse() : []), model].filter((word) => word);
  for (const word of words) box.append(make("span", word === model ? "byline-model" : "", word));
  if (steps.length && speed) box.append(smallTimeline(steps));
  bar.prepend(box);
}

function openSteps(row) {
  tell("medusa-microscope");
  trigger("steps", { index: row, strip: true });
}

function smallTimeline(steps) {
  const each = Math.ceil(steps.length / MOST_SHOWN);
  const bars = [];
  for (let at = 0; at < steps.length; at += each) bars.push(Math.max(...steps.slice(at, at + each)));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "small-bars");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("viewBox", `0 0 ${bars.length * 4} ${STRIP_HIGH}`);
  svg.setAttribute("width", bars.length * 4);
  svg.setAttribute("height", STRIP_HIGH);
  svg.setAttribute("preserveAspectRatio", "none"); // in a narrow strip thinner bars, as high
  const most = Math.max(2, ...bars);
  for (let level = 1; level <= 5; level++) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const line = bars.map((tokens, at) => {
      const high = Math.max(3, (tokens / most) * STRIP_HIGH);
      return Math.min(5, tokens) === level ? `M${at * 4} ${STRIP_HIGH}v${-high}h3v${high}z` : "";
    });
    path.setAttribute("class", `t${level}`);
    path.setAttribute("d", line.join(""));
    svg.append(path);
  }
  return svg;
}
