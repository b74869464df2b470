// The Tune tab. The value is one JSON object; each card is drawn again only when its own part of it
// has changed, so that focus stays. Texts go in by textContent only.
const REFRESH_MS = 1000;
const hollow = make("p", "tune-hollow");
const guest = make("p", "tune-words tune-guest", "You look at this page as a guest: nothing here can be changed by you.");
const verdict = make("section", "tune-card wide tune-verdict");
const title = make("h2", "");
const best = make("p", "tune-strong");
const slower = make("p", "tune-slower");
const work = withRole(make("p", "tune-work"), "status");
const actions = make("div", "tune-actions");
const measure = button("measure", "Measure now", () => trigger("measure"));
const heat = heatCard();
const shape = treeCard();
const tokens = figureBox("Tokens a step");
const times = figureBox("Time of a step");
const gain = figureBox("Predicted speedup");
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
  drawTimes(view.times);
  drawGain(view.speedup);
}

const parts = {};
function part(name, act) {
  const now = JSON.stringify(view[name]);
  if (parts[name] === now) return;
  parts[name] = now;
  act();
}

// ---- what is best, and what may be done ----

function drawVerdict() {
  say(title, `${view.model} (${view.device})`);
  const found = view.speedup?.lines[0].best;
  say(slower, view.speedup?.plain || "");
  slower.hidden = !slower.textContent;
  const line = found
    ? `Best: ${found.nodes} nodes, ${found.speedup.toFixed(2)} times plain decoding: ` +
      `${found.tokens.toFixed(2)} tokens a step at ${found.overhead.toFixed(2)} times the cost of a plain step.`
    : "The steps were not timed on this machine yet, so no speedup can be predicted. Press Measure now.";
  say(best, line);
  best.hidden = !slower.hidden;
  say(work, view.work.text);
  work.classList.toggle("failed", view.work.failed);
  work.hidden = !view.work.text;
  measure.disabled = view.work.running;
  measure.hidden = view.guest;
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

function drawTimes(data) {
  times.box.classList.toggle("is-empty", !data);
  if (!data) return say(times.words, "Not measured yet: press Measure now.");
  say(times.words, `Whole steps, median, measured on this device on ${data.date}.`);
  const lines = data.lines.map(({ length, ms }) => ({
    name: `behind ${count(length)} tokens`,
    points: ms.map((value, place) => [data.nodes[place], value]),
    dots: true,
    says: ([nodes, value]) => `${nodes} nodes: ${figureText(value, 2)} ms`,
  }));
  const all = lines.flatMap((line) => line.points);
  plot(times, {
    x: nodeAxis(data.nodes.at(-1)),
    y: valueAxis("ms a step", all.map((p) => p[1]), 0),
    lines,
    label: `Milliseconds of a step against nodes: ${lines[0].points.map(([n, ms]) => `${figureText(ms, 1)} at ${n}`).join(", ")}`,
  });
}

function drawGain(data) {
  gain.box.classList.toggle("is-empty", !data);
  if (!data) return say(gain.words, "Needs the time of a step: press Measure now.");
  const { nodes, speedup } = data.lines[0].best;
  say(gain.words, data.plain || "Expected tokens of the tree in use over the measured cost of a step.");
  const lines = data.lines.map(({ length, points }) => ({ name: `behind ${count(length)} tokens`, points }));
  const all = lines.flatMap((line) => line.points);
  const least = Math.min(1, ...all.map((p) => p[1]));
  plot(gain, {
    x: nodeAxis(Math.max(...all.map((p) => p[0]))),
    y: valueAxis("times plain decoding", all.map((p) => p[1]), least < 0.95 ? 0 : 0.5),
    lines,
    level: { at: 1, name: "plain decoding" },
    best: { at: [nodes, speedup], name: `best: ${nodes} nodes, ${speedup.toFixed(2)}×` },
    label: `Predicted speedup against nodes: best ${speedup.toFixed(2)} times plain decoding at ${nodes} nodes. ${data.plain}`,
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

pen.font = `10px ${getComputedStyle(root).getPropertyValue("--font-mono") || "monospace"}`;
actions.append(measure);
verdict.append(title, slower, best, actions, work);
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
