// The nodes under the pointer and the keyboard: a tooltip at once, the card on a click or Enter.
import { card, hideCard, openCard } from "./card.js";
import { bdi, hide, make } from "./elements.js";
import { box, nodes, panel, root, schedule, tip } from "./panel.js";
import { goTo } from "./steps.js";
import { judged } from "./whatif.js";
import { tipLines } from "./words.js";

// ---- tooltip ----

export function showTip(anchor, title, lines) {
  const name = make("b");
  name.append(bdi(title));
  tip.replaceChildren(name, ...lines.map((text) => make("span", "", text)));
  hide(tip, false);
  const at = root.getBoundingClientRect();
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.max(0, Math.min(anchor.left - at.left, at.width - wide));
  const above = anchor.top - at.top - high - 6;
  const isUnder = anchor.bottom + high + 8 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${isUnder ? anchor.bottom - at.top + 6 : above}px`;
}

export function hideTip() {
  panel.hovered = null;
  hide(tip, true);
}

export function tellNode(node) {
  const chip = panel.chips[node];
  if (node === panel.quiet || !chip || !panel.shown || !panel.shown.parent) return hideTip();
  panel.hovered = node;
  const title = `${panel.shown.text[node]}`;
  const lines = tipLines(panel.data, judged(panel.shown), node);
  showTip(chip.group.getBoundingClientRect(), title, [...lines, "click or Enter: both top 10s"]);
}

function nodeOf(target) {
  const group = target.closest?.("[data-node]");
  return group ? Number(group.dataset.node) : null;
}

nodes.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch" || !(event.movementX || event.movementY)) return;
  const node = nodeOf(event.target);
  if (node !== panel.quiet) panel.quiet = null;
  if (node !== null && node !== panel.hovered) tellNode(node);
});
nodes.addEventListener("pointerout", (event) => {
  if (!nodes.contains(event.relatedTarget)) hideTip();
});
box.addEventListener("focusin", (event) => { // on the group Chromium would make that a stop of its own
  const node = nodeOf(event.target);
  if (node !== null && event.target.matches(":focus-visible")) tellNode(node);
});
box.addEventListener("focusout", hideTip);

// ---- the card, by click and by keyboard ----

function choose(node) {
  if (!panel.shown?.parent) return;
  panel.quiet = node; // its card says it all
  hideTip();
  focusOn(node);
  if (panel.pinned !== panel.shown.index) goTo(panel.shown.index);
  openCard(panel.data, panel.shown, node);
  schedule();
  requestAnimationFrame(() => panel.chips[node]?.group.scrollIntoView({ block: "nearest" }));
}

function focusOn(node) {
  if (!panel.chips[node]) return;
  if (panel.chips[panel.active]) panel.chips[panel.active].group.setAttribute("tabindex", "-1");
  panel.active = node;
  panel.chips[node].group.setAttribute("tabindex", "0");
  panel.chips[node].group.focus({ preventScroll: true });
  panel.chips[node].group.scrollIntoView({ block: "nearest", inline: "nearest" });
}

panel.closeCard = () => {
  hideCard();
  panel.quiet = null;
  schedule();
  if (panel.chips[panel.active]) panel.chips[panel.active].group.focus({ preventScroll: true });
};

function neighbour(key) {
  const from = panel.chips[panel.active];
  const others = panel.chips.map((_, node) => node).filter((node) => panel.chips[node]);
  if (key === "ArrowLeft") return panel.active === 0 ? null : panel.shown.parent[panel.active];
  if (key === "ArrowRight") {
    const below = others.filter((node) => panel.shown.parent[node] === panel.active);
    return below.find((node) => panel.shown.state[node] === "a") ?? below[0];
  }
  if (key === "Home") return 0;
  if (key === "End") return others.filter((node) => panel.shown.state[node] === "a").at(-1);
  const side = key === "ArrowDown" ? 1 : -1;
  return others
    .filter((node) => panel.chips[node].depth === from.depth && (panel.chips[node].row - from.row) * side > 0)
    .sort((a, b) => (panel.chips[a].row - panel.chips[b].row) * side)[0];
}

nodes.addEventListener("click", (event) => {
  const node = nodeOf(event.target);
  if (node !== null) choose(node);
});
nodes.addEventListener("keydown", (event) => {
  if (!panel.shown || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") choose(panel.active);
  else if (event.key === "Escape" && !card.hidden) panel.closeCard();
  else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    const to = neighbour(event.key);
    if (to !== null && to !== undefined) {
      if (panel.pinned !== panel.shown.index) goTo(panel.shown.index);
      focusOn(to);
    }
  } else return;
  event.preventDefault();
  event.stopPropagation();
});
card.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  panel.closeCard();
});
