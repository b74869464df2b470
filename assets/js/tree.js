// The panel: figures, the tree of one step and its mask, a card, the timeline, from one JSON
// string. One frame draws the newest value, however many came. draw.js, words.js, numbers.js,
// chart.js, mask.js, card.js and timeline.js stand before this file in one scope.
const ROW = 16;
const CHIP = 14;
const TOP = 22;
const GAP = 26;
const NARROW = 560; // below, the tree folds to what was tested
const KEPT_STEPS = 600;

const root = element.querySelector(".tree-block") || element;
const head = make("div", "step-head");
const facing = make("div", "facing");
const views = make("div", "views");
const area = make("div", "tree-area");
const picture = make("div", "picture");
const box = make("div", "tree-box");
const svg = draw("svg", { class: "tree", role: "tree" });
const edges = draw("g", { "aria-hidden": "true" });
const taken = draw("path", { class: "edge accepted", "aria-hidden": "true" });
const names = draw("g", { "aria-hidden": "true" });
const nodes = draw("g", { role: "group" });
const legend = make("div", "legend");
const fold = button("fold", "", () => {
  wantsFold = !isFolded();
  schedule();
});
const single = make(
  "p",
  "single",
  "Plain decoding: every pass of the model gives one token. There is no draft and no tree; " +
    "this is the baseline that Medusa is measured against.",
);
const hollow = make(
  "p",
  "hollow",
  "No step yet. Send a message: the tree of candidate tokens of every step is drawn here.",
);
const tip = make("div", "tip");
tip.setAttribute("role", "tooltip");
tip.hidden = true;
box.setAttribute("role", "region");
box.setAttribute("aria-label", "Candidate tree of one step, scrollable");
const viewButtons = ["tree", "mask"].map((name) => {
  const title = name === "tree" ? "the candidates" : "which keys each node attends to";
  const node = button("view", name, () => show(name));
  node.title = title;
  return views.appendChild(node);
});
views.setAttribute("role", "group");
views.setAttribute("aria-label", "View of the step");
svg.append(names, edges, taken, nodes);
box.append(svg);
picture.append(box, single, maskBox, legend);
area.append(picture, card);
facing.append(head, views);
root.replaceChildren(figures, facts, chartBox, plain, facing, area, timeline, hollow, tip);
pen.font = `10.5px ${getComputedStyle(root).getPropertyValue("--font-mono") || "monospace"}`;

let data = null; // the newest line
let shown = null; // the step that is drawn
let live = null; // the newest step
let known = { bars: [], times: [] }; // by step, as far as this answer's lines told
let steps = new Map();
let pinned = null; // the step the user looks at, while newer ones arrive
let flying = null; // the step that was asked for: {step, at, isDropped}
let view = "tree";
let wantsFold = null; // null: by width
let shape = null; // what the layout was made for
let chips = [];
let active = 0; // the node that has the keyboard
let hovered = null;
let quiet = null; // the node under the pointer that needs no tooltip
let scheduled = false;
let tallest = 0;
let describing = 0;

// ---- layout: once per shape and width ----

function isFolded() {
  return wantsFold === null ? box.clientWidth < NARROW : wantsFold;
}

// The nodes that are drawn: all, or folded the path and what was tested beside it.
function drawnNodes(step) {
  const all = step.parent.map((_, node) => node);
  return isFolded() ? all.filter((node) => step.state[node] !== "u") : all;
}

function places(parents, drawn) {
  const children = parents.map(() => []);
  drawn.forEach((node) => parents[node] >= 0 && children[parents[node]].push(node));
  const depth = [];
  const row = [];
  let rows = 0;
  drawn.forEach((node) => (depth[node] = parents[node] < 0 ? 0 : depth[parents[node]] + 1));
  const visit = (node) => {
    if (!children[node].length) row[node] = rows++;
    children[node].forEach(visit);
    if (children[node].length) row[node] = row[children[node][0]];
  };
  visit(0);
  return { depth, row, rows, columns: Math.max(...drawn.map((node) => depth[node])) + 1 };
}

