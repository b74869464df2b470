// The tree of one step: places once per shape and width, then texts, states and marks into them.
import { describeChart } from "./chart.js";
import { button, draw, hide, make, say, set } from "./elements.js";
import { figure, number, quoted } from "./format.js";
import { modelledFigures } from "./numbers.js";
import { page } from "./page.js";
import {
  FONT,
  LARGEST,
  NARROW,
  box,
  edges,
  head,
  legend,
  names,
  nodes,
  panel,
  pen,
  root,
  schedule,
  svg,
  taken,
  widthIn,
} from "./panel.js";
import {
  CHIP,
  GAP,
  LINE,
  ROW,
  SMALLEST,
  TOP,
  branch,
  highOf,
  isFinger,
  places,
  testedNodes,
} from "./places.js";
import {
  NEXT,
  QUOTE,
  STATES,
  bindWords,
  columnName,
  isOfText,
  isTypical,
  markOf,
  nodeLabel,
  own,
  pathWords,
} from "./words.js";

const CLOSEST = 92; // px from column to column where all of the tree is to be seen
const LONG = 110; // px: where there is room for the mouse, a longer token is cut

export const follower = makeFollower(); // the model's own token behind the path
const fold = button("fold", "", () => {
  panel.wantsFold = !isFolded();
  panel.largest = LARGEST;
  schedule();
});
let describing = 0; // the timer of the sentences

// ---- layout: once per shape and width ----

function isFolded() {
  if (panel.wantsFold !== null) return panel.wantsFold;
  return widthIn(box) < NARROW || highOf(panel.shown.parent) > panel.room;
}

// The nodes that are drawn: all, or folded the path and what was tested beside it.
export function drawnNodes(step) {
  return isFolded() ? testedNodes(step) : step.parent.map((_, node) => node);
}

// How much larger than its smallest the tree of so many rows is drawn, in chips of that width.
function scaleOf(rows, chip) {
  const scales = Math.min(panel.largest, (panel.room - 2) / (rows * ROW + TOP + ROW), chip / Math.min(panel.widest, LONG));
  return Math.max(isFinger ? 1 : SMALLEST, Math.floor(scales * 50) / 50);
}

// Pixels that the longest token of the step needs, with its mark, at FONT.
export function neededWidth(step, drawn) {
  const needs = drawn.map((node) => pen.widthOf(step.text[node]) + pen.widthOf(markOf(step, node)));
  needs.push(pen.widthOf(step.next || "") + pen.widthOf(NEXT));
  return Math.ceil((Math.max(...needs) / panel.scale + 18) / 6) * 6;
}

function setScale(value) {
  if (value === panel.scale) return;
  panel.scale = value;
  svg.style.fontSize = `${FONT * panel.scale}px`;
  pen.setSize(FONT * panel.scale);
}

export function lay(step, drawn, width) {
  const { depth, row, rows, columns } = places(step.parent, drawn);
  const narrow = width < NARROW;
  const gap = narrow ? 18 : GAP;
  const room = Math.max(82, Math.min(170 * LARGEST, (width - 2 + gap) / columns - gap));
  setScale(narrow ? Math.min(1.25, scaleOf(rows, 1e4)) : scaleOf(rows, room));
  panel.largest = panel.scale;
  const [ROW_HIGH, HIGH] = [ROW * panel.scale, CHIP * panel.scale];
  const fits = (width - 2 + gap) / columns;
  const least = narrow ? panel.widest * panel.scale + gap : fits < CLOSEST ? 108 : CLOSEST;
  const pitch = Math.max(least, Math.min(196 * panel.scale, fits));
  const chip = pitch - gap;
  const wide = Math.ceil(pitch * columns - gap + 2);
  const head = TOP * panel.scale + ROW_HIGH; // the first row is the follower's
  const high = head + rows * ROW_HIGH + 2;
  set(svg, { width: wide, height: high, viewBox: `0 0 ${wide} ${high}` });
  names.replaceChildren(
    ...Array.from({ length: columns }, (_, column) =>
      draw("text", { class: "column", x: column * pitch + 1, y: 12 * panel.scale }, columnName(panel.data, step, column)),
    ),
  );
  const top = (node) => head + row[node] * ROW_HIGH;
  const edge = (node) =>
    branch(depth[node] * pitch + 1, gap, top(step.parent[node]) + HIGH / 2, top(node) + HIGH / 2);
  const hadFocus = nodes.contains(document.activeElement);
  edges.replaceChildren();
  nodes.replaceChildren();
  panel.chips = [];
  drawn.forEach((node) => {
    const line = node ? edge(node) : "";
    const path = node ? edges.appendChild(draw("path", { class: "edge", d: line })) : null;
    panel.chips[node] = { ...makeChip(node, depth[node] * pitch + 1, top(node), chip), line, path };
    Object.assign(panel.chips[node], { row: row[node], depth: depth[node], at: top(node) + HIGH / 2 });
  });
  follower.places = Array.from({ length: columns }, (_, column) => column * pitch + 1);
  Object.assign(follower, { gap, chip });
  if (!panel.chips[panel.active]) panel.active = 0;
  panel.chips[panel.active].group.setAttribute("tabindex", "0");
  if (hadFocus) panel.chips[panel.active].group.focus({ preventScroll: true });
}

