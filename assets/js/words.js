// What a node is, in marks and in words. `step` is one step's lists, `data` the line it came in.
import { figure, percent, quoted } from "./format.js";

export const MARKS = { a: "✓", r: "✗", u: "", e: "" };
export const QUOTE = "”";
export const NEXT = "+1";
export const STATES = { a: "accepted", r: "rejected", u: "unreached", e: "unreached" };

export function isGreedy(data) {
  return data.temperature !== null && data.temperature < 0.001;
}

export function isTypical(step) {
  return Boolean(step.threshold);
}

export function own(data) {
  return isGreedy(data) ? "the model's first choice" : "the model's own sample";
}

export function signed(margin) {
  return `${margin < 0 ? "−" : "+"}${Math.abs(margin).toFixed(margin > -10 && margin < 10 ? 1 : 0)}`;
}

// What proposed a node: "h(eads)", "d(raft model)", "t(ext)", "b(oth)" the heads and the text, "e(ither)" the draft
// model and the text; of two draft models "f(irst)", "s(econd)", "m(erged)" both, a capital with the text; "-" for the
// root, "" where it was not recorded.
export function sourceOf(step, node) {
  return step.source ? step.source[node] : "";
}

export function isOfText(step, node) {
  return "tbeFSM".includes(sourceOf(step, node) || "-");
}

export const SOURCES = {
  h: "the heads",
  t: "the text: it followed the same words before",
  b: "both, the heads and the text",
  d: "the draft model",
  e: "both, the draft model and the text",
  f: "the first draft model",
  s: "the second draft model",
  m: "both draft models",
  F: "the first draft model and the text",
  S: "the second draft model and the text",
  M: "both draft models and the text",
};

// A ” behind it where the text proposed the node too, or alone.
export function markOf(step, node) {
  const mark = judgedMark(step, node);
  return isOfText(step, node) ? `${mark} ${QUOTE}`.trim() : mark;
}

// ✓+0.5, ✗−1.4 (margin) under typical; ✓ 67%, ✗ 9% (its probability) under exact; #3 (rank).
function judgedMark(step, node) {
  const state = step.state[node];
  if (node === 0) return MARKS.a;
  const rank = figure(step.rank, node);
  if ("ue".includes(state)) return rank === null ? "" : `#${rank}`;
  const margin = figure(step.margin, node);
  if (margin !== null) return `${MARKS[state]}${signed(margin)}`;
  const p = figure(step.p, node);
  if (p === null) return MARKS[state];
  return p < 0.01 ? MARKS[state] : `${MARKS[state]} ${Math.round(p * 100)}%`; // the token needs the room
}

export function stateWords(data, step, node) {
  if (node === 0) return "root: certain before this step";
  const state = step.state[node];
  if (state === "u") return "never reached: a node above it was not accepted";
  if (state === "e") return "behind the end: the answer ended above it";
  if (isTypical(step)) {
    if (state === "a") return "accepted: its probability is over the threshold";
    const isOver = figure(step.margin, node) > 0 || figure(step.threshold, step.parent[node]) === 0;
    if (isOver) return "passed the test, but a longer or likelier path won";
    return "tested and rejected: its probability is under the threshold";
  }
  if (figure(step.same, node) === null) return state === "a" ? "accepted" : "tested and rejected";
  return state === "a" ? `accepted: it is ${own(data)}` : `tested and rejected: not ${own(data)}`;
}

// Which side of threshold = min(ε, δ·exp(−H)) decides at a node as a parent; "" without a test.
export function bindWords(data, step, parent) {
  const threshold = figure(step.threshold, parent);
  const letter = figure(step.binds, parent);
  if (threshold === null || !letter) return "";
  const { epsilon, delta } = step.rule || data;
  const limit = Number(threshold.toPrecision(3));
  if (letter === "d") return `δ binds: δ·exp(−H) = ${limit} < ε = ${epsilon}`;
  const other = delta * Math.exp(-(figure(step.entropy, parent) ?? 0));
  return `ε binds: ${epsilon} ≤ δ·exp(−H) = ${Number(other.toPrecision(3))}`;
}

// The head probabilities along the path multiplied: how likely the heads thought this place.
export function cumulative(step, node) {
  let product = 1;
  for (let at = node; at > 0; at = step.parent[at]) {
    const q = figure(step.q, at);
    if (q === null) return null;
    product *= q;
  }
  return product;
}

export function depthOf(step, node) {
  let depth = 0;
  for (let at = node; at > 0; at = step.parent[at]) depth++;
  return depth;
}

// "head 2" where a head drafted at this depth of the step, else "depth 2".
export function columnName(data, step, depth) {
  if (!depth) return "root";
  const isHead = (_, node) => "hb".includes(sourceOf(step, node) || "h") && depthOf(step, node) === depth;
  const byHeads = data.drafter === "medusa" || (data.drafter === "auto" && step.parent.some(isHead));
  return `${byHeads ? "head" : "depth"} ${depth}`;
}

export function tipLines(data, step, node) {
  const lines = [stateWords(data, step, node)];
  if (node === 0) {
    const threshold = figure(step.threshold, 0);
    if (threshold !== null) lines.push(`threshold for its children ${threshold}`);
    return lines;
  }
  const parent = step.parent[node];
  const rank = figure(step.rank, node);
  const q = figure(step.q, node);
  const name = columnName(data, step, depthOf(step, node));
  const source = SOURCES[sourceOf(step, node)];
  if (source) lines.push(`proposed by ${source}`);
  if (rank !== null) lines.push(`${name}: rank #${rank}${q === null ? "" : `, ${percent(q)}`}`);
  const p = figure(step.p, node);
  if (p !== null) lines.push(`the model: ${percent(p)}`);
  const margin = figure(step.margin, node);
  if (margin !== null)
    lines.push(`threshold ${percent(figure(step.threshold, parent))}, margin ${signed(margin)}`);
  const bound = bindWords(data, step, parent);
  if (bound) lines.push(bound);
  return lines;
}

export function nodeLabel(data, step, node) {
  return `${quoted(step.text[node])} ${markOf(step, node)}: ${tipLines(data, step, node).join("; ")}`;
}

export function pathWords(step) {
  return [...step.state]
    .flatMap((state, node) => (state === "a" ? [quoted(step.text[node])] : []))
    .join(" ");
}
