// One row of the list of conversations: opened, renamed in place, deleted and brought back. Text by
// textContent.
import { blockOf } from "./block.js";
import { choose, drawList, field, list } from "./conversations.js";
import { side } from "./drawer.js";
import { button, icon, make, withRole } from "./elements.js";

const { trigger } = blockOf("conversations");
const UNDO_MS = 10000;
export const UNTITLED = "New chat";
const TITLES = {
  pin: "Pin: it stands first in the list",
  unpin: "Unpin",
  rename: "Rename",
  save: "Save as a Markdown file",
  delete: "Move to the bin",
};
const ICONS = {
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  unpin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7M5 5l14 14",
  rename: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  delete: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
};
const toast = withRole(make("div", "toast"), "status");
export const gone = new Set(); // ids of what was deleted here, before and after the server says so
const offered = new Map(); // id -> title: what the toast brings back
let fading = 0; // the timer of the toast

function iconButton(name, label, act) {
  const node = button(`chat-row-${name}`, "", act);
  node.setAttribute("aria-label", label);
  node.title = TITLES[name];
  node.append(icon(ICONS[name]));
  return node;
}

// A text in pieces, of which every second one is of a search.
function marked(name, pieces) {
  const node = Object.assign(make("span", name), { dir: "auto" });
  node.append(...pieces.map((text, at) => (at % 2 ? make("mark", "", text) : text)));
  return node;
}

export function drawRow(known) {
  const { item, row } = known;
  const [id, title, , isRunning, isPinned, found, excerpt] = row;
  const open = make("a", "chat-row-open");
  open.href = `#${id}`;
  open.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // in a tab or a window of its own
    event.preventDefault();
    choose(id);
  });
  const words = make("span", "chat-row-words");
  words.append(marked("chat-row-title", found.length ? found : [title || UNTITLED]));
  if (excerpt.length) words.append(marked("chat-row-excerpt", excerpt));
  open.append(words);
  open.title = title;
  if (isRunning) {
    const mark = make("span", "chat-row-running");
    mark.title = "an answer is being written";
    mark.append(make("span", "visually-hidden", ", an answer is being written"));
    open.append(mark);
  }
  const acts = make("div", "chat-row-acts");
  const pin = isPinned ? "unpin" : "pin";
  acts.append(
    iconButton(pin, `${isPinned ? "Unpin" : "Pin"}: ${title}`, () =>
      trigger("pin_conversation", { id, pinned: !isPinned }),
    ),
    iconButton("rename", `Rename: ${title}`, () => rename(known)),
    iconButton("save", `Save as a file: ${title}`, () => trigger("save_conversation", { id })),
    iconButton("delete", `Delete: ${title}`, () => drop(known)),
  );
  const focused = item.contains(document.activeElement) ? document.activeElement.className : "";
  item.replaceChildren(open, acts);
  if (focused) (item.querySelector(`.${focused}`) || open).focus();
}

// In place: Enter or leaving keeps it, Escape does not; nothing gives the first message's title back.
export function rename(known) {
  const [id, title] = known.row;
  const line = make("input", "chat-row-name");
  let isOver = false;
  const end = (isKept, isByKey) => {
    if (isOver) return;
    isOver = true;
    known.isWritten = false;
    if (isKept && line.value.trim() !== title) {
      known.row = [id, line.value.trim() || title, ...known.row.slice(2)];
      trigger("rename_conversation", { id, title: line.value });
    }
    drawRow(known);
    if (isByKey) known.item.querySelector(".chat-row-open").focus(); // a click chose another place
  };
  line.value = title;
  line.dir = "auto";
  line.maxLength = 200;
  line.setAttribute("aria-label", `Title of: ${title}`);
  line.addEventListener("blur", () => end(true, false));
  line.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter", true);
  });
  known.isWritten = true;
  known.item.replaceChildren(line);
  line.focus();
  line.select();
}

export function drop(known) {
  const [id, title] = known.row;
  const next = known.item.nextElementSibling || known.item.previousElementSibling;
  trigger("delete_conversation", { id });
  gone.add(id);
  drawList();
  (next?.querySelector(".chat-row-open") || field).focus();
  offer(id, title);
}

// What was just deleted can be brought back here, all of it at once; later, in the bin.
function offer(id, title) {
  offered.set(id, title.length > 40 ? `${title.slice(0, 39)}…` : title);
  const undo = button("", "Undo", () => {
    for (const id of offered.keys()) {
      gone.delete(id);
      trigger("restore_conversation", { id });
    }
    hide();
    const places = [list.querySelector("a[tabindex='0']"), field, document.getElementById("list-button")];
    places.find((place) => place?.checkVisibility()).focus(); // the keyboard goes on there
  });
  const what = offered.size > 1 ? `${offered.size} conversations` : `“${offered.get(id)}”`;
  toast.replaceChildren(make("span", "", `Moved ${what} to the bin.`), undo);
  toast.hidden = false;
  const box = document.getElementById("box").getBoundingClientRect();
  if (box.height) toast.style.bottom = `${innerHeight - box.top + 10}px`; // Send stays in reach
  clearTimeout(fading);
  fading = setTimeout(hide, UNDO_MS);
}

// A row whose deletion was refused: it is listed again, and nothing is offered for it.
export function bringBack(id) {
  gone.delete(id);
  if (offered.delete(id)) hide();
}

function hide() {
  offered.clear();
  toast.hidden = true;
  toast.replaceChildren();
}

toast.hidden = true;
side.after(toast); // Tab comes to it after the list