function lay(step, drawn, width) {
  const { depth, row, rows, columns } = places(step.parent, drawn);
  const narrow = width < NARROW;
  const gap = narrow ? 18 : GAP;
  const pitch = Math.max(narrow ? 88 : 108, Math.min(196, (width - 2 + gap) / columns));
  const chip = pitch - gap;
  const wide = Math.ceil(pitch * columns - gap + 2);
  const high = TOP + rows * ROW + 2;
  tallest = Math.max(tallest, high);
  const standing = isFolded() ? tallest : high; // a fold that changes with the step must not jump
  set(svg, { width: wide, height: standing, viewBox: `0 0 ${wide} ${standing}` });
  names.replaceChildren(
    ...Array.from({ length: columns }, (_, column) =>
      draw("text", { class: "column", x: column * pitch + 1, y: 12 }, columnName(data, column)),
    ),
  );
  const top = (node) => TOP + row[node] * ROW;
  const edge = (node) => {
    const x = depth[node] * pitch + 1;
    const from = top(step.parent[node]) + CHIP / 2;
    const to = top(node) + CHIP / 2;
    const bend = gap * 0.6;
    return `M${x - gap} ${from}C${x - gap + bend} ${from} ${x - bend} ${to} ${x} ${to}`;
  };
  const hadFocus = nodes.contains(document.activeElement);
  edges.replaceChildren();
  nodes.replaceChildren();
  chips = [];
  drawn.forEach((node) => {
    const line = node ? edge(node) : "";
    const path = node ? edges.appendChild(draw("path", { class: "edge", d: line })) : null;
    chips[node] = { ...makeChip(node, depth[node] * pitch + 1, top(node), chip), line, path };
    chips[node].row = row[node];
    chips[node].depth = depth[node];
  });
  if (!chips[active]) active = 0;
  chips[active].group.setAttribute("tabindex", "0");
  if (hadFocus) chips[active].group.focus({ preventScroll: true });
}

function makeChip(node, x, y, wide) {
  const group = draw("g", { class: "chip", "data-node": node, role: "treeitem", tabindex: "-1" });
  const frame = draw("rect", { class: "frame", x, y, width: wide, height: CHIP, rx: 3.5 });
  const bar = draw("rect", { class: "share", x: x + 1, y: y + CHIP - 2.2, height: 1.8, rx: 0.9 });
  const text = draw("text", { class: "token", x: x + 4, y: y + 10 });
  const rank = draw("text", { class: "rank", y: y + 10 });
  const mark = draw("text", { class: "mark", x: x + wide - 4, y: y + 10 });
  group.append(frame, bar, text, rank, mark);
  nodes.append(group);
  return { group, bar, text, rank, mark, x, wide };
}

// ---- one step: texts, states and marks into the places ----

function fill(step) {
  let path = "";
  chips.forEach((chip, node) => {
    const state = STATES[step.state[node]];
    const mark = markOf(step, node);
    if (chip.state !== state) {
      chip.state = state;
      set(chip.group, { "data-state": state, class: `chip ${state}` });
      if (chip.path) chip.path.setAttribute("class", `edge ${state}`);
    }
    if (state === "accepted" && chip.line) path += chip.line;
    say(chip.mark, mark);
    const marked = widthOf(mark);
    const rank = figure(step.rank, node);
    const showsRank = rank !== null && chip.wide >= 112 && step.state[node] !== "u";
    say(chip.rank, showsRank ? `#${rank}` : "");
    if (showsRank) chip.rank.setAttribute("x", (chip.x + chip.wide - 9 - marked).toFixed(1));
    const room = chip.wide - 13 - marked - (showsRank ? widthOf(`#${rank}`) + 5 : 0);
    say(chip.text, cut(step.text[node], room));
    const q = figure(step.q, node);
    const share = (Math.min(1, q || 0) * (chip.wide - 2)).toFixed(1);
    if (chip.share !== share) chip.bar.setAttribute("width", (chip.share = share));
    chip.group.classList.toggle("chosen", Boolean(asked) && asked.node === node && asked.step === step.index);
  });
  taken.setAttribute("d", path);
  set(svg, { "data-step": step.index, "data-answer": data.answer });
  svg.setAttribute(
    "aria-label",
    `Step ${step.index + 1}: ${step.accepted} of ${step.parent.length - 1} draft tokens accepted. ` +
      `Path: ${pathWords(step)}`,
  );
}

// Sentences for each node: once a step stands still, not 15 times a second.
function describeSoon() {
  clearTimeout(describing);
  describing = setTimeout(() => {
    if (!shown || !shown.parent || !element.isConnected) return;
    chips.forEach((chip, node) => {
      set(chip.group, {
        "aria-label": nodeLabel(data, shown, node),
        "aria-level": chip.depth + 1,
        "aria-selected": String(shown.state[node] === "a"),
      });
    });
    describeChart(data.figures);
  }, 250);
}

function drawHead(step) {
  const total = data.figures.steps;
  const parts = [make("b", "", `step ${step.index + 1} / ${total}`)];
  if (step.parent && step.parent.length > 1) {
    const accepted = make("span", "", `accepted ${step.accepted}+1 of ${step.parent.length}`);
    accepted.title = "draft tokens accepted, and the model's own next token";
    parts.push(accepted);
  } else if (!step.parent) parts.push(make("span", "", `${step.tokens} tokens; no tree was recorded`));
  parts.push(make("span", "", `${number(step.ms, 1)} ms${stepSplit(step)}`));
  const bound = step.parent && step.parent.length > 1 ? bindWords(data, step, 0) : "";
  if (bound) {
    const test = make("span", "bound", `at the root ${bound}`);
    test.title = "threshold = min(ε, δ·exp(−H)), H the entropy there";
    parts.push(test);
  }
  head.replaceChildren(...parts);
}

