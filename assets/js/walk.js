// The nodes under the pointer and the keyboard: a tooltip at once, the card on a click or Enter.

// ---- tooltip ----

function showTip(anchor, title, lines) {
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

function hideTip() {
  hovered = null;
  hide(tip, true);
}

function tellNode(node) {
  const chip = chips[node];
  if (node === quiet || !chip || !shown || !shown.parent) return hideTip();
  hovered = node;
  const title = `${shown.text[node]}`;
  const lines = tipLines(data, judged(shown), node);
  showTip(chip.group.getBoundingClientRect(), title, [...lines, "click or Enter: both top 10s"]);
}

function nodeOf(target) {
  const group = target.closest && target.closest("[data-node]");
  return group ? Number(group.dataset.node) : null;
}

nodes.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch" || !(event.movementX || event.movementY)) return;
  const node = nodeOf(event.target);
  if (node !== quiet) quiet = null;
  if (node !== null && node !== hovered) tellNode(node);
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
  if (!shown || !shown.parent) return;
  quiet = node; // its card says it all
  hideTip();
  focusOn(node);
  if (pinned !== shown.index) goTo(shown.index);
  openCard(data, shown, node);
  schedule();
  requestAnimationFrame(() => chips[node]?.group.scrollIntoView({ block: "nearest" }));
}

function focusOn(node) {
  if (!chips[node]) return;
  if (chips[active]) chips[active].group.setAttribute("tabindex", "-1");
  active = node;
  chips[node].group.setAttribute("tabindex", "0");
  chips[node].group.focus({ preventScroll: true });
  chips[node].group.scrollIntoView({ block: "nearest", inline: "nearest" });
}

closeCard = () => {
  hideCard();
  quiet = null;
  schedule();
  if (chips[active]) chips[active].group.focus({ preventScroll: true });
};

function neighbour(key) {
  const from = chips[active];
  const others = chips.map((_, node) => node).filter((node) => chips[node]);
  if (key === "ArrowLeft") return active === 0 ? null : shown.parent[active];
  if (key === "ArrowRight") {
    const below = others.filter((node) => shown.parent[node] === active);
    return below.find((node) => shown.state[node] === "a") ?? below[0];
  }
  if (key === "Home") return 0;
  if (key === "End") return others.filter((node) => shown.state[node] === "a").at(-1);
  const side = key === "ArrowDown" ? 1 : -1;
  return others
    .filter((node) => chips[node].depth === from.depth && (chips[node].row - from.row) * side > 0)
    .sort((a, b) => (chips[a].row - chips[b].row) * side)[0];
}

nodes.addEventListener("click", (event) => {
  const node = nodeOf(event.target);
  if (node !== null) choose(node);
});
nodes.addEventListener("keydown", (event) => {
  if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") choose(active);
  else if (event.key === "Escape" && !card.hidden) closeCard();
  else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    const to = neighbour(event.key);
    if (to !== null && to !== undefined) {
      if (pinned !== shown.index) goTo(shown.index);
      focusOn(to);
    }
  } else return;
  event.preventDefault();
  event.stopPropagation();
});
card.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  closeCard();
});
