// The pace of play: full speed, as a named GPU would, slow motion of this machine's own clock, or
// step by step. The show of an answer that comes (show.js) and the race of the Compare tab (race.js)
// read it from window.medusaPace.
const MODES = [
  ...[["full", "full speed"], ["gpu", "as a GPU would"]],
  ...[["quarter", "slow motion ¼"], ["tenth", "slow motion ⅒"], ["step", "step by step"]],
];
const STRETCH = { full: 1, quarter: 4, tenth: 10 };
const NEVER = 1e9;
const BEHIND =
  "This machine is slower than that GPU: the answer came as fast as it could, and is replayed at " +
  "that clock when it is done.";
const pace = storedPace();
const gpuLine = make("p", "modelled"); // the chosen size, and what the figures are
const gpuTable = make("table", "gpu-table");
const gpuRow = make("div", "gpu-choices");
const modeChoice = choiceOf("Pace", MODES, "full", (mode) => setPace({ mode }));
const chooseGpu = gpuChoices(gpuRow, pace, setPace);
const RULE_WORDS =
  "Another ε or δ: move them in Settings while a step of a typical answer stands still; its tree " +
  "shows what would have passed, without running the model.";
let isBehind = false; // this machine was slower than the GPU, for the answer that is shown
modeChoice.classList.add("mode");
gpuBox.append(gpuRow, gpuTable, make("p", "mask-note", RULE_WORDS));
pacebar.prepend(modeChoice, gpuLine);

function isDemo() {
  return Boolean(window.medusaModel?.isDemo);
}

function paceMode() {
  return pace.mode || (isDemo() ? "gpu" : "full");
}

// Milliseconds that a step takes at this pace. ms: what it took here.
function paceOf(nodes, ms) {
  const mode = paceMode();
  if (mode === "gpu") return gpuMs(pace, nodes) * slowness(pace);
  return mode === "step" ? NEVER : ms * STRETCH[mode];
}

function setPace(change) {
  Object.assign(pace, change);
  schedule();
  store("localStorage", PACE_KEY, JSON.stringify(pace));
  tellPace();
  drawPace();
  if (data) drawFigures(data.figures);
  tellRace();
}

// What the server must know: whether answers are shown slower than they come, and of which size.
function tellPace() {
  const mode = paceMode();
  const nodes = mode === "gpu" ? pace.nodes : null;
  trigger("pace", { paced: mode !== "full", nodes, order: performance.now() });
}

// What the Compare tab must know: it races at this pace, too.
function tellRace() {
  window.dispatchEvent(new Event("medusa-pace"));
}

function drawPace() {
  const mode = paceMode();
  modeChoice.value = mode;
  hide(gpuLine, mode !== "gpu");
  if (mode !== "gpu" && view !== "what if") return;
  for (const name in chooseGpu) chooseGpu[name].value = pace[name];
  const rows = gpuRows();
  drawGpuTable(rows);
  const slow = slowWords(pace);
  const words = modelledWords(pace, isDemo() ? "demo" : "model");
  const isPlain = Boolean(data?.figures.is_plain);
  const isOther = !isPlain && known.nodes.some((nodes) => nodes !== pace.nodes); // at another pace
  const show = isOther
    ? `${slow}These steps drafted other numbers of nodes; the next answer drafts ${pace.nodes} in each.`
    : slow;
  const what = !data || modelledFigures(data.figures) ? "These figures are" : "The table below is";
  say(gpuLine, `${what} ${words}. ${isBehind ? BEHIND : show}`);
}

// What the tiles show in place of figures f of this machine; null at another pace, and where the
// tokens a step of so many nodes are not known.
function modelledFigures(f) {
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
  const told = known.bars.length;
  if (m === 1 || !told) return m === 1 ? 1 : null;
  if (known.nodes.every((nodes) => nodes === m)) return data.figures.per_step;
  const seen = [...steps.values()].filter((step) => step.state);
  if (seen.length < told || known.nodes.every((nodes) => nodes < m)) return null;
  const accepted = (step) => [...step.state.slice(1, m)].filter((state) => state === "a").length;
  return 1 + seen.reduce((sum, step) => sum + accepted(step), 0) / seen.length;
}

// What plain decoding and each size of the tree would give on that GPU; null before any step.
function gpuRows() {
  return [1, ...NODES].map((nodes) => {
    const [ms, tokens] = [gpuMs(pace, nodes), tokensWith(nodes)];
    const rate = tokens === null ? null : (tokens / ms) * 1000;
    return { nodes, ms, tokens, rate, gain: rate === null ? null : (rate * gpuMs(pace, 1)) / 1000 };
  });
}

function drawGpuTable(rows) {
  const best = Math.max(...rows.map((row) => row.gain || 0));
  const title = `${pace.size}, ${pace.precision}, on an ${pace.gpu}: modelled`;
  const head = make("tr");
  for (const name of ["", "ms/step", "tokens/step", "tokens/s", "times plain"])
    head.append(make("th", "", name));
  const lines = rows.map(({ nodes, ms, tokens, rate, gain }) => {
    const line = make("tr", nodes === pace.nodes ? "now" : "");
    const kind = gain === null ? "" : gain < 1 ? "slower" : gain === best ? "best" : "";
    line.dataset.nodes = nodes;
    line.append(
      make("th", "", nodes === 1 ? "plain" : `${nodes} nodes`),
      ...[number(ms, 1), number(tokens, 2), number(rate, 0)].map((text) => make("td", "", text)),
      make("td", kind, gain === null ? "–" : `${gain.toFixed(2)}×`),
    );
    return line;
  });
  gpuTable.replaceChildren(make("caption", "", title), head, ...lines);
}

function meetModel() {
  if (window.medusaModel && pace.mode) tellPace(); // else the server knows what is usual
  drawPace();
  tellRace();
}

window.medusaPace = { of: paceOf, mode: paceMode, now: () => pace, set: setPace };
window.addEventListener("medusa-model", meetModel);
window.addEventListener("medusa-show", ({ detail }) => {
  isBehind = detail.isBehind;
  nameplay();
  drawPace();
});
window.addEventListener("medusa-replay", () => {
  goTo(0);
  startPlay();
});
meetModel();
