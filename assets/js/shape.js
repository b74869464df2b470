// The tree in use, without a step: each node's rank among its head's predictions, and the chance
// that the whole path to it is what comes. Beside it the same tree as its attention mask.
import { button, draw, make, say, scrollRegion, set, withRole } from "./elements.js";
import { percent } from "./format.js";
import { makeMask } from "./mask.js";
import { CHIP, LINE, ROW, TOP, branch, places } from "./places.js";

const CHIP_GAP = 20;

export function treeCard(pen) {
  const card = make("section", "tune-card wide");
  const heading = make("h3", "", "The tree in use");
  const facts = make("p", "tune-strong");
  const words = make("p", "tune-words");
  const views = withRole(make("div", "tune-views"), "group", "How the tree is drawn");
  const scroll = scrollRegion("shape-scroll", "The tree in use, scrollable");
  const svg = draw("svg", { class: "tree shape", role: "img", "aria-label": "nothing is drawn yet" });
  const mask = makeMask(pen);
  const shape = { mask, card, facts, words, views, scroll, svg, isMask: false, drawn: "" };
  const buttons = ["Tree", "Mask"].map((name) =>
    button("", name, () => {
      shape.isMask = name === "Mask";
      shape.drawn = "";
      drawShape(shape, shape.tree);
    }),
  );
  shape.buttons = buttons;
  views.append(...buttons);
  card.append(heading, facts, words, views, scroll, mask.box);
  mask.scroll.setAttribute("aria-label", "Attention mask of the tree, scrollable");
  return shape;
}

export function drawShape(shape, tree) {
  shape.tree = tree;
  const wide = Math.round(shape.card.clientWidth - 28);
  if (wide < 120) return;
  const key = `${wide}|${JSON.stringify(tree)}`;
  if (shape.drawn === key) return;
  shape.drawn = key;
  const cut = tree.whole > tree.nodes ? ` of its ${tree.whole}` : "";
  say(shape.facts, `${tree.name}: ${tree.nodes}${cut} nodes, ${tree.depth} deep, ${tree.heads} heads`);
  say(shape.words, `Why: ${tree.reason}.`);
  shape.buttons.forEach((pick, place) => pick.setAttribute("aria-pressed", String(shape.isMask === Boolean(place))));
  shape.scroll.hidden = shape.isMask || tree.nodes < 2;
  shape.mask.box.hidden = !shape.isMask || tree.nodes < 2;
  shape.views.hidden = tree.nodes < 2;
  if (shape.isMask) drawShapeMask(shape.mask, tree, wide);
  else drawShapeTree(shape, tree, wide);
}

function drawShapeTree(shape, tree, wide) {
  const all = tree.parent.map((_, node) => node);
  const { depth, row, rows, columns } = places(tree.parent, all);
  const pitch = Math.max(86, Math.min(150, (wide + CHIP_GAP) / columns));
  const chip = pitch - CHIP_GAP;
  const top = (node) => TOP + row[node] * ROW;
  const left = (node) => depth[node] * pitch + 1;
  const [edges, chips] = [draw("g", {}), draw("g", {})];
  all.forEach((node) => {
    if (node) {
      const line = branch(left(node), CHIP_GAP, top(tree.parent[node]) + CHIP / 2, top(node) + CHIP / 2);
      edges.append(draw("path", { class: "edge", d: line }));
    }
    chips.append(shapeChip(tree, node, left(node), top(node), chip));
  });
  const names = Array.from({ length: columns }, (_, at) =>
    draw("text", { class: "column", x: at * pitch + 1, y: 12 }, at ? `head ${at}` : "root"),
  );
  const [w, h] = [Math.ceil(columns * pitch - CHIP_GAP + 2), TOP + rows * ROW + 2];
  set(shape.svg, { width: w, height: h, viewBox: `0 0 ${w} ${h}` });
  set(shape.svg, { "aria-label": `${tree.name}: ${tree.nodes} nodes in ${columns} columns; ${topNodes(tree)}` });
  shape.svg.replaceChildren(...names, edges, chips);
  shape.scroll.replaceChildren(shape.svg);
}

function shapeChip(tree, node, x, y, wide) {
  const group = draw("g", { class: "chip still" });
  const worth = tree.worth[node];
  group.append(
    draw("title", {}, node ? `${pathName(tree, node)}: comes in ${percent(worth)} of the steps` : "the root: certain"),
    draw("rect", { class: "frame", x, y, width: wide, height: CHIP, rx: 3.5 }),
    draw("rect", { class: "share", x: x + 1, y: y + CHIP - 2.2, height: 1.8, rx: 0.9, width: (worth * (wide - 2)).toFixed(1) }),
    draw("text", { x: x + 4, y: y + LINE }, node ? `#${tree.rank[node]}` : "root"),
    draw("text", { class: "mark", x: x + wide - 4, y: y + LINE }, node ? percent(worth) : ""),
  );
  return group;
}

function pathName(tree, node) {
  const ranks = [];
  for (let at = node; at > 0; at = tree.parent[at]) ranks.push(`#${tree.rank[at]}`);
  return ranks.reverse().join(" ");
}

function topNodes(tree) {
  return [1, 2, 3]
    .filter((node) => node < tree.nodes)
    .map((node) => `${pathName(tree, node)} ${percent(tree.worth[node])}`)
    .join(", ");
}

function drawShapeMask(mask, tree, wide) {
  const step = {
    parent: tree.parent,
    text: tree.parent.map((_, node) => (node ? pathName(tree, node).replaceAll(" #", ".").slice(1) : "root")),
    state: "u".repeat(tree.nodes),
    prefix: null,
    index: 0,
  };
  mask.draw({ answer: JSON.stringify(tree.parent) }, step, wide);
  const words =
    `One pass of the model checks all ${tree.nodes} nodes. A row is a node, a filled cell what it sees ` +
    "(attends to): the text before the tree, the nodes on its path, and itself. " +
    "1.2 is head 1's first guess, then head 2's second.";
  say(mask.note, words);
  mask.svg.setAttribute("aria-label", `Attention mask of ${tree.name}: ${tree.nodes} nodes`);
}
