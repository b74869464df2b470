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

// A path that is not in the tree's window is scrolled to, its end before its root; after a hand has
// scrolled it, not before a step is chosen or another answer begins.
let seenPath = ""; // of which answer and step
function scrollToPath() {
  const here = shown?.parent ? `${data.answer}.${shown.index}` : "";
  if (!here || here === seenPath || isScrolledByHand || !box.clientHeight) return;
  seenPath = here;
  const path = chips.flatMap(({ at }, node) => (shown.state[node] === "a" ? [at] : []));
  const [first, last] = [Math.min(...path) - CHIP * scale, Math.max(...path) + CHIP * scale];
  if (last > box.scrollTop + box.clientHeight) box.scrollTop = last - box.clientHeight;
  else if (first < box.scrollTop) box.scrollTop = first;
}

for (const name of ["wheel", "touchmove", "pointerdown"]) {
  const isBar = (event) => name !== "pointerdown" || event.target === box; // that of its scrolling
  box.addEventListener(name, (event) => (isScrolledByHand ||= isBar(event)), { passive: true });
}

function drawAll(isReadable) {
  const isEmpty = !data || !shown;
  root.classList.toggle("is-empty", isEmpty);
  if (isReadable || isEmpty) drawFigures(data ? data.figures : NO_FIGURES);
  hide(toNewest, isEmpty || data.newest);
  if (isEmpty) return;
  const seen = judged(shown);
  const now = pinned === null ? shown.index : pinned;
  const size = widthIn(root) < NARROW ? "narrow" : "wide";
  if (root.dataset.size !== size) [root.dataset.size, largest, shape] = [size, LARGEST, null];
  if (isReadable) drawHead(seen);
  if (isReadable && view === "times") drawChart(data, known.bars, known.times, pinned);
  if (isReadable) drawPace();
  drawTimeline(known, data.figures.steps, now, pinned === null);
  hide(back, pinned === null);
  say(back, data.ended ? "back to the latest step" : "back to live");
  const isTree = Boolean(shown.parent);
  const isPlain = isTree && shown.parent.length === 1;
  const isOther = !["tree", "mask"].includes(view); // it shows the whole answer
  const isMask = view === "mask" && isTree && !isPlain;
  drawViews(isMask);
  hide(area, isOther);
  hide(box, !isTree || isMask);
  hide(single, !isPlain);
  say(single, data.figures.is_plain ? PLAIN : UNDRAFTED);
  hide(maskBox, !isMask);
  hide(legend, !isTree || isPlain || isMask);
  describeSoon();
  if (!isTree || isOther) return;
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

function drawViews(isMask) {
  const now = view === "mask" && !isMask ? "tree" : view;
  for (const node of viewButtons) node.setAttribute("aria-pressed", String(node.dataset.view === now));
  const isByHeads = shown.parent?.length > 1 && columnName(data, shown, 1).startsWith("head");
  if (shown.parent?.length > 1) say(viewButtons[3], isByHeads ? "Heads" : "Depths");
  hide(times, view !== "times");
  hide(depths, view !== "depths");
  hide(gpuBox, view !== "what if");
  if (view === "depths") drawDepths();
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
for (const node of [body, legend]) resized.observe(node);
onValue(take);
