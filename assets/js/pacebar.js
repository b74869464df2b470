// How the pace is chosen: its mode, the GPU whose times are modelled, and what each size of the tree
// would give there.
import { choiceOf, hide, make, say } from "./elements.js";
import { number } from "./format.js";
import { drawFigures, gpuRows, modelledFigures } from "./numbers.js";
import { gpuChoices, modelledWords, pace, paceMode, setPace, slowWords } from "./pace.js";
import { page } from "./page.js";
import { gpuBox, panel, schedule, trigger } from "./panel.js";
import { goTo } from "./steps.js";
import { nameplay, pacebar, startPlay } from "./timeline.js";

const MODES = [
  ...[["full", "full speed"], ["gpu", "as a GPU would"]],
  ...[["quarter", "slow motion ¼"], ["tenth", "slow motion ⅒"], ["step", "step by step"]],
];
const BEHIND =
  "This machine is slower than that GPU: the answer came as fast as it could, and is replayed at " +
  "that clock when it is done.";
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

// What the server must know: whether answers are shown slower than they come, and of which size.
function tellPace() {
  const mode = paceMode();
  const nodes = mode === "gpu" ? pace.nodes : null;
  trigger("pace", { paced: mode !== "full", nodes, order: performance.now() });
}

export function drawPace() {
  const mode = paceMode();
  modeChoice.value = mode;
  hide(gpuLine, mode !== "gpu");
  if (mode !== "gpu" && panel.view !== "what if") return;
  for (const name in chooseGpu) chooseGpu[name].value = pace[name];
  const rows = gpuRows();
  drawGpuTable(rows);
  const slow = slowWords(pace);
  const words = modelledWords(pace, page.model?.isDemo ? "demo" : "model");
  const isPlain = Boolean(panel.data?.figures.is_plain);
  const isOther = !isPlain && panel.known.nodes.some((nodes) => nodes !== pace.nodes); // at another pace
  const show = isOther
    ? `${slow}These steps drafted other numbers of nodes; the next answer drafts ${pace.nodes} in each.`
    : slow;
  const what = !panel.data || modelledFigures(panel.data.figures) ? "These figures are" : "The table below is";
  say(gpuLine, `${what} ${words}. ${isBehind ? BEHIND : show}`);
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
  if (page.model && pace.mode) tellPace(); // else the server knows what is usual
  drawPace();
}

window.addEventListener("medusa-pace", () => {
  schedule();
  tellPace();
  drawPace();
  if (panel.data) drawFigures(panel.data.figures);
});
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
