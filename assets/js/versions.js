// Versions of a message: "‹ 2/3 ›" under it. The value is {"rows": [[row, version, of how many]]};
// Gradio draws the rows, so the controls are put back whenever it has drawn them anew.
const root = element.querySelector(".versions-block") || element;
let wanted = new Map(); // row -> [version, of]

function control(row, version, count) {
  const box = make("div", "versions");
  const step = (by, sign, label) => {
    const node = button("", sign, () => {
      refocus = [row, by];
      trigger("show_version", { row, version: version + by });
    });
    node.setAttribute("aria-label", label);
    node.dataset.by = by;
    node.disabled = version + by < 1 || version + by > count;
    return node;
  };
  box.dataset.state = `${version}/${count}`;
  withRole(box, "group", `Version ${version} of ${count}`);
  box.append(
    step(-1, "‹", "Earlier version"),
    make("span", "", `${version}/${count}`),
    step(1, "›", "Later version"),
  );
  return box;
}

// The buttons that Gradio has under a row.
function barOf(row) {
  const next = row.nextElementSibling;
  return next?.classList.contains("message-buttons") ? next : null;
}

let refocus = null; // where the keyboard was when the rows are drawn anew

function draw() {
  const all = document.querySelectorAll("#history .message-row");
  all.forEach((node, row) => {
    const now = wanted.get(row);
    const bar = barOf(node);
    const old = bar?.querySelector(":scope > .versions");
    const state = now ? now.join("/") : "";
    if (old && old.dataset.state === state && old.dataset.row === String(row)) return;
    old?.remove();
    if (!now || !bar) return;
    const made = control(row, ...now);
    made.dataset.row = row;
    bar.append(made);
  });
  if (!refocus) return;
  const [row, by] = refocus;
  const group = all[row] && barOf(all[row])?.querySelector(":scope > .versions");
  const target = group?.querySelector(`[data-by="${by}"]:not(:disabled)`) || group?.querySelector("button:not(:disabled)");
  if (!group?.contains(document.activeElement)) target?.focus();
}

function take() {
  if (!props.value) return;
  wanted = new Map(JSON.parse(props.value).rows.map(([row, ...state]) => [row, state]));
  draw();
}

const conversation = element.closest("#conversation");
let isDue = false;
const seen = new MutationObserver(() => {
  if (isDue || (!wanted.size && !conversation.querySelector(".versions"))) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
});
root.hidden = true;
seen.observe(conversation, { childList: true, subtree: true });
conversation.addEventListener("focusin", (event) => {
  if (!event.target.closest(".versions")) refocus = null;
});
document.addEventListener("pointerdown", () => (refocus = null));
watch("value", take);
take();
