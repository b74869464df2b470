// Line charts over nodes or intensity: axes, lines with dots, one level, one best point. Every line
// has its own dash and its own shape of dot, so that colour is never all there is.
import { draw, make, set } from "./elements.js";

const PLOT = { left: 46, right: 12, top: 12, bottom: 34, high: 230 };
const SHAPES = ["circle", "square", "diamond", "triangle"];

export function figureBox(title) {
  const box = make("section", "tune-card");
  const heading = make("h3", "", title);
  const words = make("p", "tune-words");
  const svg = draw("svg", { class: "plot", role: "img", "aria-label": "nothing is drawn yet" });
  const legend = make("ul", "plot-legend");
  box.append(heading, words, svg, legend);
  return { box, heading, words, svg, legend, drawn: "" };
}

// spec: {x: axis, y: axis, lines: [{name, points, dots, line}], level: {at, name}, best, label}
// axis: {name, low, high, log, ticks: [[value, text]]}
export function plot(figure, spec) {
  const wide = Math.round(figure.box.clientWidth - 28);
  if (wide < 120) return;
  const key = `${wide}|${JSON.stringify(spec)}`;
  if (figure.drawn === key) return;
  figure.drawn = key;
  const { left, right, top, bottom, high } = PLOT;
  const x = scaleOn(spec.x, left, wide - right);
  const y = scaleOn(spec.y, high - bottom, top);
  const parts = [];
  const put = (tag, attributes, text) => parts.push(draw(tag, attributes, text));
  spec.y.ticks.forEach(([value, text]) => {
    put("path", { class: "grid", d: `M${left} ${y(value)}H${wide - right}` });
    put("text", { class: "tick end", x: left - 6, y: y(value) + 3.5 }, text);
  });
  spec.x.ticks.forEach(([value, text]) => {
    put("path", { class: "grid short", d: `M${x(value)} ${high - bottom}v4` });
    put("text", { class: "tick middle", x: x(value), y: high - bottom + 16 }, text);
  });
  put("text", { class: "name end", x: wide - right, y: high - 3 }, spec.x.name);
  put("text", { class: "name", x: left + 4, y: top + 2 }, spec.y.name);
  if (spec.level) {
    const at = y(spec.level.at).toFixed(1);
    put("path", { class: "level", d: `M${left} ${at}H${wide - right}` });
    put("text", { class: "level-name end", x: wide - right - 2, y: Number(at) + 13 }, spec.level.name);
  }
  spec.lines.forEach((line, place) => {
    const at = line.points.map(([a, b]) => [x(a), y(b)]);
    if (line.line !== false && at.length > 1)
      put("path", { class: `line l${place}`, d: `M${at.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}` });
    if (line.ends && at.length)
      put("text", { class: "end-name", x: Math.min(at.at(-1)[0] + 3, wide - 8), y: at.at(-1)[1] + 3.5 }, line.ends);
    if (line.dots)
      at.forEach(([a, b], number) => {
        const dot = draw("path", { class: `dot l${place}`, d: dotAt(SHAPES[place % SHAPES.length], a, b) });
        if (line.says) dot.append(draw("title", {}, line.says(line.points[number])));
        parts.push(dot);
      });
  });
  if (spec.best) {
    const [a, b] = [x(spec.best.at[0]), y(spec.best.at[1])];
    const nearRight = a > wide * 0.6;
    put("circle", { class: "best", cx: a, cy: b, r: 7 });
    put("text", { class: `best-name${nearRight ? " end" : ""}`, x: a + (nearRight ? -10 : 10), y: b < top + 26 ? b + 22 : b - 9 }, spec.best.name);
  }
  set(figure.svg, { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, "aria-label": spec.label });
  figure.svg.replaceChildren(...parts);
  figure.legend.replaceChildren(...spec.lines.filter((line) => line.points.length).map(legendItem(spec.lines)));
}

function scaleOn(axis, from, to) {
  const turn = axis.log ? Math.log2 : (value) => value;
  const [low, high] = [turn(axis.low), turn(axis.high)];
  return (value) => {
    const at = Math.min(Math.max(turn(value), low), high);
    return from + ((to - from) * (at - low)) / (high - low || 1);
  };
}

function legendItem(lines) {
  return (line) => {
    const place = lines.indexOf(line);
    const item = make("li", "");
    const sample = draw("svg", { class: "plot sample", width: 30, height: 12, "aria-hidden": "true" });
    if (line.line !== false) sample.append(draw("path", { class: `line l${place}`, d: "M1 6H29" }));
    if (line.dots) sample.append(draw("path", { class: `dot l${place}`, d: dotAt(SHAPES[place % SHAPES.length], 15, 6) }));
    item.append(sample, line.name);
    return item;
  };
}

function dotAt(shape, x, y) {
  const [a, b] = [x.toFixed(1), y.toFixed(1)];
  if (shape === "square") return `M${a - 3.4} ${b - 3.4}h6.8v6.8h-6.8Z`;
  if (shape === "diamond") return `M${a} ${b - 4.8}l4.8 4.8l-4.8 4.8l-4.8 -4.8Z`;
  if (shape === "triangle") return `M${a} ${b - 4.6}l4.6 8h-9.2Z`;
  return `M${a - 3.6} ${b}a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0Z`;
}

// 1, 2, 4 ... up to the largest number of nodes.
export function nodeAxis(most) {
  const ticks = [];
  for (let nodes = 1; nodes <= most; nodes *= 2) ticks.push([nodes, String(nodes)]);
  return { name: "nodes, root counted", low: 1, high: Math.max(most, 2), log: true, ticks };
}

// Rises from `low` in four or five round steps.
export function valueAxis(name, values, low) {
  const most = Math.max(...values, low + 0.1);
  const rough = (most - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= rough * 0.999);
  const ticks = [];
  const digits = Math.max(0, Math.ceil(-Math.log10(unit))) + (step === 2.5 * unit ? 1 : 0);
  for (let at = low; at < most + step * 0.999; at += step) ticks.push([at, figureText(at, digits)]);
  return { name, low, high: ticks.at(-1)[0], ticks };
}

export function figureText(value, digits) {
  return Number(value.toFixed(digits ?? 2)).toLocaleString("en");
}
