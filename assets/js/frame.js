// The elements of the panel, and its views.
import { draw, hide } from "./draw.js";
import { button, make, withRole } from "./elements.js";
import { panel, root, schedule } from "./panel.js";
import { download, pngOf } from "./picture.js";

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
