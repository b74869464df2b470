// The Tune tab. The value is one JSON object; each card is drawn again only when its own part of it
// has changed, so that focus stays. Texts go in by textContent only.
import { blockOf } from "./block.js";
import { make, say, scrollRegion } from "./elements.js";
import { count, percent } from "./format.js";
import { makePen, tokenFont } from "./measure.js";
import { figureBox, figureText, nodeAxis, plot, valueAxis } from "./plot.js";
import { drawShape, treeCard } from "./shape.js";

const { root, trigger, onValue, every, isInSight } = blockOf("tune");
const REFRESH_MS = 1000;
const hollow = make("p", "tune-hollow");
const guest = make("p", "tune-words tune-guest", "You look at this page as a guest: nothing here can be changed by you.");
const verdict = make("section", "tune-card wide tune-verdict");
const title = make("h2", "");
const best = make("p", "tune-strong");
const heat = heatCard();
const shape = treeCard(makePen(tokenFont(10)));
const tokens = figureBox("Tokens a step");
const times = figureBox("Cost of a step");
const gain = figureBox("Speedup by what was learnt");
const cards = [verdict, heat.card, shape.card, tokens.box, times.box, gain.box];
let view = null;

function show() {
  if (!view) return;
  const isEmpty = Boolean(view.text);
  say(hollow, view.text || "");
  hollow.hidden = !isEmpty;
  cards.forEach((card) => (card.hidden = isEmpty));
  guest.hidden = !view.guest || isEmpty;
  if (!isEmpty) drawAll();
}

function drawAll() {
  drawVerdict();
  part("table", () => drawHeat(heat, view.table));
  drawShape(shape, view.tree);
  drawTokens(view.tokens);
  drawCosts(view.costs);
  drawGain(view.speedup);
}

const parts = {};
function part(name, act) {
  const now = JSON.stringify(view[name]);
  if (parts[name] === now) return;
  parts[name] = now;
  act();
}

// ---- what is best ----

function drawVerdict() {
  say(title, `${view.model} (${view.device})`);
  const [nodes, speedup] = view.speedup?.best || [];
  const average = nodes > 1
    ? `On average ${nodes} nodes would give most, ${speedup.toFixed(2)} times plain decoding.`
    : "On average no draft of the heads pays.";
  say(best, view.speedup
    ? `${average} Each step decides anew, by its own probabilities, and drafts nothing where that is faster.`
    : "No step's cost is known yet. It is learnt from answers at full speed.");
}

// ---- curves ----

function drawTokens(data) {
  const lines = [
    { name: "expected of the tree searched for each size", points: data.searched },
    { name: "expected of the tree in use, cut to each size", points: data.used },
    { name: "measured at calibration", points: data.calibration, dots: true, line: false, says: ([nodes, rate]) => `${nodes} nodes: ${rate.toFixed(2)} tokens a step` },
  ];
  const all = lines.flatMap((line) => line.points);
  const most = Math.max(...all.map((p) => p[0]));
  say(tokens.words, "Expected: the accuracies multiplied along each path. Measured may differ: heads are right together more often than that, but a step begins where the one before failed, and an answer ends.");
  plot(tokens, {
    x: nodeAxis(most),
    y: valueAxis("tokens a step", all.map((p) => p[1]), 1),
    lines,
    label: `Tokens a step against nodes: expected ${data.used.at(-1)[1]} at ${data.used.at(-1)[0]} nodes`,
  });
}

function drawCosts(data) {
  times.box.classList.toggle("is-empty", !data);
  if (!data) return say(times.words, "Not known yet: send a message.");
  say(times.words, `Draft included, in plain steps of ${figureText(data.ms, 2)} ms, learnt from ${count(data.steps)} steps. Sizes that were not used follow the hardware model's shape.`);
  plot(times, {
    x: nodeAxis(data.points.at(-1)[0]),
    y: valueAxis("plain steps", data.points.map((p) => p[1]), 0),
    lines: [{ name: "a step", points: data.points, dots: true, says: ([nodes, value]) => `${nodes} nodes: ${value.toFixed(2)} plain steps` }],
    label: `Cost of a step in plain steps against nodes: ${data.points.map(([n, cost]) => `${cost.toFixed(2)} at ${n}`).join(", ")}`,
  });
}

function drawGain(data) {
  gain.box.classList.toggle("is-empty", !data);
  if (!data) return say(gain.words, "Needs the cost of a step: send a message.");
  const [nodes, speedup] = data.best;
  say(gain.words, `Expected tokens over the cost. Lately ${percent(data.trust)} of what the drafter promised was accepted, which is counted in.`);
  const values = data.points.map((p) => p[1]);
  plot(gain, {
    x: nodeAxis(data.points.at(-1)[0]),
    y: valueAxis("times plain decoding", values, Math.min(1, ...values) < 0.95 ? 0 : 0.5),
    lines: [{ name: "the tree in use, cut to each size", points: data.points }],
    level: { at: 1, name: "plain decoding" },
    best: { at: data.best, name: `best: ${nodes} nodes, ${speedup.toFixed(2)}×` },
    label: `Speedup against nodes: best ${speedup.toFixed(2)} times plain decoding at ${nodes} nodes.`,
  });
}

// The server works only for a tab that somebody sees.
function refresh() {
  if (isInSight()) trigger("refresh");
}

// The tab comes in sight, or its width changes: what was drawn unseen had no width.
function resize() {
  if (!root.clientWidth) return;
  if (!view) refresh();
  show();
}

verdict.append(title, best);
cards.forEach((card) => (card.hidden = true));
guest.hidden = true;
root.replaceChildren(hollow, guest, ...cards);
onValue((line) => {
  view = line;
  show();
});
new ResizeObserver(resize).observe(root);
every(REFRESH_MS, refresh);
refresh();

// Rank accuracies as a table whose cells are tinted: the number stands in each of them.
function heatCard() {
  const card = make("section", "tune-card wide");
  const heading = make("h3", "", "How often each head is right");
  const words = make("p", "tune-words");
  const scroll = scrollRegion("heat-scroll", "Rank accuracies by head, scrollable");
  card.append(heading, words, scroll);
  return { card, words, scroll };
}

function drawHeat(heat, table) {
  say(heat.words, `${table.name}. ${table.note}`);
  heat.scroll.replaceChildren(heatTable(table));
}

function heatTable(table) {
  const grid = make("table", "heat");
  grid.append(make("caption", "", `${table.name}: share right, by head and rank`));
  const head = make("tr", "");
  const name = (text) => {
    const cell = make("th", "", text);
    cell.scope = "col";
    return cell;
  };
  const ranks = table.rows[0].map((_, rank) => name(`top-${rank + 1}`));
  head.append(name("head"), ...ranks, name(`any of ${table.rows[0].length}`));
  const top = make("thead", "");
  top.append(head);
  const body = make("tbody", "");
  table.rows.forEach((row, place) => body.append(heatRow(row, place)));
  grid.append(top, body);
  return grid;
}

function heatRow(row, place) {
  const line = make("tr", "");
  const label = make("th", "", `head ${place + 1}`);
  label.scope = "row";
  line.append(label);
  row.forEach((share) => {
    const cell = make("td", "tinted", percent(share));
    cell.style.setProperty("--share", Math.min(1, Math.sqrt(share)).toFixed(3));
    line.append(cell);
  });
  line.append(make("td", "sum", percent(row.reduce((a, b) => a + b, 0))));
  return line;
}
