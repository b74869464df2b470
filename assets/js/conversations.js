// The list of conversations. The value is one JSON object: {"rows": [[id, title, Unix time, does an
// answer run]], "current": id, "title": of it, "search": what is looked for, "more": are there older
// ones}. A row is drawn again only when it has changed, so that focus and a title that is being
// written stay. Wide pages have the list beside the chat, others in a drawer. Text by textContent.
const CLOSED = "medusa-chat-list";
const WIDE = matchMedia("(min-width: 1200px)"); // there is room beside the chat
const ROOMY = matchMedia("(min-width: 1400px)"); // and the whole tree has room as well
const SEARCH_MS = 250;
const UNDO_MS = 10000;
const DAY = 24 * 3600 * 1000;
const UNTITLED = "New chat";
const ICONS = {
  rename: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  delete: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
};

const root = element.querySelector(".conversations-block") || element;
const side = element.closest("#side") || root;
const field = make("input", "talks-search");
const list = make("div", "talks");
const empty = make("p", "talks-empty");
const older = button("talks-older", "Show older", () => ask({ more: true }));
const columns = element.closest("#columns") || side;
const shade = make("div", "talks-shade");
const toast = make("div", "toast");
const gone = new Set(); // ids of what was deleted here, before and after the server says so
const rows = new Map(); // id -> {item, seen, row, isWritten}
let view = { rows: [], current: "", title: "", search: "", more: false };
let seen = "";
let waiting = 0; // the timer of the search
let fading = 0; // the timer of the toast

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

function iconButton(name, label, act) {
  const node = button(`talk-${name}`, "", act);
  node.setAttribute("aria-label", label);
  node.title = name === "rename" ? "Rename" : "Delete";
  node.append(icon(name));
  return node;
}

// ---- one row ----

function drawRow(known) {
  const { item, row } = known;
  const [id, title, , isRunning] = row;
  const open = button("talk-open", "", () => choose(id));
  open.append(make("span", "talk-title", title || UNTITLED));
  open.title = title;
  if (isRunning) {
    const mark = make("span", "talk-running");
    mark.title = "an answer is being written";
    mark.append(make("span", "visually-hidden", ", an answer is being written"));
    open.append(mark);
  }
  const acts = make("div", "talk-acts");
  acts.append(
    iconButton("rename", `Rename: ${title}`, () => rename(known)),
    iconButton("delete", `Delete: ${title}`, () => drop(known)),
  );
  const focused = item.contains(document.activeElement) ? document.activeElement.className : "";
  item.replaceChildren(open, acts);
  if (focused) (item.querySelector(`.${focused}`) || open).focus();
}

// In place: Enter or leaving keeps it, Escape does not; nothing gives the first message's title back.
function rename(known) {
  const [id, title] = known.row;
  const line = make("input", "talk-name");
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return;
    isOver = true;
    known.isWritten = false;
    if (isKept && line.value.trim() !== title) {
      known.row = [id, line.value.trim() || title, ...known.row.slice(2)];
      trigger("rename_conversation", { id, title: line.value });
    }
    drawRow(known);
    known.item.querySelector(".talk-open").focus();
  };
  line.value = title;
  line.maxLength = 200;
  line.setAttribute("aria-label", `Title of: ${title}`);
  line.addEventListener("blur", () => end(true));
  line.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
  });
  known.isWritten = true;
  known.item.replaceChildren(line);
  line.focus();
  line.select();
}

function drop(known) {
  const [id, title] = known.row;
  const next = known.item.nextElementSibling || known.item.previousElementSibling;
  trigger("delete_conversation", { id });
  gone.add(id);
  drawList();
  (next?.querySelector(".talk-open") || field).focus();
  offer(id, title);
}

// What was deleted can be brought back for some seconds.
function offer(id, title) {
  const undo = button("", "Undo", () => {
    gone.delete(id);
    trigger("restore_conversation", { id });
    hide();
  });
  const said = make("span", "", `Deleted “${title.length > 40 ? `${title.slice(0, 39)}…` : title}”.`);
  toast.replaceChildren(said, undo);
  toast.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(hide, UNDO_MS);
}

function hide() {
  toast.hidden = true;
  toast.replaceChildren();
}

function choose(id) {
  if (id !== view.current) trigger("open_conversation", { id });
  close();
}

// ---- all ----

function group(time) {
  const now = new Date();
  const today = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last 7 days" : "Older";
}

