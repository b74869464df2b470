// The panel's own frame: its elements, and what it knows of the answer it shows.
const NARROW = 560; // below, the tree folds to what was tested

const head = make("div", "step-head");
const facing = make("div", "facing");
const views = withRole(make("div", "views"), "group", "View of the step");
const area = make("div", "tree-area");
const picture = make("div", "picture");
const box = withRole(make("div", "tree-box"), "region", "Candidate tree of one step, scrollable");
const svg = draw("svg", { class: "tree", role: "tree" });
const edges = draw("g", { "aria-hidden": "true" });
const taken = draw("path", { class: "edge accepted", "aria-hidden": "true" });
const names = draw("g", { "aria-hidden": "true" });
const nodes = draw("g", { role: "group" });
const follower = makeFollower(); // the model's own token behind the path
const legend = make("div", "legend");
const fold = button("fold", "", () => {
  wantsFold = !isFolded();
  [tallest, largest] = [0, LARGEST];
  schedule();
});
const PLAIN =
  "Plain decoding: every pass of the model gives one token. There is no draft and no tree; " +
  "this is the baseline that Medusa is measured against.";
const UNDRAFTED =
  "Nothing was drafted in this step: by what the heads expected, no token was worth its time. The " +
  "pass gave one token, as in plain decoding.";
const single = make("p", "single");
const hollow = make(
  "p",
  "hollow",
  "Send a message: every step is drawn here, what the heads guess and which guesses the model accepts.",
);
const tip = withRole(make("div", "tip"), "tooltip");
hide(tip, true);
const viewButtons = ["tree", "mask"].map((name) => {
  const title = name === "tree" ? "the candidates" : "which keys each node attends to";
  const node = button("view", name, () => show(name));
  node.title = title;
  return views.appendChild(node);
});
svg.append(names, edges, follower.group, taken, nodes);
box.append(svg);
picture.append(legend, box, single, maskBox);
area.append(picture, card);
facing.append(head, views);
root.replaceChildren(figures, plain, facing, area, hollow, timeline, facts, chartBox, tip);
pen.font = `10.5px ${getComputedStyle(root).getPropertyValue("--font-mono") || "monospace"}`;

// Widths of what is drawn into, read when they change: asked for while something is being
// written, they would cost the whole page's layout each time.
const widthsOf = new Map([root, chartBox, strip, box, picture].map((node) => [node, 0]));
function widthIn(node) {
  if (!widthsOf.get(node)) widthsOf.set(node, node.clientWidth);
  return widthsOf.get(node);
}
const resized = new ResizeObserver((entries) => {
  const [before, room] = [widthsOf.get(root), widthsOf.get(picture)];
  for (const { target } of entries) widthsOf.set(target, target.clientWidth);
  if (widthsOf.get(root) !== before) loosen();
  if (widthsOf.get(picture) !== room) largest = LARGEST;
  schedule();
});

// Lines that wrap in one step and not in the next keep their greatest height: the tree stands still.
const steady = [plain, facing, legend];
const heights = new ResizeObserver((entries) => {
  for (const { target, borderBoxSize } of entries) {
    const high = borderBoxSize[0].blockSize;
    if (high > (parseFloat(target.style.minHeight) || 0)) target.style.minHeight = `${high}px`;
  }
});
function loosen() {
  for (const node of steady) {
    node.style.minHeight = "";
    heights.unobserve(node); // what was measured is of before
    heights.observe(node);
  }
}

let data = null; // the newest line
let shown = null; // the step that is drawn
let live = null; // the newest step
let known = { bars: [], times: [], nodes: [], ends: [] }; // by step, as far as this answer's lines told
let steps = new Map();
let pinned = null; // the step the user looks at, while newer ones arrive
let flying = null; // the step that was asked for: {step, at, isDropped}
let view = "tree";
let wantsFold = null; // null: by width
let shape = null; // what the layout was made for
let chips = [];
let active = 0; // the node that has the keyboard
let hovered = null;
let quiet = null; // the node under the pointer that needs no tooltip
let tallest = 0;
let isScrolledByHand = false; // the panel
let describing = 0;
const schedule = inNextFrame(() => render());

function show(name) {
  view = name;
  schedule();
}
