// The panel: figures, chart, the tree of one step or its mask, a card, the timeline, from one JSON
// string. One frame draws the newest value, however many came.
import { card } from "./card.js";
import { chartBox, drawChart, drawDepths } from "./chart.js";
import { hide, say } from "./elements.js";
import {
  describeSoon,
  drawHead,
  drawLegend,
  drawnNodes,
  fill,
  follower,
  lay,
  neededWidth,
} from "./layout.js";
import { makeMask } from "./mask.js";
import { drawFigures, facts, figures, plain } from "./numbers.js";
import { drawPace } from "./pacebar.js";
import { tell } from "./page.js";
import {
  LARGEST,
  NARROW,
  PLAIN,
  UNDRAFTED,
  area,
  body,
  box,
  depths,
  edges,
  facing,
  gpuBox,
  head,
  hollow,
  legend,
  names,
  nodes,
  onValue,
  panel,
  pen,
  picture,
  png,
  root,
  schedule,
  setValue,
  single,
  svg,
  taken,
  times,
  tip,
  viewButtons,
  views,
  widthIn,
  widthsOf,
} from "./panel.js";
import { CHIP } from "./places.js";
import { show } from "./show.js";
import { forget, keep, learn, request } from "./steps.js";
import {
  back,
  drawTimeline,
  pacebar,
  scrollTimeline,
  strip,
  timeline,
  toNewest,
} from "./timeline.js";
import { tellNode } from "./walk.js";
import { watching } from "./watch.js";
import { judged } from "./whatif.js";
import { columnName } from "./words.js";

const NO_FIGURES = {
  ...{ rate: null, recent: null, per_step: null, ms: null, split_ms: null, steps: 0, used: null },
  ...{ context: null, plain: null, ratio: null, overhead: null, slower: "", is_plain: false },
  ...{ prefill_ms: null, prompt: null, reused: null, first_ms: null },
};
const mask = makeMask(pen);

svg.append(names, edges, follower.group, taken, nodes);
box.append(svg);
picture.append(legend, box, single, mask.box);
times.append(facts, chartBox);
area.append(picture);
body.append(area, times, depths, gpuBox);
facing.append(views, head);
pacebar.append(png);
root.replaceChildren(watching, figures, plain, timeline, facing, body, card, hollow, tip);
for (const node of [root, chartBox, strip, box, picture]) widthsOf.set(node, 0);
const resized = new ResizeObserver((entries) => {
  const before = widthsOf.get(picture);
  for (const { target } of entries) widthsOf.set(target, target.clientWidth);
  const high = root.clientHeight - body.offsetTop - legend.offsetHeight - 8;
  if (widthsOf.get(picture) !== before || high !== panel.room) panel.largest = LARGEST;
  panel.room = high;
  schedule();
});

function take(next) {
  if (!next || !panel.data || next.answer !== panel.data.answer || next.figures.steps < panel.data.figures.steps) forget();
  panel.data = next;
  tell("medusa-answer", next ? next.answer : null);
  if (!next) return schedule();
  learn(next);
  next.steps?.forEach(keep);
  keep(next.step);
  if (!next.pinned) panel.live = next.step;
  else if (panel.flying) {
    const isDropped = panel.flying.isDropped;
    panel.flying = null;
    if (!isDropped && panel.pinned !== null && !panel.steps.has(panel.pinned)) request();
  } else if (panel.pinned === null) panel.pinned = next.step.index; // chosen elsewhere on the page
  panel.shown = panel.pinned === null ? panel.live || next.step : panel.steps.get(panel.pinned) || panel.shown || next.step;
  schedule();
}

// While steps stream in, what is read and not watched is drawn less often: numbers that change 24
// times a second cannot be read, and cost as much as the tree.
const READ_EVERY = 180; // ms
let readAt = 0;

function render() {
  const now = performance.now();
  const isReadable = !streamed || panel.pinned !== null || show.isOn() || now > readAt + READ_EVERY;
  if (isReadable) readAt = now;
  drawAll(isReadable);
  if (isReadable) scrollTimeline();
  if (isReadable) scrollToPath(); // last: it lays out what was written before it
}

