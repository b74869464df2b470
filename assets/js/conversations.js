// The list of conversations. The value is one JSON object: {"rows": [[id, title, Unix time, does an
// answer run, is it pinned, title and text around a match in pieces, every second one of the search]],
// "current": id, "title": of it, "temporary": is it, "preset": its name, "search": what is looked for, "more": are there
// older ones, "key": of the tab, "takes": is a file taken in, "undeleted":
// [id of a row whose deletion was refused, when], "bin", "binned": see bin.js}. A row is
// drawn again only when it has changed, so that focus and a title that is being written stay.
import { foot, importer } from "./backup.js";
import { bin, drawBin, opener as binOpener } from "./bin.js";
import { blockOf } from "./block.js";
import { close } from "./drawer.js";
import { button, make, say, withRole } from "./elements.js";
import { answered, tell } from "./page.js";
import { UNTITLED, bringBack, drawRow, drop, gone, rename } from "./row.js";
import "./system.js";

// ---- the temporary chat: Gradio's own button, which posts the settings, is not shown ----

const temporaryOpener = button("temporary-open", "Temporary chat", () => {
  document.getElementById("temporary")?.click();
  close();
});
const temporaryLine = withRole(make("p", "temporary-line"), "status");

function drawTemporary(isTemporary) {
  const left = document.getElementById("left");
  if (left && !temporaryLine.isConnected) left.prepend(temporaryLine);
  temporaryLine.hidden = !isTemporary;
  temporaryLine.textContent = isTemporary
    ? "Temporary chat: never stored, gone once you leave it."
    : "";
}

temporaryOpener.title = "A chat that is never stored, and gone once you leave it";

// ---- the address and the title of the browser's tab name the conversation that is shown: it can be
// kept as a bookmark, opened in another tab, and gone back to ----

const PAGE = "medusa-chat";

function readAddress() {
  return location.hash.slice(1);
}

let going = ""; // the address that the browser went to, until it is shown

// isFirst: the page was opened, which is no step to go back to.
function writeAddress(isFirst) {
  document.title = view.title ? `${view.title} · ${PAGE}` : PAGE;
  if (going && going !== view.current) return; // a view from before
  going = "";
  if (view.current === readAddress()) return;
  history[isFirst ? "replaceState" : "pushState"](history.state, "", `#${view.current}`);
}

window.addEventListener("popstate", () => {
  const id = readAddress();
  if (!id) return;
  going = id;
  trigger("open_conversation", { id });
  stay(id);
});

// A conversation that is not there: the address is that of what is shown.
async function stay(id) {
  const pause = () => new Promise((done) => setTimeout(done, 1500));
  await pause();
  await answered(); // over a slow link it may come late
  await pause();
  if (going === id) { going = ""; writeAddress(true); }
}

// A place within an answer is no address of the page.
document.addEventListener("click", (event) => {
  if (event.target.closest?.(':is(#history, #live-text) a[href^="#"]')) event.preventDefault();
}, true);

// ---- the list ----

const { root, trigger, onValue } = blockOf("conversations");
const SEARCH_MS = 250;

export const field = make("input", "chat-list-search");
export const list = make("div", "chat-list");
const empty = make("p", "chat-list-empty");
const older = button("chat-list-older", "Show older", () => ask({ more: true }));
const rows = new Map(); // id -> {item, seen, row, isWritten}
export let view = { rows: [], current: "", title: "", search: "", more: false };
let waiting = 0; // the timer of the search
let refusedAt = 0; // when the last refusal came that is drawn

export function choose(id) {
  if (id !== view.current) trigger("open_conversation", { id });
  close();
}

function group(time) {
  const now = new Date();
  const day = (ago) => new Date(now.getFullYear(), now.getMonth(), now.getDate() - ago).getTime();
  if (time >= day(0)) return "Today";
  if (time >= day(1)) return "Yesterday";
  return time >= day(7) ? "Last 7 days" : "Older";
}

