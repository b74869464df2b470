// The clock of the race: this machine's, or a named GPU's. A recording stays as it was measured;
// `modelled` gives the same steps the times of that GPU. The Chat tab keeps the GPU (pace.js).
const RACE_CLOCKS = [["here", "this machine's clock"], ["gpu", "as a GPU would"]];
const raceBox = make("div", "race-clock");
const raceGpu = make("div", "gpu-choices");
const raceWords = make("p", "race-words");
const raceChoice = choiceOf("Clock of the race", RACE_CLOCKS, "here", (kind) => {
  raceKind = kind;
  meetPace();
});
const chooseRaceGpu = gpuChoices(raceGpu, paceNow(), (change) => window.medusaPace?.set(change));
let raceKind = null; // null: as the Chat tab shows its answers
let chatMode = null;
let toldPace = "";
raceBox.append(raceChoice, raceGpu, raceWords);

function paceNow() {
  return window.medusaPace?.now() || storedPace();
}

function isGpuClock() {
  return (raceKind || window.medusaPace?.mode()) === "gpu";
}

// How many times slower than its clock the race is shown.
function stretch() {
  return isGpuClock() ? slowness(paceNow()) : 1;
}

// The Chat tab's pace is another now, or the clock was chosen here.
function meetPace() {
  const mode = window.medusaPace?.mode();
  if (mode !== chatMode && chatMode !== null) raceKind = null;
  chatMode = mode ?? null;
  tellRacePace();
  drawRaceClock();
  retime();
}

// What the server must know: how many nodes the next comparison drafts in every step.
function tellRacePace() {
  if (!window.medusaModel) return; // it knows what is usual
  const paced = isGpuClock();
  const told = { paced, nodes: paced ? paceNow().nodes : null };
  if (JSON.stringify(told) === toldPace) return;
  toldPace = JSON.stringify(told);
  trigger("pace", { ...told, order: performance.now() });
}

function drawRaceClock() {
  const of = paceNow();
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
  const whose = result ? result.whose : window.medusaModel?.isDemo ? "demo" : "model";
  return modelledWords(of, whose);
}

// The result with the times of that GPU.
function modelled(found, of) {
  const sides = found.sides.map((side) => modelledSide(side, of));
  const [plain, drafted] = sides;
  const speedup = plain.rate && drafted.rate ? drafted.rate / plain.rate : null;
  const overhead = speedup === null ? null : drafted.step_ms / plain.step_ms;
  const ratio = found.is_race ? plain.total_ms / drafted.total_ms : speedup;
  const made = { ...found, sides, speedup, overhead, ratio, is_slower: ratio !== null && ratio < 1 };
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

// It follows from the race that is shown, as the verdict on what was measured does.
function modelledVerdict({ sides, ratio: times, is_race, overhead, acceleration_rate, hedge }, of) {
  const [plain, { name, total_ms }] = sides;
  const race = is_race ? `: ${time(total_ms)} against ${time(plain.total_ms)}` : ", per token";
  const where = `on an ${of.gpu} (${of.size}, ${of.precision})`;
  if (times >= 1) {
    return `${name} would be ${number(times, 2)}× as fast as plain decoding ${where}${race}.${hedge}`;
  }
  const cost = `A step costs ${number(overhead, 2)} plain steps`;
  const gives = `gives ${number(acceleration_rate, 2)} tokens`;
  const ratio = `${number(times, 2)}×${race}`;
  return `${name} would be slower than plain decoding ${where}, ${ratio}. ${cost} and ${gives}.${hedge}`;
}

window.addEventListener("medusa-pace", meetPace);
