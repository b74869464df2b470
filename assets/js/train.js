// The latest training in the Tune tab: how far it is, and its curves. The value is one JSON object.
import { blockOf } from "./block.js";
import { button, make, say, withRole } from "./elements.js";
import { percent } from "./format.js";
import { figureBox, plot, valueAxis } from "./plot.js";

const { root, trigger, onValue } = blockOf("train");
const card = make("section", "tune-card wide");
const where = make("p", "tune-words");
const text = withRole(make("p", "tune-strong"), "status");
const bar = make("progress", "train-bar");
const halt = button("halt", "Stop this training", () => trigger("halt"));
const pair = make("div", "roof-pair");
const loss = figureBox("Loss");
const top1 = figureBox("First guess of each head");
let view = null;

function drawTrain() {
  root.hidden = !view;
  if (!view) return;
  say(where, `${view.output}, begun ${view.started}`);
  say(text, view.text);
  bar.hidden = !view.running || view.part === null;
  if (view.part !== null) bar.value = view.part;
  halt.hidden = !view.stoppable;
  pair.hidden = view.loss.length < 2;
  if (!pair.hidden) drawCurves(view);
}

function drawCurves(view) {
  const lines = [{ name: view.lm_loss.length ? "all" : "heads", points: view.loss }];
  if (view.lm_loss.length) lines.push({ name: "backbone's own", points: view.lm_loss });
  const values = lines.flatMap((line) => line.points.map((p) => p[1]));
  const last = view.loss.at(-1);
  say(loss.words, "Of each step, neighbours averaged.");
  plot(loss, {
    x: stepAxis(last[0]),
    y: valueAxis("loss", values, 0),
    lines,
    label: `Loss by step: ${view.loss[0][1]} at first, ${last[1]} at step ${last[0]}`,
  });
  const heads = view.top1.map((points, head) => ({ name: `head ${head + 1}`, points, ends: String(head + 1) }));
  const held = view.held.flat();
  const all = heads.concat({ name: "held out", points: held, line: false, dots: true });
  say(top1.words, "How often it is the token: in what is learnt, and held out (dots).");
  plot(top1, {
    x: stepAxis(last[0]),
    y: valueAxis("share right", all.flatMap((line) => line.points.map((p) => p[1])), 0),
    lines: all,
    label: `First guesses right by step: ${view.top1.map((p, head) => `head ${head + 1} ${percent(p.at(-1)[1])}`).join(", ")}`,
  });
}

function stepAxis(steps) {
  const axis = valueAxis("step", [steps], 0);
  return { ...axis, high: Math.max(steps, 1), ticks: axis.ticks.filter(([at]) => at <= steps) };
}

bar.max = 1;
bar.setAttribute("aria-label", "Progress of the training");
pair.append(loss.box, top1.box);
const actions = make("div", "tune-actions");
actions.append(halt);
card.append(make("h3", "", "Training"), where, text, bar, pair, actions);
root.replaceChildren(card);
onValue((line) => {
  view = line;
  drawTrain();
});
new ResizeObserver(drawTrain).observe(root.parentElement);