function makeChip(node, x, y, wide) {
  const group = draw("g", { class: "chip", "data-node": node, role: "treeitem", tabindex: "-1" });
  const frame = draw("rect", { class: "frame", x, y, width: wide, height: CHIP * panel.scale, rx: 3.5 });
  const bar = draw("rect", { class: "share", x: x + 1, y: y + CHIP * panel.scale - 2.2, height: 1.8, rx: 0.9 });
  const text = draw("text", { class: "token", x: x + 4, y: y + LINE * panel.scale });
  const rank = draw("text", { class: "rank", y: y + LINE * panel.scale });
  const mark = draw("text", { class: "mark", x: x + wide - 4, y: y + LINE * panel.scale });
  group.append(frame, bar, text, rank, mark);
  nodes.append(group);
  return { group, bar, text, rank, mark, x, wide };
}

function makeFollower() {
  const group = draw("g", { class: "follower" });
  const parts = {
    line: draw("path", { class: "edge following", "aria-hidden": "true" }),
    frame: draw("rect", { class: "frame", rx: 3.5 }),
    text: draw("text", { class: "token" }),
    mark: draw("text", { class: "mark" }, NEXT),
  };
  group.append(draw("title", {}, "the model's own next token, behind the accepted path"), ...Object.values(parts));
  return { group, ...parts };
}

// ---- one step: texts, states and marks into the places ----

export function fill(step) {
  let path = "";
  panel.chips.forEach((chip, node) => {
    const state = STATES[step.state[node]];
    const mark = markOf(step, node);
    if (chip.state !== state) {
      chip.state = state;
      set(chip.group, { "data-state": state, class: `chip ${state}` });
      if (chip.path) chip.path.setAttribute("class", `edge ${state}`);
    }
    if (state === "accepted" && chip.line) path += chip.line;
    say(chip.mark, mark);
    const marked = pen.widthOf(mark);
    const rank = figure(step.rank, node);
    const showsRank = rank !== null && chip.wide >= 112 * panel.scale && !"ue".includes(step.state[node]);
    say(chip.rank, showsRank ? `#${rank}` : "");
    if (showsRank) chip.rank.setAttribute("x", (chip.x + chip.wide - 9 - marked).toFixed(1));
    const room = chip.wide - 13 - marked - (showsRank ? pen.widthOf(`#${rank}`) + 5 : 0);
    say(chip.text, pen.cut(step.text[node], room));
    const q = figure(step.q, node);
    const share = (Math.min(1, q || 0) * (chip.wide - 2)).toFixed(1);
    if (chip.share !== share) chip.bar.setAttribute("width", (chip.share = share));
    chip.group.classList.toggle("chosen", Boolean(panel.asked) && panel.asked.node === node && panel.asked.step === step.index);
  });
  taken.setAttribute("d", path);
  follow(step);
  set(svg, { "data-step": step.index, "data-answer": panel.data.answer });
  svg.setAttribute(
    "aria-label",
    `Step ${step.index + 1}: ${step.accepted} of ${step.parent.length - 1} draft tokens accepted. ` +
      `Path: ${pathWords(step)}${step.next ? `, then ${quoted(step.next)}` : ""}`,
  );
}

// In the first row, a column behind the path's last node, or over it in the last column.
function follow(step) {
  const { group, line, frame, text, mark, places, gap, chip } = follower;
  const last = panel.chips[step.state.lastIndexOf("a")];
  const isKnown = step === panel.shown && Boolean(step.next); // with another rule it might be another token
  group.toggleAttribute("hidden", !isKnown);
  if (!isKnown) return;
  const [column, high] = [Math.min(last.depth + 1, places.length - 1), CHIP * panel.scale];
  const [x, y] = [places[column], TOP * panel.scale];
  const above = `M${x + chip / 2} ${last.at}V${y + high}`;
  set(line, { d: column > last.depth ? branch(x, gap, last.at, y + high / 2) : above });
  set(frame, { x, y, width: chip, height: high });
  set(text, { x: x + 4, y: y + LINE * panel.scale });
  set(mark, { x: x + chip - 4, y: y + LINE * panel.scale });
  say(text, pen.cut(step.next, chip - 13 - pen.widthOf(NEXT)));
}

