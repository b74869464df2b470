// The panel's own frame: its elements, and what it knows of the answer it shows.
const NARROW = 480; // below, the tree folds to what was tested

const gpuBox = make("div", "gpu"); // plain decoding and three sizes of the tree side by side
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
  largest = LARGEST;
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
const VIEWS = {
  tree: ["Tree", "what was drafted in this step, and what the model accepted"],
  mask: ["Mask", "which keys each node attends to"],
  times: ["Times", "where the time of a step goes, and the speed over the answer"],
  depths: ["Heads", "how often a drafted token was accepted, by its depth"],
  "what if": ["What if…", "the same steps on a named GPU, and with another rule"],
};
const viewButtons = Object.entries(VIEWS).map(([name, [label, title]]) => {
  const node = button("view", label, () => show(name));
  node.dataset.view = name;
  node.title = title;
  return views.appendChild(node);
});
const times = make("div", "times");
const depths = make("div", "depths");
const body = make("div", "view-body");
svg.append(names, edges, follower.group, taken, nodes);
box.append(svg);
picture.append(legend, box, single, maskBox);
times.append(facts, chartBox);
area.append(picture);
body.append(area, times, depths, gpuBox);
facing.append(views, head);
root.replaceChildren(figures, plain, timeline, facing, body, card, hollow, tip);
pen.font = `10.5px ${getComputedStyle(root).getPropertyValue("--font-mono") || "monospace"}`;

// Widths of what is drawn into, read when they change: asked for while something is being
// written, they would cost the whole page's layout each time.
const widthsOf = new Map([root, chartBox, strip, box, picture].map((node) => [node, 0]));
function widthIn(node) {
  if (!widthsOf.get(node)) widthsOf.set(node, node.clientWidth);
  return widthsOf.get(node);
}
let room = 0; // px that a tree has in height, beside an open card or not
const resized = new ResizeObserver((entries) => {
  const before = widthsOf.get(picture);
  for (const { target } of entries) widthsOf.set(target, target.clientWidth);
  const high = root.clientHeight - body.offsetTop - legend.offsetHeight - 8;
  if (widthsOf.get(picture) !== before || high !== room) largest = LARGEST;
  room = high;
  schedule();
});

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
let isScrolledByHand = false; // the tree
let describing = 0;
const schedule = inNextFrame(() => render());

function show(name) {
  view = name;
  schedule();
}
