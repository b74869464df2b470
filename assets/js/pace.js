// The pace at which answers are shown: full speed, as a named GPU would, slow motion or step by step.
// This browser keeps it; the Compare tab races at it.
import { PACE_KEY, gpuMs, slowness, storedPace } from "./gpu.js";
import { page, tell } from "./page.js";
import { store } from "./stored.js";

const STRETCH = { full: 1, quarter: 4, tenth: 10 };
const NEVER = 1e9;
export const pace = storedPace();

export function paceMode() {
  return pace.mode || (page.model?.isDemo ? "gpu" : "full");
}

// Milliseconds that a step takes at this pace. ms: what it took here.
export function paceOf(nodes, ms) {
  const mode = paceMode();
  if (mode === "gpu") return gpuMs(pace, nodes) * slowness(pace);
  return mode === "step" ? NEVER : ms * STRETCH[mode];
}

export function setPace(change) {
  Object.assign(pace, change);
  store("localStorage", PACE_KEY, JSON.stringify(pace));
  tell("medusa-pace");
}
