// Where the list of conversations stands: beside the chat on wide pages, on others in a drawer.
import { blockOf } from "./block.js";
import { field } from "./conversations.js";
import { make } from "./elements.js";
import { store, stored } from "./page.js";

const { root } = blockOf("conversations");
const CLOSED = "medusa-chat-list";
const WIDE = matchMedia("(min-width: 1200px)"); // there is room beside the chat
const ROOMY = matchMedia("(min-width: 1400px)"); // and the whole tree has room as well
export const side = root.closest("#side");
const columns = root.closest("#columns");
const shade = make("div", "chat-list-shade");

function isOpen() {
  return side.classList.contains("is-open") || (WIDE.matches && !columns.dataset.list);
}

function told() {
  const isOver = side.classList.contains("is-open");
  for (const other of columns.querySelectorAll("#left, #right")) other.inert = isOver;
  const toggler = document.getElementById("list-button");
  toggler?.setAttribute("aria-expanded", String(isOpen()));
}

export function close() {
  if (!side.classList.contains("is-open")) return;
  side.classList.remove("is-open");
  told();
  document.getElementById("list-button")?.focus();
}

function toggle() {
  if (WIDE.matches) {
    const isShut = !columns.dataset.list;
    if (isShut) columns.dataset.list = "closed";
    else delete columns.dataset.list;
    store("localStorage", CLOSED, isShut ? "closed" : "open");
  } else side.classList.toggle("is-open");
  told();
  if (isOpen()) field.focus();
}

// Open beside the chat where that takes no node of the tree away, else as it was left.
function arrange() {
  const kept = stored("localStorage", CLOSED);
  if (kept ? kept === "closed" : !ROOMY.matches) columns.dataset.list = "closed";
  else delete columns.dataset.list;
  side.classList.remove("is-open");
  told();
}

shade.addEventListener("click", close);
side.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !side.classList.contains("is-open")) return;
  event.preventDefault();
  close();
});
document.addEventListener("click", ({ target }) => {
  if (target.closest?.("#list-button")) toggle();
});
for (const width of [WIDE, ROOMY]) width.addEventListener("change", arrange);
side.append(shade);
arrange();
