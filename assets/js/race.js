// The clock of the race: this machine's, or a named GPU's. A recording stays as it was measured;
// `modelled` gives the same steps the times of that GPU. The Chat tab keeps the GPU (pace.js).
import { blockOf } from "./block.js";
import { result, retime } from "./compare.js";
import { choiceOf, make, say } from "./elements.js";
import { gpuChoices, modelledWords, pace, paceMode, setPace, slowWords, slowness } from "./pace.js";
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

for (const name of ["medusa-pace", "medusa-model"]) window.addEventListener(name, meetPace);
