// The figures of the answer, and the same with the times of a GPU that is named: built once, then only
// the texts that changed are written.
import { make, say } from "./elements.js";
import { count, duration, number } from "./format.js";
import { NODES, gpuMs, pace, paceMode } from "./pace.js";
import { panel } from "./panel.js";

export const figures = make("div", "figures");
export const plain = make("p", "plain");
export const facts = make("div", "facts");
// The parts of a step, as they are styled and as they are called.
const PARTS_OF_A_STEP = { backbone: "model", heads: "heads", rest: "rest" };
const tiles = {
  ratio: tile("times plain", "speed against plain decoding: tokens per step ÷ overhead", true, "plain"),
  per_step: tile("tokens/step", "the paper's acceleration rate", false),
  rate: tile("tokens/s", "decoding, without reading the prompt", false),
  ms: tile("ms/step", "mean over the steps so far", false),
};
const split = makeSplit();
const context = makeContext();
const first = fact("first token");
const prefill = fact("prompt read");
const beginning = make("div", "beginning");
beginning.append(first.node, prefill.node);
const measured = make("p", "measured");
facts.append(split.node, context.node, beginning, measured);

// name: what stands beside the value, where that is not the figure's own name.
function tile(label, title, strong, name = label) {
  const node = make("div", strong ? "tile strong" : "tile");
  const value = make("span", "value", "–");
  const under = make("span", "under");
  node.append(value, make("span", "label", name), under);
  node.dataset.figure = label;
  node.title = title;
  figures.append(node);
  return { value, under };
}

function fact(label) {
  const node = make("div", "fact");
  const value = make("span", "value", "–");
  const under = make("span", "under");
  node.dataset.figure = label;
  node.append(make("span", "label", label), value, under);
  return { node, value, under };
}

function makeSplit() {
  const node = make("div", "fact split");
  const bar = make("div", "split-bar");
  bar.setAttribute("aria-hidden", "true");
  const parts = Object.keys(PARTS_OF_A_STEP).map((name) => bar.appendChild(make("i", name)));
  const keys = make("div", "keys");
  const values = Object.entries(PARTS_OF_A_STEP).map(([name, label]) => {
    const key = make("span", `key ${name}`);
    const value = make("b", "", "–");
    value.dataset.part = name;
    key.append(make("i", name), `${label} `, value);
    keys.append(key);
    return value;
  });
  node.append(make("span", "label", "one step, ms"), bar, keys);
  return { node, parts, values };
}

function makeContext() {
  const made = fact("context");
  const meter = make("div", "meter");
  const fill = meter.appendChild(make("i"));
  meter.setAttribute("aria-hidden", "true");
  made.node.append(meter);
  return { ...made, fill };
}

// f: measured on this machine. What is shown at the clock of a GPU has the figures of that in its
// tiles (pace.js), and those of this machine in the line below.
export function drawFigures(f) {
  const modelled = modelledFigures(f);
  drawTiles(f, modelled || f);
  figures.classList.toggle("is-modelled", Boolean(modelled));
  drawSplit(f.split_ms);
  drawContext(f);
  say(first.value, duration(f.first_ms));
  say(first.under, "from Send");
  say(prefill.value, duration(f.prefill_ms));
  const reused = f.reused ? `, ${count(f.reused)} reused` : "";
  say(prefill.under, f.prompt === null ? "" : `${count(f.prompt)} tokens${reused}`);
  drawPlain(f, Boolean(modelled));
}

function drawTiles(f, on) {
  const last = f.recent === null ? "" : `last second ${number(f.recent, 1)}`;
  say(tiles.rate.value, number(on.rate, 1));
  say(tiles.rate.under, on.where || last);
  const ratio = on.ratio === null ? "–" : `${on.ratio.toFixed(2)}×`;
  say(tiles.ratio.value, f.is_plain ? "–" : ratio);
  tiles.ratio.value.classList.toggle("under-one", on.ratio !== null && on.ratio < 1);
  const paid = on.overhead !== null && on.per_step !== null;
  say(tiles.ratio.under, paid ? `${number(on.per_step, 2)} ÷ ${number(on.overhead, 2)}` : "");
  say(tiles.per_step.value, number(on.per_step, 2));
  say(tiles.per_step.under, `${count(f.steps)} step${f.steps === 1 ? "" : "s"}`);
  say(tiles.ms.value, number(on.ms, 1));
  const cost = on.is_noise ? "about a plain step" : `${number(on.overhead, 2)} plain steps`;
  say(tiles.ms.under, on.overhead === null ? "" : cost);
}