// Sentences for each node: once a step stands still, not 15 times a second.
export function describeSoon() {
  clearTimeout(describing);
  describing = setTimeout(() => {
    if (!panel.shown || !root.isConnected) return;
    describeChart(panel.data.figures);
    if (!panel.shown.parent) return;
    panel.chips.forEach((chip, node) => {
      set(chip.group, {
        "aria-label": nodeLabel(panel.data, panel.shown, node),
        "aria-level": chip.depth + 1,
        "aria-selected": String(panel.shown.state[node] === "a"),
      });
    });
  }, 250);
}

export function drawHead(step) {
  const parts = [];
  if (step.parent && step.parent.length > 1) {
    const bonus = step.tokens > step.accepted ? ", + 1 from the model" : ""; // none at the end
    const accepted = make("span", "", `${step.accepted} of ${step.parent.length - 1} accepted${bonus}`);
    accepted.title = "the drafted tokens of the accepted path, and the model's own next token";
    parts.push(accepted);
  } else if (!step.parent) parts.push(make("span", "", `${step.tokens} tokens; no tree was recorded`));
  // at the pace of a GPU a time of this machine would contradict the tiles
  if (!modelledFigures(panel.data.figures)) parts.push(timeOf(step));
  if (step !== panel.shown) {
    const rule = `ε ${panel.asIf.epsilon}, δ ${panel.asIf.delta.toFixed(3)}`;
    parts.push(make("span", "as-if", `as it would have been with ${rule}; it was ${panel.shown.accepted}+1`));
  }
  const bound = step.parent && step.parent.length > 1 ? bindWords(panel.data, step, 0) : "";
  if (bound) {
    const test = make("span", "bound", `at the root ${bound}`);
    test.title = "threshold = min(ε, δ·exp(−H)), H the entropy there";
    parts.push(test);
  }
  const now = page.model?.model;
  // answers kept by an older version do not name the backbone
  const isOther = now && panel.data.model && panel.data.model !== now && !now.startsWith(`${panel.data.model} on `);
  if (isOther) parts.push(make("b", "", `by ${panel.data.model}`));
  if (panel.data.goes_on) parts.push(make("span", "", "since Continue; the steps of the text before are not kept"));
  head.replaceChildren(...parts);
}

// Where there is no room for its parts, they stand in the tooltip.
function timeOf(step) {
  const text = `${number(step.ms, 1)} ms${stepSplit(step)}`;
  return Object.assign(make("span", "took", text), { title: text });
}

function stepSplit(step) {
  if (!step.backbone_ms) return step.heads_ms ? ` (heads ${number(step.heads_ms, 1)})` : "";
  const rest = Math.max(0, step.ms - step.backbone_ms - step.heads_ms);
  const [a, b, c] = [step.backbone_ms, step.heads_ms, rest].map((ms) => number(ms, 1));
  return ` = model ${a} + heads ${b} + rest ${c}`;
}

export function drawLegend(step) {
  const item = (name, mark, text) => {
    const node = make("span", `item ${name}`);
    node.append(make("i", "sample", mark), text);
    return node;
  };
  const passed = isTypical(step) ? "accepted: over the threshold" : `accepted: ${own(panel.data)}`;
  const failed = isTypical(step) ? "rejected: below it" : "rejected";
  const key = `${passed}|${isFolded()}|${step.state}|${step.q === null}|${step.source}|${!step.next}`;
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  const parts = [item("accepted", "✓", passed), item("rejected", "✗", failed)];
  if (step.next) parts.push(item("next", NEXT, "next"));
  if (!isFolded()) parts.push(item("unreached", "#2", "not reached"));
  const isText = [...(step.source || "")].some((_, node) => isOfText(step, node));
  if (isText) parts.push(item("quoted", QUOTE, "found in the text"));
  if (step.q) parts.push(item("line", "", "head probability"));
  const hidden = [...step.state].filter((state) => state === "u").length;
  say(fold, isFolded() ? `show ${hidden} not reached` : "hide not reached");
  fold.setAttribute("aria-expanded", String(!isFolded()));
  hide(fold, !hidden);
  legend.replaceChildren(...parts, fold);
}