function stepSplit(step) {
  if (!step.backbone_ms) return step.heads_ms ? ` (heads ${number(step.heads_ms, 1)})` : "";
  const rest = Math.max(0, step.ms - step.backbone_ms - step.heads_ms);
  const [a, b, c] = [step.backbone_ms, step.heads_ms, rest].map((ms) => number(ms, 1));
  return ` = backbone ${a} + heads ${b} + rest ${c}`;
}

function drawLegend(step) {
  const item = (name, mark, text) => {
    const node = make("span", `item ${name}`);
    node.append(make("i", "sample", mark), text);
    return node;
  };
  const passed = isTypical(step) ? "accepted: margin over the threshold" : `accepted: = ${own(data)}`;
  const failed = isTypical(step) ? "tested, rejected: margin below it" : "tested, rejected: its probability";
  const key = `${passed}|${isFolded()}|${step.state}|${step.q === null}`;
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  const parts = [item("accepted", "✓", passed), item("rejected", "✗", failed)];
  if (!isFolded()) parts.push(item("unreached", "#2", "never reached: its rank"));
  if (step.q) parts.push(item("line", "", "line under it: head probability"));
  const hidden = [...step.state].filter((state) => state === "u").length;
  say(fold, isFolded() ? `+${hidden} more, never reached` : "fold to what was tested");
  fold.setAttribute("aria-expanded", String(!isFolded()));
  fold.hidden = !hidden;
  legend.replaceChildren(...parts, fold);
}

// ---- tooltip ----

