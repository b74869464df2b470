// The figures of the answer that is shown, with the times of a GPU that is named.
// What the tiles show in place of figures f of this machine; null at another pace, and where the
// tokens a step of so many nodes are not known.
import { NODES, gpuMs } from "./gpu.js";
import { pace, paceMode } from "./pace.js";
import { panel } from "./panel.js";

export function modelledFigures(f) {
  if (paceMode() !== "gpu" || !f.steps) return null;
  const [own, ...rows] = gpuRows();
  const row = f.is_plain ? own : rows.find((one) => one.nodes === pace.nodes);
  if (row.rate === null) return null;
  const { ms, tokens, rate, gain } = row;
  const overhead = f.is_plain ? null : ms / own.ms;
  return { ms, rate, overhead, per_step: tokens, ratio: gain, where: `modelled: ${pace.gpu}` };
}

// Tokens a step with the first m nodes of the answer's drafts, which are in order of value: of all
// steps or none, for after a reload only those are here that were looked at.
function tokensWith(m) {
  const told = panel.known.bars.length;
  if (m === 1 || !told) return m === 1 ? 1 : null;
  if (panel.known.nodes.every((nodes) => nodes === m)) return panel.data.figures.per_step;
  const seen = [...panel.steps.values()].filter((step) => step.state);
  if (seen.length < told || panel.known.nodes.every((nodes) => nodes < m)) return null;
  const accepted = (step) => [...step.state.slice(1, m)].filter((state) => state === "a").length;
  return 1 + seen.reduce((sum, step) => sum + accepted(step), 0) / seen.length;
}

// What plain decoding and each size of the tree would give on that GPU; null before any step.
export function gpuRows() {
  return [1, ...NODES].map((nodes) => {
    const [ms, tokens] = [gpuMs(pace, nodes), tokensWith(nodes)];
    const rate = tokens === null ? null : (tokens / ms) * 1000;
    return { nodes, ms, tokens, rate, gain: rate === null ? null : (rate * gpuMs(pace, 1)) / 1000 };
  });
}

