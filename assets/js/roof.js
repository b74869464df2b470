// Appendix G's hardware model: the roofline with the operators of a plain and of a tree step, and
// overhead and speedup over the nodes. The value is one JSON object.
import { blockOf } from "./block.js";
import { make, say, withRole } from "./elements.js";
import { count } from "./format.js";
import { figureBox, figureText, nodeAxis, plot, valueAxis } from "./plot.js";

const { root, onValue } = blockOf("roof");
const answer = withRole(make("p", "tune-strong"), "status");
const roofline = figureBox("Roofline");
const overhead = figureBox("Overhead and speedup");
const notes = make("details", "tune-notes");
const list = make("ul", "");
let view = null;

function drawRoof() {
  if (!view) return;
  say(answer, view.text);
  drawLine(view);
  drawNodes(view);
  list.replaceChildren(...view.assumptions.map((text) => make("li", "", text)));
}

function drawLine(view) {
  const marks = view.points.map((point) => point.intensity);
  const [low, high] = [Math.min(0.5, ...marks), Math.max(view.ridge * 4, ...marks) * 1.2];
  const at = (intensity) => Math.min(view.peak, (intensity * view.bandwidth) / 1000);
  const roof = [low, view.ridge, high].map((intensity) => [intensity, at(intensity)]);
  const group = (queries, name) => ({
    name,
    dots: true,
    line: false,
    points: view.points.filter((p) => p.queries === queries).map((p) => [p.intensity, p.tflops, p.name]),
    says: ([intensity, tflops, operator]) => `${operator}: ${intensity} FLOP a byte, ${figureText(tflops, 2)} TFLOP/s`,
  });
  const lowest = Math.min(...view.points.map((p) => p.tflops), at(low));
  const decades = (from, to) => {
    const ticks = [];
    for (let power = Math.ceil(Math.log10(from)); power <= Math.log10(to); power++) ticks.push([10 ** power, figureText(10 ** power, 2)]);
    return ticks;
  };
  say(roofline.words, `${view.gpu}: ${figureText(view.peak, 0)} TFLOP/s, ${count(view.bandwidth)} GB/s. Left of the bend, at ${figureText(view.ridge, 0)} FLOP a byte, memory decides: more nodes are nearly free there. ${operators(view)}`);
  plot(roofline, {
    x: { name: "FLOP a byte", low, high, log: true, ticks: decades(low, high) },
    y: { name: "TFLOP/s", low: lowest / 2, high: view.peak * 1.6, log: true, ticks: decades(lowest / 2, view.peak * 1.6) },
    lines: [
      { name: "what the GPU allows", points: roof },
      group(1, "operators of a plain step"),
      group(view.nodes, `operators of a step of ${view.nodes} nodes`),
    ],
    label: `Roofline of ${view.gpu}: ${view.points.map((p) => `${p.name} with ${p.queries} queries ${p.intensity} FLOP a byte`).join(", ")}`,
  });
}

// The operators by name, for the dots lie close together.
function operators(view) {
  const of = (queries) =>
    view.points.filter((p) => p.queries === queries).map((p) => `${p.name} ${figureText(p.intensity, 1)}`);
  return `A plain step: ${of(1).join("; ")}. A step of ${view.nodes} nodes: ${of(view.nodes).join("; ")}.`;
}

function drawNodes(view) {
  const all = [...view.overhead, ...view.speedup].map((point) => point[1]);
  const { nodes, speedup } = view.best;
  say(overhead.words, "Overhead: time of a step over that of a plain one. Speedup: tokens a step over the overhead.");
  plot(overhead, {
    x: nodeAxis(256),
    y: valueAxis("times plain", all, 0),
    lines: [
      { name: "speedup", points: view.speedup },
      { name: "overhead", points: view.overhead },
    ],
    level: { at: 1, name: "plain decoding" },
    best: { at: [nodes, speedup], name: `best: ${nodes} nodes, ${speedup.toFixed(2)}×` },
    label: `Modelled overhead and speedup against nodes: ${view.text}`,
  });
}

notes.append(make("summary", "", "What this assumes"), list);
const pair = make("div", "roof-pair");
pair.append(roofline.box, overhead.box);
root.replaceChildren(answer, pair, notes);
onValue((line) => {
  view = line;
  drawRoof();
});
new ResizeObserver(drawRoof).observe(root);
