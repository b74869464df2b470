// The rule of typical acceptance: p > min(ε, δ·exp(−H)), the longest path, then the likeliest.
// A step of typical acceptance as it would have been with another {epsilon, delta}.
import { isTypical } from "./words.js";

export function judge(step, rule) {
  if (!step.parent || !isTypical(step) || !step.entropy || !step.p) return step;
  const { epsilon, delta } = rule;
  const limits = step.entropy.map((h) => (h === null ? null : delta * Math.exp(-h)));
  const threshold = limits.map((limit) => (limit === null ? null : Math.min(epsilon, limit)));
  // Where everything passes (a threshold of 0) or nothing does there is no distance to tell.
  const margin = step.parent.map((parent, node) =>
    node && threshold[parent] && step.p[node]
      ? Math.max(-99, Math.min(99, Math.log(step.p[node] / threshold[parent])))
      : null,
  );
  const above = (node) => threshold[step.parent[node]];
  const taken = bestPath(step, (node) => above(node) !== null && step.p[node] > above(node));
  const state = step.parent
    .map((parent, node) => (taken.has(node) ? "a" : taken.has(parent) ? "r" : "u"))
    .join("");
  const binds = limits.map((limit) => (limit === null ? "-" : limit < epsilon ? "d" : "e")).join("");
  return { ...step, threshold, margin, state, binds, rule, accepted: taken.size - 1 };
}

function bestPath(step, passes) {
  const depth = [0];
  const worth = [0];
  let best = 0;
  for (let node = 1; node < step.parent.length; node++) {
    const parent = step.parent[node];
    if (depth[parent] === undefined || !passes(node)) continue;
    depth[node] = depth[parent] + 1;
    worth[node] = worth[parent] + Math.log(step.p[node]);
    const isLonger = depth[node] > depth[best];
    if (isLonger || (depth[node] === depth[best] && worth[node] > worth[best])) best = node;
  }
  const taken = new Set();
  for (let node = best; node >= 0; node = step.parent[node]) taken.add(node);
  return taken;
}
