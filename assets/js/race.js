// The clock of the race: this machine's, or a named GPU's. A recording stays as it was measured;
// `modelled` gives the same steps the times of that GPU. The Chat tab keeps the GPU (pace.js).
import { blockOf } from "./block.js";
import { result, retime } from "./compare.js";
import { choiceOf, make, say } from "./elements.js";
import { number } from "./format.js";
import { gpuChoices, gpuMs, modelledWords, slowWords, slowness } from "./gpu.js";
import { pace, paceMode, setPace } from "./pace.js";
import { page } from "./page.js";

const { trigger } = blockOf("compare");
const RACE_CLOCKS = [["here", "this machine's clock"], ["gpu", "as a GPU would"]];
export const raceBox = make("div", "race-clock");
const raceGpu = make("div", "gpu-choices");
const raceWords = make("p", "race-words");
const raceChoice = choiceOf("Clock of the race", RACE_CLOCKS, "here", (kind) => {
  raceKind = kind;
  meetPace();
});
const chooseRaceGpu = gpuChoices(raceGpu, pace, setPace);
let raceKind = null; // null: as the Chat tab shows its answers
let chatMode = null;
let toldPace = "";
raceBox.append(raceChoice, raceGpu, raceWords);

export function isGpuClock() {
  return (raceKind || paceMode()) === "gpu";
}

// How many times slower than its clock the race is shown.
export function stretch() {
  return isGpuClock() ? slowness(pace) : 1;
}

// The Chat tab's pace is another now, or the clock was chosen here.
export function meetPace() {
  const mode = paceMode();
  if (mode !== chatMode && chatMode !== null) raceKind = null;
  chatMode = mode;
  tellRacePace();
  drawRaceClock();
  retime();
}

// What the server must know: how many nodes the next comparison drafts in every step.
function tellRacePace() {
  if (!page.model) return; // it knows what is usual
  const paced = isGpuClock();
  const told = { paced, nodes: paced ? pace.nodes : null };
  if (JSON.stringify(told) === toldPace) return;
  toldPace = JSON.stringify(told);
  trigger("pace", { ...told, order: performance.now() });
}

export function drawRaceClock() {
  const of = pace;
  raceChoice.value = isGpuClock() ? "gpu" : "here";
  raceGpu.hidden = !isGpuClock();
  for (const name in chooseRaceGpu) chooseRaceGpu[name].value = of[name];
  say(raceWords, isGpuClock() ? gpuRaceWords(of) : ownRaceWords());
}

function gpuRaceWords(of) {
  const isOther = result && result.show_nodes !== null && result.show_nodes !== of.nodes;
  const other = isOther ? `Run both again to race with ${of.nodes} nodes in every step.` : "";
  return `Times, rates and ratios are ${gpuWords(of)}, and the prompt counts as one plain step. ${slowWords(of)}${other}`;
}

function ownRaceWords() {
  const isShow = result && result.show_nodes !== null;
  const again = isShow ? " Run both again to have the tree as the settings say." : "";
  return `Times, rates and ratios are measured on this machine.${again}`;
}

// The words that stand beside modelled figures.
function gpuWords(of) {
  const whose = result ? result.whose : page.model?.isDemo ? "demo" : "model";
  return modelledWords(of, whose);
}

// The result with the times of that GPU.
export function modelled(found, of) {
  const sides = found.sides.map((side) => modelledSide(side, of));
  const [plain, drafted] = sides;
  const speedup = plain.rate && drafted.rate ? drafted.rate / plain.rate : null;
  const overhead = speedup === null ? null : drafted.step_ms / plain.step_ms;
  const made = { ...found, sides, speedup, overhead, is_slower: speedup !== null && speedup < 1 };
  return { ...made, verdict: speedup === null ? found.verdict : modelledVerdict(made, of) };
}

function modelledSide(side, of) {
  let ms = gpuMs(of, 1); // of the prompt
  const frames = side.frames.map(([, text, tokens, nodes]) => {
    ms += nodes ? gpuMs(of, nodes) : 0;
    return [ms, text, tokens];
  });
  const first = gpuMs(of, 1);
  const step = side.steps ? (ms - first) / side.steps : null;
  const rate = step && side.per_step ? (side.per_step / step) * 1000 : null;
  return { ...side, frames, first_ms: first, total_ms: ms, step_ms: step, rate };
}

function modelledVerdict({ sides, speedup, overhead, acceleration_rate, hedge }, of) {
  const name = sides[1].name;
  const where = `on an ${of.gpu} (${of.size}, ${of.precision})`;
  if (speedup >= 1) {
    return `${name} would be ${number(speedup, 2)}× as fast as plain decoding ${where}.${hedge}`;
  }
  const cost = `A step costs ${number(overhead, 2)} plain steps`;
  const gives = `gives ${number(acceleration_rate, 2)} tokens`;
  const ratio = `${number(speedup, 2)}×`;
  return `${name} would be slower than plain decoding ${where}: ${ratio}. ${cost} and ${gives}.${hedge}`;
}

for (const name of ["medusa-pace", "medusa-model"]) window.addEventListener(name, meetPace);
