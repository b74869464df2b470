// Versions of a message: "‹ 2/3 ›" under it; a branch and the strips of answers. The value is {"rows": [[row,
// version, of how many]], "strips": [[row, ...]] (see strips)}; Gradio draws the rows, so these are put
// back whenever it has drawn them anew.
import { blockOf } from "./block.js";
import { button, draw, inNextFrame, make, whenDrawn, withRole } from "./elements.js";
import { page, tell } from "./page.js";

const STRIP_HIGH = 22;
const MOST_SHOWN = 60; // bars; of more steps the most tokens of some neighbours
const strips = new Map(); // row -> [model, speed, ratio, tokens of each step, are its steps known]

// Below an answer, before the buttons of its row: which model gave it and how fast, with a small
// timeline of its steps. It opens the microscope on that answer.
function drawByline(bar, row) {
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
  const width = bars.length * 4;
  // in a narrow strip thinner bars, as high
  const size = { width, height: STRIP_HIGH, viewBox: `0 0 ${width} ${STRIP_HIGH}`, preserveAspectRatio: "none" };
  const svg = draw("svg", { class: "small-bars", "aria-hidden": "true", ...size });
  const most = Math.max(2, ...bars);
  for (let level = 1; level <= 5; level++) {
    const line = bars.map((tokens, at) => {
      const high = Math.max(3, (tokens / most) * STRIP_HIGH);
      return Math.min(5, tokens) === level ? `M${at * 4} ${STRIP_HIGH}v${-high}h3v${high}z` : "";
    });
    svg.append(draw("path", { class: `t${level}`, d: line.join("") }));
  }
  return svg;
}

const { root, trigger, onValue } = blockOf("versions");
let wanted = new Map(); // row -> [version, of]

function control(row, version, count) {
  const box = make("div", "versions");
  const step = (by, sign, label) => {
    const node = button("", sign, () => {
      refocus = [row, by];
      trigger("show_version", { row, version: version + by });
    });
    node.setAttribute("aria-label", label);
    node.dataset.by = by;
    node.disabled = version + by < 1 || version + by > count;
    return node;
  };
  box.dataset.state = `${version}/${count}`;
  withRole(box, "group", `Version ${version} of ${count}`);
  box.append(
    step(-1, "‹", "Earlier version"),
    make("span", "", `${version}/${count}`),
    step(1, "›", "Later version"),
  );
  return box;
}

// What is done with an answer as it is. hasSteps: whether they are known.
function drawActs(bar, row, hasSteps) {
  const old = bar.querySelector(":scope > .answer-acts");
  const key = `${row}|${hasSteps}`;
  if (old?.dataset.key === key) return;
  old?.remove();
  const acts = make("div", "answer-acts");
  acts.dataset.key = key;
  acts.append(act("branch", "Branch", "Branch: go on from here in a new chat", row));
  if (hasSteps) acts.append(act("save_replay", "Save", "Save: one HTML file that replays the steps", row));
  bar.append(acts);
}

function act(name, text, title, row) {
  const node = button(name === "branch" ? "branch" : "save-answer", text, () => trigger(name, { row }));
  node.title = title;
  node.setAttribute("aria-label", title);
  return node;
}

// The buttons that Gradio has under a row.
function barOf(row) {
  const next = row.nextElementSibling;
  return next?.classList.contains("message-buttons") ? next : null;
}

let refocus = null; // where the keyboard was when the rows are drawn anew

function drawRows() {
  const all = document.querySelectorAll("#history .message-row");
  all.forEach((node, row) => {
    const now = wanted.get(row);
    const bar = barOf(node);
    if (!bar) return;
    if (node.classList.contains("bot-row")) drawActs(bar, row, Boolean(strips.get(row)?.at(-1)));
    drawByline(bar, row);
    const old = bar.querySelector(":scope > .versions");
    const state = now ? now.join("/") : "";
    if (old && old.dataset.state === state && old.dataset.row === String(row)) return;
    old?.remove();
    if (!now) return;
    const made = control(row, ...now);
    made.dataset.row = row;
    bar.append(made);
  });
  if (!refocus) return;
  const [row, by] = refocus;
  const group = all[row] && barOf(all[row])?.querySelector(":scope > .versions");
  const target = group?.querySelector(`[data-by="${by}"]:not(:disabled)`) || group?.querySelector("button:not(:disabled)");
  if (!group?.contains(document.activeElement)) target?.focus();
}

function take(line) {
  if (!line) return;
  wanted = new Map(line.rows.map(([row, ...state]) => [row, state]));
  strips.clear();
  for (const [row, ...made] of line.strips) strips.set(row, made);
  drawRows();
}

const conversation = root.closest("#conversation");
const drawSoon = inNextFrame(drawRows);
whenDrawn("history", drawSoon);
root.hidden = true;
conversation.addEventListener("focusin", (event) => {
  if (!event.target.closest(".versions")) refocus = null;
});
document.addEventListener("pointerdown", () => (refocus = null));
onValue(take);