// A path that is not in the tree's window is scrolled to, its end before its root; after a hand has
// scrolled it, not before a step is chosen or another answer begins.
let seenPath = ""; // of which answer and step
function scrollToPath() {
  const here = panel.shown?.parent ? `${panel.data.answer}.${panel.shown.index}` : "";
  if (!here || here === seenPath || panel.isScrolledByHand || !box.clientHeight) return;
  seenPath = here;
  const path = panel.chips.flatMap(({ at }, node) => (panel.shown.state[node] === "a" ? [at] : []));
  const [first, last] = [Math.min(...path) - CHIP * panel.scale, Math.max(...path) + CHIP * panel.scale];
  if (last > box.scrollTop + box.clientHeight) box.scrollTop = last - box.clientHeight;
  else if (first < box.scrollTop) box.scrollTop = first;
}

for (const name of ["wheel", "touchmove", "pointerdown"]) {
  const isBar = (event) => name !== "pointerdown" || event.target === box; // that of its scrolling
  box.addEventListener(name, (event) => (panel.isScrolledByHand ||= isBar(event)), { passive: true });
}

function drawAll(isReadable) {
  const isEmpty = !panel.data || !panel.shown;
  root.classList.toggle("is-empty", isEmpty);
  if (isReadable || isEmpty) drawFigures(panel.data ? panel.data.figures : NO_FIGURES);
  hide(toNewest, isEmpty || panel.data.newest);
  if (isEmpty) return;
  const seen = judged(panel.shown);
  const now = panel.pinned === null ? panel.shown.index : panel.pinned;
  const size = widthIn(root) < NARROW ? "narrow" : "wide";
  if (root.dataset.size !== size) [root.dataset.size, panel.largest, panel.shape] = [size, LARGEST, null];
  if (isReadable) drawHead(seen);
  if (isReadable && panel.view === "times") drawChart(panel.data, panel.known.bars, panel.known.times, panel.pinned);
  if (isReadable) drawPace();
  drawTimeline(panel.known, panel.data.figures.steps, now, panel.pinned === null);
  hide(back, panel.pinned === null);
  say(back, panel.data.ended ? "back to the latest step" : "back to live");
  const isTree = Boolean(panel.shown.parent);
  const isPlain = isTree && panel.shown.parent.length === 1;
  const isOther = !["tree", "mask"].includes(panel.view); // it shows the whole answer
  const isMask = panel.view === "mask" && isTree && !isPlain;
  drawViews(isMask);
  hide(area, isOther);
  hide(box, !isTree || isMask);
  hide(single, !isPlain);
  say(single, panel.data.figures.is_plain ? PLAIN : UNDRAFTED);
  hide(mask.box, !isMask);
  hide(legend, !isTree || isPlain || isMask);
  describeSoon();
  if (!isTree || isOther) return;
  if (isMask) return mask.draw(panel.data, seen, widthIn(picture));
  mask.forget();
  const width = widthIn(box);
  const drawn = drawnNodes(seen);
  const needs = (panel.widest = Math.max(panel.widest, neededWidth(seen, drawn)));
  const wanted = `${panel.data.drafter}|${seen.source}|${width}|${needs}|${drawn}|${panel.shown.parent}`;
  if (wanted !== panel.shape) lay(seen, drawn, width);
  panel.shape = wanted;
  fill(seen);
  if (isReadable) drawLegend(seen);
  if (panel.hovered !== null) tellNode(panel.hovered);
}

function drawViews(isMask) {
  const now = panel.view === "mask" && !isMask ? "tree" : panel.view;
  for (const node of viewButtons) node.setAttribute("aria-pressed", String(node.dataset.view === now));
  const isByHeads = panel.shown.parent?.length > 1 && columnName(panel.data, panel.shown, 1).startsWith("head");
  if (panel.shown.parent?.length > 1) say(viewButtons[3], isByHeads ? "Heads" : "Depths");
  hide(times, panel.view !== "times");
  hide(depths, panel.view !== "depths");
  hide(gpuBox, panel.view !== "what if");
  if (panel.view === "depths") drawDepths();
}

// While an answer runs the newest line comes from its stream (follow.js), with the bars that are
// new only; at the end it is the value, so that whatever replaces it is a change.
let streamed = null;
window.addEventListener("medusa-panel", (event) => take((streamed = event.detail)));
window.addEventListener("medusa-end", () => {
  if (streamed) setValue(JSON.stringify(streamed));
  streamed = null;
});
for (const node of widthsOf.keys()) resized.observe(node);
for (const node of [body, legend]) resized.observe(node);
panel.draw = render;
onValue(take);

// In the page; a file with a saved answer has no pane to open and close.
export const begin = () => import("./pane.js");