function drawSplit(parts) {
  split.node.classList.toggle("is-empty", !parts);
  const whole = parts ? parts.reduce((sum, part) => sum + part, 0) : 1;
  split.parts.forEach((_, place) => {
    const share = parts ? String(Math.round((100 * parts[place]) / whole)) : "0";
    if (split.parts[place].style.flexGrow !== share) split.parts[place].style.flexGrow = share;
    say(split.values[place], parts ? number(parts[place], parts[place] < 0.95 ? 2 : 1) : "–");
  });
}

function drawContext(f) {
  const share = f.used !== null && f.context ? f.used / f.context : 0;
  const left = f.context ? Math.max(0, f.context - (f.used || 0)) : null;
  say(context.value, f.used === null ? "–" : count(f.used));
  const isFull = share >= 0.9;
  const rest = left === null ? "" : `of ${count(f.context)}, ${count(left)} left`;
  say(context.under, isFull ? `⚠ nearly full: ${count(left)} left of ${count(f.context)}` : rest);
  context.node.classList.toggle("is-full", isFull);
  context.fill.style.width = `${Math.min(100, share * 100).toFixed(1)}%`;
}

// The show drafts the same number of nodes in every step, whether they pay here or not: that they
// do not is no fault to mend.
function measuredHere(f) {
  const ratio = f.ratio === null ? "" : `, ${f.ratio.toFixed(2)}× plain decoding's ${number(f.plain, 1)}`;
  const why = f.slower ? ": so many nodes do not pay here; full speed drafts fewer" : "";
  return `Measured on this machine: ${number(f.rate, 1)} tokens/s${ratio}${why}.`;
}

function drawPlain(f, isModelled) {
  plain.classList.toggle("slower", Boolean(f.slower) && !isModelled);
  let text = "";
  if (isModelled) text = measuredHere(f);
  else if (f.is_plain) text = "This is plain decoding, which the others are measured against.";
  else if (f.plain === null) text = "Plain decoding is timed right after the answer, on its last tokens.";
  else text = `Plain decoding: ${f.plain.toFixed(1)} tokens/s, timed right after this answer.`;
  const loop = f.loop ?? null;
  const rest = loop === null ? "" : ` From step ${loop + 1} on the answer repeats itself; the figures leave that out.`;
  say(measured, text + rest);
  say(plain, f.slower && !isModelled ? f.slower : "");
}

// What the tiles show in place of figures f of this machine; null at another pace, and where the
// tokens a step of so many nodes are not known.
export function modelledFigures(f) {
  if (paceMode() !== "gpu" || !f.steps) return null;
  const [own, ...rows] = gpuRows();
  const row = f.is_plain ? own : rows.find((one) => one.nodes === pace.nodes);
  if (row.rate === null) return null;
  const { ms, tokens, rate, gain } = row;
  const overhead = f.is_plain ? null : ms / own.ms;
  return { ms, rate, overhead, per_step: tokens, ratio: gain, where: `modelled: ${pace.gpu}` };
}

// Tokens a step with the first m nodes of the answer's drafts, which are in order of value: of all
// steps or none, for after a reload only those are here that were looked at.
function tokensWith(m) {
  const told = panel.known.bars.length;
  if (m === 1 || !told) return m === 1 ? 1 : null;
  if (panel.known.nodes.every((nodes) => nodes === m)) return panel.data.figures.per_step;
  const seen = [...panel.steps.values()].filter((step) => step.state);
  if (seen.length < told || panel.known.nodes.every((nodes) => nodes < m)) return null;
  const accepted = (step) => [...step.state.slice(1, m)].filter((state) => state === "a").length;
  return 1 + seen.reduce((sum, step) => sum + accepted(step), 0) / seen.length;
}

// What plain decoding and each size of the tree would give on that GPU; null before any step.
export function gpuRows() {
  return [1, ...NODES].map((nodes) => {
    const [ms, tokens] = [gpuMs(pace, nodes), tokensWith(nodes)];
    const rate = tokens === null ? null : (tokens / ms) * 1000;
    return { nodes, ms, tokens, rate, gain: rate === null ? null : (rate * gpuMs(pace, 1)) / 1000 };
  });
}
