// The panel of the microscope: its block, its elements and views, the answer it shows, and what is
// known of its steps.
import { blockOf } from "./block.js";
import { button, draw, hide, inNextFrame, make, withRole } from "./elements.js";
import { nothingKnown } from "./known_steps.js";
import { makePen, tokenFont } from "./measure.js";
import { emptyChart } from "./rates.js";
import { download, pngOf } from "./saved.js";

export const { root, trigger, sends, onValue, setValue, every } = blockOf("tree");
export const NARROW = 480; // below, the tree folds to what was tested
export const LARGEST = 1.7; // how much larger than usual a small tree is drawn at most
export const FONT = 10.5; // px, of a chip's text at its usual size
export const pen = makePen(tokenFont(FONT));

export const panel = {
  data: null, // the newest line
  shown: null, // the step that is drawn
  live: null, // the newest step
  known: nothingKnown(), // by step, as far as this answer's lines told
  steps: new Map(), // by index: what was received
  pinned: null, // the step the user looks at, while newer ones arrive
  flying: null, // the step that was asked for: {step, at, isDropped}
  play: null, // {step, due}: the step that is shown, and when the next one follows
  view: "tree",
  wantsFold: null, // null: by width
  shape: null, // what the layout was made for
  chips: [],
  active: 0, // the node that has the keyboard
  hovered: null,
  quiet: null, // the node under the pointer that needs no tooltip
  asked: null, // {answer, step, node, data, view}: what the card is about
  asIf: null, // {epsilon, delta} while they differ from the answer's own
  chart: emptyChart(),
  line: { total: 0, pitch: 14, now: 0, from: 0 }, // of the timeline
  scrolled: 0, // where the timeline is scrolled to, or will be at the end of this frame
  isScrolledByHand: false, // the tree
  room: 0, // px that a tree has in height, beside an open card or not
  scale: 1, // of the tree
  largest: LARGEST, // no step of an answer is drawn larger than one before
  widest: 0, // px that the longest token of the answer needs, at FONT
  draw: () => {},
  closeCard: () => {},
};
export const schedule = inNextFrame(() => panel.draw());

// Widths of what is drawn into, read when they change: asked for while something is being
// written, they would cost the whole page's layout each time.
export const widthsOf = new Map();
export function widthIn(node) {
  if (!widthsOf.get(node)) widthsOf.set(node, node.clientWidth);
  return widthsOf.get(node);
}

export const gpuBox = make("div", "gpu"); // plain decoding and three sizes of the tree side by side
export const head = make("div", "step-head");
export const facing = make("div", "facing");
export const views = withRole(make("div", "views"), "group", "View of the step");
export const area = make("div", "tree-area");
export const picture = make("div", "picture");
export const box = withRole(make("div", "tree-box"), "region", "Candidate tree of one step, scrollable");
export const svg = draw("svg", { class: "tree", role: "tree" });
export const edges = draw("g", { "aria-hidden": "true" });
export const taken = draw("path", { class: "edge accepted", "aria-hidden": "true" });
export const names = draw("g", { "aria-hidden": "true" });
export const nodes = draw("g", { role: "group" });
export const legend = make("div", "legend");
export const PLAIN =
  "Plain decoding: every pass of the model gives one token. There is no draft and no tree; " +
  "this is what drafting is measured against.";
export const UNDRAFTED =
  "Nothing was drafted in this step: no guess was likely enough to be worth the time to check it. The " +
  "pass gave one token, as in plain decoding.";
export const single = make("p", "single");
export const hollow = make(
  "p",
  "hollow",
  "Send a message: every step is drawn here, what the heads guess and which guesses the model accepts.",
);
export const tip = withRole(make("div", "tip"), "tooltip");
hide(tip, true);
export const png = button("png", "PNG", async () => {
  const background = getComputedStyle(root).getPropertyValue("--m-card");
  download(await pngOf(panel.view === "mask" ? picture.querySelector("svg.mask") : svg, background), "step.png");
});
png.title = "Save the drawing of this step as a picture";
const VIEWS = {
  tree: ["Tree", "what was drafted in this step, and what the model accepted"],
  mask: ["Mask", "what each node sees: the text before it, and the nodes on its path"],
  times: ["Times", "where the time of a step goes, and the speed over the answer"],
  depths: ["Heads", "how often a drafted token was accepted, by its depth"],
  "what if": ["What if…", "the same steps on a named GPU, and with another rule"],
};
export const viewButtons = Object.entries(VIEWS).map(([name, [label, title]]) => {
  const node = button("view", label, () => showView(name));
  node.dataset.view = name;
  node.title = title;
  return views.appendChild(node);
});
export const times = make("div", "times");
export const depths = make("div", "depths");
export const body = make("div", "view-body");
function showView(name) {
  panel.view = name;
  schedule();
}