function showTip(anchor, title, lines) {
  const name = make("b");
  name.append(bdi(title));
  tip.replaceChildren(name, ...lines.map((text) => make("span", "", text)));
  tip.hidden = false;
  const at = root.getBoundingClientRect();
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.max(0, Math.min(anchor.left - at.left, at.width - wide));
  const above = anchor.top - at.top - high - 6;
  const isUnder = anchor.bottom + high + 8 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${isUnder ? anchor.bottom - at.top + 6 : above}px`;
}

function hideTip() {
  hovered = null;
  tip.hidden = true;
}

function tellNode(node) {
  const chip = chips[node];
  if (node === quiet || !chip || !shown || !shown.parent) return hideTip();
  hovered = node;
  const title = `${shown.text[node]}`;
  const lines = tipLines(data, shown, node);
  showTip(chip.group.getBoundingClientRect(), title, [...lines, "click or Enter: both top 10s"]);
}

function nodeOf(target) {
  const group = target.closest && target.closest("[data-node]");
  return group ? Number(group.dataset.node) : null;
}

nodes.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch" || !(event.movementX || event.movementY)) return;
  const node = nodeOf(event.target);
  if (node !== quiet) quiet = null;
  if (node !== null && node !== hovered) tellNode(node);
});
nodes.addEventListener("pointerout", (event) => {
  if (!nodes.contains(event.relatedTarget)) hideTip();
});
nodes.addEventListener("focusin", (event) => {
  const node = nodeOf(event.target);
  if (node !== null && event.target.matches(":focus-visible")) tellNode(node);
});
nodes.addEventListener("focusout", hideTip);

// ---- the card, by click and by keyboard ----

function choose(node) {
  if (!shown || !shown.parent) return;
  quiet = node; // its card says it all
  hideTip();
  focusOn(node);
  if (pinned !== shown.index) goTo(shown.index);
  openCard(data, shown, node);
  schedule();
  card.scrollIntoView({ block: "nearest" });
}

function focusOn(node) {
  if (!chips[node]) return;
  if (chips[active]) chips[active].group.setAttribute("tabindex", "-1");
  active = node;
  chips[node].group.setAttribute("tabindex", "0");
  chips[node].group.focus({ preventScroll: true });
  chips[node].group.scrollIntoView({ block: "nearest", inline: "nearest" });
}

closeCard = () => {
  hideCard();
  quiet = null;
  schedule();
  if (chips[active]) chips[active].group.focus({ preventScroll: true });
};

function neighbour(key) {
  const from = chips[active];
  const others = chips.map((_, node) => node).filter((node) => chips[node]);
  if (key === "ArrowLeft") return active === 0 ? null : shown.parent[active];
  if (key === "ArrowRight") {
    const below = others.filter((node) => shown.parent[node] === active);
    return below.find((node) => shown.state[node] === "a") ?? below[0];
  }
  if (key === "Home") return 0;
  if (key === "End") return others.filter((node) => shown.state[node] === "a").at(-1);
  const side = key === "ArrowDown" ? 1 : -1;
  return others
    .filter((node) => chips[node].depth === from.depth && (chips[node].row - from.row) * side > 0)
    .sort((a, b) => (chips[a].row - chips[b].row) * side)[0];
}

nodes.addEventListener("click", (event) => {
  const node = nodeOf(event.target);
  if (node !== null) choose(node);
});
nodes.addEventListener("keydown", (event) => {
  if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") choose(active);
  else if (event.key === "Escape" && !card.hidden) closeCard();
  else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    const to = neighbour(event.key);
    if (to !== null && to !== undefined) {
      if (pinned !== shown.index) goTo(shown.index);
      focusOn(to);
    }
  } else return;
  event.preventDefault();
  event.stopPropagation();
});
card.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  closeCard();
});

// ---- tree or mask ----

function show(name) {
  view = name;
  schedule();
}

// ---- which step ----

function goTo(step) {
  if (!data || !data.figures.steps) return;
  pinned = Math.max(0, Math.min(data.figures.steps - 1, step));
  if (steps.has(pinned)) shown = steps.get(pinned);
  else request();
  schedule();
}

function goLive() {
  stopPlay();
  pinned = null;
  if (live) shown = live;
  if (flying) flying.isDropped = true;
  trigger("pick", { step: null, answer: data ? data.answer : null });
  schedule();
}

// One request at a time: a drag over a hundred bars asks for as many as the server can give.
function request() {
  if (flying && !flying.isDropped && performance.now() - flying.at < 4000) return;
  flying = { step: pinned, at: performance.now() };
  trigger("pick", { step: pinned, answer: data.answer });
}

function keep(step) {
  if (!step) return;
  steps.delete(step.index);
  steps.set(step.index, step);
  if (steps.size > KEPT_STEPS) steps.delete(steps.keys().next().value);
}

function forget() {
  stopPlay();
  [pinned, flying, shown, live, shape, tallest] = [null, null, null, null, null, 0];
  known = { bars: [], times: [] };
  steps = new Map();
  chart = emptyChart();
  line = { total: 0, pitch: 14, now: 0, from: 0 };
  hideCard();
  hideTip();
}

function learn(next) {
  if (next.bars.length && next.first < chart.next && known.bars[next.first] === undefined)
    chart = emptyChart();
  next.bars.forEach((tokens, place) => {
    known.bars[next.first + place] = tokens;
    known.times[next.first + place] = next.times[place];
  });
}

// ---- values in, frames out ----

function take() {
  const next = props.value ? JSON.parse(props.value) : null;
  if (!next || !data || next.answer !== data.answer || next.figures.steps < data.figures.steps) forget();
  data = next;
  if (!next) return schedule();
  learn(next);
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

function render() {
  scheduled = false;
  const isEmpty = !data || !shown;
  root.classList.toggle("is-empty", isEmpty);
  drawFigures(data ? data.figures : NO_FIGURES);
  if (isEmpty) return;
  const now = pinned === null ? shown.index : pinned;
  const wide = root.clientWidth;
  root.dataset.size = wide < NARROW ? "narrow" : wide < 960 ? "middle" : "wide";
  drawHead(shown);
  drawChart(data, known.bars, known.times, pinned);
  drawTimeline(known, data.figures.steps, now, pinned === null);
  back.hidden = pinned === null;
  say(back, data.ended ? "back to the latest step" : "back to live");
  const isTree = Boolean(shown.parent);
  const isPlain = isTree && shown.parent.length === 1;
  const isMask = view === "mask" && isTree && !isPlain;
  views.hidden = !isTree || isPlain;
  viewButtons.forEach((node) => node.setAttribute("aria-pressed", String(node.textContent === (isMask ? "mask" : "tree"))));
  box.hidden = !isTree || isMask;
  single.hidden = !isPlain;
  maskBox.hidden = !isMask;
  legend.hidden = !isTree || isPlain || isMask;
  area.classList.toggle("has-card", !card.hidden);
  if (!isTree) return;
  if (isMask) return drawMask(data, shown, picture.clientWidth);
  maskShape = null;
  const width = box.clientWidth;
  const drawn = drawnNodes(shown);
  const wanted = `${data.drafter}|${width}|${drawn}|${shown.parent}`;
  if (wanted !== shape) lay(shown, drawn, width);
  shape = wanted;
  fill(shown);
  drawLegend(shown);
  if (hovered !== null) tellNode(hovered);
  describeSoon();
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(render);
}

watch("value", take);
new ResizeObserver(schedule).observe(root);
take();
