// The panel: figures, chart, the tree of one step or its mask, a card, the timeline, from one JSON
// string. One frame draws the newest value, however many came. The parts stand before this file
// in one scope (PARTS in ui/page/html_blocks.py): draw, words, numbers, chart, mask, card, timeline, frame,
// layout, walk, steps.

function take(next) {
  if (!next || !data || next.answer !== data.answer || next.figures.steps < data.figures.steps) forget();
  data = next;
  window.dispatchEvent(new CustomEvent("medusa-answer", { detail: next ? next.answer : null }));
  if (!next) return schedule();
  learn(next);
  next.steps?.forEach(keep);
  keep(next.step);
  if (!next.pinned) live = next.step;
  else if (flying) {
    const isDropped = flying.isDropped;
    flying = null;
    if (!isDropped && pinned !== null && !steps.has(pinned)) request();
  } else if (pinned === null) pinned = next.step.index; // chosen elsewhere on the page
  shown = pinned === null ? live || next.step : steps.get(pinned) || shown || next.step;
  schedule();
}

// While steps stream in, what is read and not watched is drawn less often: numbers that change 24
// times a second cannot be read, and cost as much as the tree.
const READ_EVERY = 180; // ms
let readAt = 0;

function render() {
  const now = performance.now();
  const isReadable = !streamed || pinned !== null || window.medusaShow?.isOn() || now > readAt + READ_EVERY;
  if (isReadable) readAt = now;
  drawAll(isReadable);
  if (isReadable) scrollTimeline();
  if (isReadable) scrollToPath(); // last: it lays out what was written before it
}

// A path that is not in the panel's window is scrolled to, its end before its root; after a hand has
// scrolled the panel, not before a step is chosen or another answer begins.
const panel = element.closest("#right");
let seenPath = ""; // of which answer and step
function scrollToPath() {
  const here = shown?.parent ? `${data.answer}.${shown.index}` : "";
  if (!here || here === seenPath || isScrolledByHand || !box.clientHeight) return;
  seenPath = here;
  const { top } = svg.getBoundingClientRect();
  const path = chips.flatMap(({ at }, node) => (shown.state[node] === "a" ? [top + at] : []));
  const under = Math.max(...path) + CHIP * scale - timeline.getBoundingClientRect().top;
  const above = panel.getBoundingClientRect().top - Math.min(...path) + CHIP * scale;
  if (under > 0) panel.scrollTop += under;
  else if (above > 0) panel.scrollTop -= Math.min(above, -under);
}

for (const name of ["wheel", "touchmove", "pointerdown"]) {
  const isBar = (event) => name !== "pointerdown" || event.target === panel; // that of the panel's scrolling
  const note = (event) => (isScrolledByHand ||= isBar(event));
  panel.addEventListener(name, note, { passive: true });
}

function drawAll(isReadable) {
  const isEmpty = !data || !shown;
  root.classList.toggle("is-empty", isEmpty);
  if (isReadable || isEmpty) drawFigures(data ? data.figures : NO_FIGURES);
  hide(toNewest, isEmpty || data.newest);
  if (isEmpty) return;
  const seen = judged(shown);
  const now = pinned === null ? shown.index : pinned;
  const size = widthIn(root) < NARROW ? "narrow" : widthIn(root) < 960 ? "middle" : "wide";
  if (root.dataset.size !== size) card.style.cssText = ""; // its place was another's
  if (root.dataset.size !== size) [root.dataset.size, tallest, largest, shape] = [size, 0, LARGEST, null];
  if (isReadable) drawHead(seen);
  if (isReadable) drawChart(data, known.bars, known.times, pinned);
  if (isReadable) drawPace();
  drawTimeline(known, data.figures.steps, now, pinned === null);
  hide(back, pinned === null);
  say(back, data.ended ? "back to the latest step" : "back to live");
  const isTree = Boolean(shown.parent);
  const isPlain = isTree && shown.parent.length === 1;
  const isMask = view === "mask" && isTree && !isPlain;
  hide(views, !isTree || isPlain);
  viewButtons.forEach((node) => node.setAttribute("aria-pressed", String(node.textContent === (isMask ? "mask" : "tree"))));
  hide(box, !isTree || isMask);
  hide(single, !isPlain);
  say(single, data.figures.is_plain ? PLAIN : UNDRAFTED);
  hide(maskBox, !isMask);
  hide(legend, !isTree || isPlain || isMask);
  area.classList.toggle("has-card", !card.hidden);
  describeSoon();
  if (!isTree) return;
  if (isMask) return drawMask(data, seen, widthIn(picture));
  maskShape = null;
  const width = widthIn(box);
  const drawn = drawnNodes(seen);
  const needs = (widest = Math.max(widest, neededWidth(seen, drawn)));
  const wanted = `${data.drafter}|${seen.source}|${width}|${needs}|${drawn}|${shown.parent}`;
  if (wanted !== shape) lay(seen, drawn, width);
  shape = wanted;
  fill(seen);
  if (isReadable) drawLegend(seen);
  if (hovered !== null) tellNode(hovered);
}

// While an answer runs the newest line comes from its stream (follow.js), with the bars that are
// new only; at the end it is the value, so that whatever replaces it is a change.
let streamed = null;
window.addEventListener("medusa-panel", (event) => take((streamed = event.detail)));
window.addEventListener("medusa-end", () => {
  if (streamed) props.value = JSON.stringify(streamed);
  streamed = null;
});
for (const node of widthsOf.keys()) resized.observe(node);
loosen();
onValue(take);