function place(row) {
  let known = rows.get(row[0]);
  if (!known) {
    known = { item: make("li", "talk"), seen: "", isWritten: false };
    known.item.dataset.id = row[0];
    rows.set(row[0], known);
  }
  const now = JSON.stringify([row[1], row[3]]);
  known.row = row;
  if (known.seen !== now && !known.isWritten) drawRow(known);
  known.seen = now;
  const isCurrent = row[0] === view.current;
  known.item.classList.toggle("is-current", isCurrent);
  const open = known.item.querySelector(".talk-open");
  if (isCurrent) open?.setAttribute("aria-current", "page");
  else open?.removeAttribute("aria-current");
  return known.item;
}

function drawList() {
  const items = [];
  let before = "";
  for (const row of view.rows) {
    if (gone.has(row[0])) continue;
    const name = group(row[2] * 1000);
    if (name !== before) items.push(heading((before = name)));
    items.push(place(row));
  }
  const isSame = items.length === list.children.length;
  if (isSame && items.every((item, at) => item === list.children[at])) return;
  const focused = document.activeElement;
  list.replaceChildren(...items);
  if (list.contains(focused)) focused.focus();
}

const headings = new Map();
function heading(name) {
  if (!headings.has(name)) headings.set(name, make("h3", "talks-when", name));
  return headings.get(name);
}

function draw() {
  const value = props.value || "";
  const title = document.getElementById("chat-title");
  if (!value || (value === seen && title?.dataset.id === view.current)) return;
  if (!title) return void setTimeout(draw, 50); // it is not there yet
  seen = value;
  view = JSON.parse(value);
  const wanted = new Set(view.rows.map((row) => row[0]));
  for (const id of rows.keys()) if (!wanted.has(id)) rows.delete(id);
  drawList();
  const isSearch = Boolean(view.search);
  say(empty, isSearch ? "Nothing found." : "Your conversations will be listed here.");
  empty.hidden = view.rows.length > 0;
  older.hidden = !view.more;
  title.dataset.id = view.current;
  say(title, view.title || UNTITLED);
  document.getElementById("system-button")?.classList.toggle("is-set", view.system);
  title.title = view.title;
}

function ask(more = {}) {
  clearTimeout(waiting);
  trigger("search_conversations", { search: field.value.trim().slice(0, 200), ...more });
}

// ---- open and closed ----

function isOpen() {
  return side.classList.contains("is-open") || (WIDE.matches && !columns.dataset.list);
}

function told() {
  const toggler = document.getElementById("list-button");
  toggler?.setAttribute("aria-expanded", String(isOpen()));
}

function close() {
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
    try {
      localStorage.setItem(CLOSED, isShut ? "closed" : "open");
    } catch {
      // a browser that keeps nothing opens with the list
    }
  } else side.classList.toggle("is-open");
  told();
  if (isOpen()) field.focus();
}

// Open beside the chat where that takes no node of the tree away, else as it was left.
function arrange() {
  let kept = "";
  try {
    kept = localStorage.getItem(CLOSED);
  } catch {
    // as above
  }
  if (kept ? kept === "closed" : !ROOMY.matches) columns.dataset.list = "closed";
  else delete columns.dataset.list;
  side.classList.remove("is-open");
  told();
}

field.type = "search";
field.placeholder = "Search";
field.setAttribute("aria-label", "Search conversations");
field.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(ask, SEARCH_MS);
});
root.setAttribute("role", "navigation");
root.setAttribute("aria-label", "Conversations");
toast.setAttribute("role", "status");
toast.hidden = true;
empty.hidden = older.hidden = true;
shade.addEventListener("click", close);
side.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !side.classList.contains("is-open")) return;
  event.preventDefault();
  close();
});
// The system prompt opens below its button, over the chat.
function prompt(isWanted) {
  const [box, opener] = ["system-box", "system-button"].map((id) => document.getElementById(id));
  if (!box || box.classList.contains("is-open") === isWanted) return;
  box.classList.toggle("is-open", isWanted);
  opener.setAttribute("aria-expanded", String(isWanted));
  if (isWanted) box.querySelector("textarea").focus();
  else if (box.contains(document.activeElement)) opener.focus();
}

document.addEventListener("click", ({ target }) => {
  if (target.closest?.("#list-button")) toggle();
  const isOpener = Boolean(target.closest?.("#system-button"));
  const wasOpen = document.querySelector("#system-box.is-open") !== null;
  if (isOpener) prompt(!wasOpen);
  else if (wasOpen && !target.closest("#system-box")) prompt(false);
});
document.addEventListener(
  "keydown",
  (event) => {
    if (event.key !== "Escape" || !document.querySelector("#system-box.is-open")) return;
    event.preventDefault();
    prompt(false);
  },
  true,
);
for (const width of [WIDE, ROOMY]) width.addEventListener("change", arrange);
root.replaceChildren(field, list, empty, older);
side.append(shade);
columns.append(toast);
watch("value", draw);
arrange();
draw();