function place(row) {
  let known = rows.get(row[0]);
  if (!known) {
    known = { item: make("div", "chat-row"), seen: "", isWritten: false };
    known.item.dataset.id = row[0];
    rows.set(row[0], known);
  }
  const now = JSON.stringify([row[1], ...row.slice(3)]);
  known.row = row;
  if (known.seen !== now && !known.isWritten) drawRow(known);
  known.seen = now;
  const isCurrent = row[0] === view.current;
  known.item.classList.toggle("is-current", isCurrent);
  const open = known.item.querySelector(".chat-row-open");
  if (isCurrent) open?.setAttribute("aria-current", "page");
  else open?.removeAttribute("aria-current");
  return known.item;
}

export function drawList() {
  const items = [];
  let before = "";
  for (const row of view.rows) {
    if (gone.has(row[0])) continue;
    const name = row[4] ? "Pinned" : group(row[2] * 1000);
    if (name !== before) items.push(heading((before = name)));
    items.push(place(row));
  }
  const isSame = items.length === list.children.length;
  if (!isSame || items.some((item, at) => item !== list.children[at])) {
    const focused = document.activeElement;
    list.replaceChildren(...items);
    if (list.contains(focused)) focused.focus();
  }
  const now = document.activeElement?.closest(".chat-row");
  reach(list.contains(now) ? now : list.querySelector(".is-current") || list.querySelector(".chat-row"));
}

// Tab comes to one row of the list, with its buttons; the arrows go to the others.
function reach(item) {
  for (const node of list.querySelectorAll("a, button")) node.tabIndex = item.contains(node) ? 0 : -1;
}

list.addEventListener("focusin", ({ target }) => reach(target.closest(".chat-row")));
list.addEventListener("keydown", (event) => {
  const item = event.target.closest(".chat-row");
  if (!item || event.target.matches("input")) return;
  const all = [...list.querySelectorAll(".chat-row")];
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (by) all[all.indexOf(item) + by]?.querySelector(".chat-row-open")?.focus();
  else if (event.key === "F2") rename(rows.get(item.dataset.id));
  else if (event.key === "Delete") drop(rows.get(item.dataset.id));
  else return;
  event.preventDefault();
});

const headings = new Map();
function heading(name) {
  if (!headings.has(name)) headings.set(name, make("h3", "chat-list-when", name));
  return headings.get(name);
}

function draw(line) {
  if (!line) return;
  const title = document.getElementById("chat-title");
  if (!title) return void setTimeout(draw, 50, line); // it is not there yet
  const isFirst = !view.current;
  view = line;
  writeAddress(isFirst);
  const wanted = new Set(view.rows.map((row) => row[0]));
  for (const id of rows.keys()) if (!wanted.has(id)) rows.delete(id);
  // What the server has taken out is in its hands: it may come back from elsewhere.
  if (!view.search) for (const id of gone) if (!wanted.has(id)) gone.delete(id);
  const [refused, at] = view.undeleted;
  if (at > refusedAt) bringBack(refused);
  refusedAt = at || refusedAt;
  drawList();
  const isSearch = Boolean(view.search);
  say(empty, isSearch ? "Nothing found." : "Your conversations will be listed here.");
  empty.hidden = view.rows.length > 0;
  older.hidden = !view.more;
  drawBin(view.bin, view.binned);
  drawTemporary(view.temporary);
  field.hidden = list.hidden = foot.hidden = temporaryOpener.hidden = view.binned !== null;
  empty.hidden ||= view.binned !== null;
  older.hidden ||= view.binned !== null;
  foot.firstChild.disabled = !view.rows.length && !view.search;
  importer.hidden = !view.takes;
  title.dataset.id = view.current;
  say(title, view.title || (view.temporary ? "Temporary chat" : UNTITLED));
  document.getElementById("system-button")?.classList.toggle("is-set", view.system);
  title.title = view.title;
  const settings = document.querySelector("#settings > .label-wrap > span");
  if (!settings || settings.dataset.preset === view.preset) return;
  settings.dataset.preset = view.preset;
  tell("medusa-preset");
}

export function ask(more = {}) {
  clearTimeout(waiting);
  trigger("search_conversations", { search: field.value.trim().slice(0, 200), ...more });
}

field.type = "search";
field.placeholder = "Search";
field.setAttribute("aria-label", "Search conversations");
field.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(ask, SEARCH_MS);
});
withRole(root, "navigation", "Conversations");
empty.hidden = older.hidden = foot.hidden = true;
foot.append(binOpener);
root.replaceChildren(temporaryOpener, field, empty, list, older, bin, foot);
onValue(draw);
