// The pace at which answers are shown: full speed, as a named GPU would, slow motion or step by step.
// This browser keeps it; the Compare tab races at it. The GPUs' times are a table of the program,
// GPU_TIMES: {nodes, ms: {"size|GPU|precision"}}.
import { choiceOf, withRole } from "./elements.js";
import { known, page, store, stored, tell } from "./page.js";

const MOST_STEPS = 6; // a second, in slow motion
export const NODES = [16, 32, 64]; // of the show; the table has plain decoding too
const CLOCKS = [["slow", "slow motion"], ["own", "its own clock"]];
const PACE_KEY = "medusa-chat-pace";
const FIRST_PACE = {
  ...{ mode: null, size: "7B", gpu: "RTX 4090", precision: "fp16", nodes: 64, clock: "slow" },
};

// Milliseconds of a step with so many nodes; 1 is plain decoding.
export function gpuMs(of, nodes) {
  const times = known.GPU_TIMES.ms[`${of.size}|${of.gpu}|${of.precision}`];
  const sizes = known.GPU_TIMES.nodes;
  const next = sizes.findIndex((size) => size >= nodes);
  if (next <= 0) return next ? times.at(-1) : times[0];
  const share = (nodes - sizes[next - 1]) / (sizes[next] - sizes[next - 1]);
  return times[next - 1] + share * (times[next] - times[next - 1]);
}

// How many times slower than that GPU it is shown: in slow motion even plain steps can be watched.
export function slowness(of) {
  return of.clock === "slow" ? Math.max(1, Math.ceil(1000 / MOST_STEPS / gpuMs(of, 1))) : 1;
}

export function modelledWords(of, whose) {
  return `modelled: the times of a ${of.size} on this GPU; the tokens a step are this ${whose}'s`;
}

// The words of it, with a space behind them; empty where it is not slower.
export function slowWords(of) {
  const times = slowness(of);
  return times > 1 ? `Shown ${times} times slower. ` : "";
}

// The pace that this browser keeps, where it is one.
function storedPace() {
  const { sizes, gpus, precisions } = known.GPU_TIMES;
  let found = null;
  try {
    found = JSON.parse(stored("localStorage", PACE_KEY));
  } catch {
    // it is not ours
  }
  const isGpu = sizes.includes(found?.size) && gpus.includes(found.gpu) && precisions.includes(found.precision);
  const isOurs = isGpu && CLOCKS.some(([clock]) => clock === found.clock) && NODES.includes(found.nodes);
  return isOurs ? { ...FIRST_PACE, ...found } : { ...FIRST_PACE };
}

function named(list) {
  return list.map((name) => [name, name]);
}

// The choices of a GPU in `row`, by the names of a pace. set: told what was chosen.
export function gpuChoices(row, of, set) {
  const { sizes, gpus, precisions } = known.GPU_TIMES;
  const nodes = NODES.map((n) => [n, `${n} nodes`]);
  const made = {
    size: choiceOf("Model size", named(sizes), of.size, (size) => set({ size })),
    gpu: choiceOf("GPU", named(gpus), of.gpu, (gpu) => set({ gpu })),
    precision: choiceOf("Precision", named(precisions), of.precision, (precision) =>
      set({ precision }),
    ),
    nodes: choiceOf("Nodes in every step", nodes, of.nodes, (n) => set({ nodes: Number(n) })),
    clock: choiceOf("Clock", CLOCKS, of.clock, (clock) => set({ clock })),
  };
  row.append(...Object.values(made));
  withRole(row, "group", "The GPU whose times are modelled");
  return made;
}

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
