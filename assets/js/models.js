// The checkpoints to choose from. The value is one JSON object; a row is drawn again only when its
// own part of it has changed, so that focus and an open question stay. Text by textContent only.
import { blockOf } from "./block.js";
import { button, make, say, withRole } from "./elements.js";
import { askTry, takeTry } from "./offer.js";

const { root, trigger, onValue, every, isInSight } = blockOf("models");
const GROUPS = {
  typed: "What you typed",
  known: "Known checkpoints, as their pages describe them",
  found: "On the Hub",
  gguf: "GGUF files on this disk",
  here: "More on this disk",
};
// What the words of a row mean, where the pointer rests on one.
const MEANS = {
  backbone: "the language model that the heads belong to, and that checks their guesses",
  heads: "small networks beside the model: each guesses the token so many places ahead",
  gated: "its page asks you to accept a licence before you may download it",
  drafters: "other models that guess ahead for this one",
};
const SEARCH = { asking: "Asking the Hub …", failed: "", done: "", off: "" };
const SIGNS = { fits: "✓", tight: "≈", large: "✗" };
const REFRESH_MS = 600;
const guest = make("p", "models-guest");
const memory = make("p", "models-memory");
const said = withRole(make("p", "models-said"), "status");
const status = withRole(make("p", "models-status"), "status");
const sections = {};
const rows = new Map(); // id -> {item, seen, question}

function link(text, address, name) {
  const node = make("a", name, text);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function rowButton(act, text, label, press) {
  const node = button(act, text, press);
  node.dataset.act = act;
  node.setAttribute("aria-label", label);
  return node;
}

// ---- one row ----

function words(row) {
  const box = make("div", "model-words");
  const id = row.page ? link(row.id, row.page, "model-id") : make("span", "model-id", row.id);
  const title = make("h4", "", row.title);
  if (!row.title) title.append(id);
  if (row.is_loaded) title.append(make("span", "model-loaded", "✓ loaded"));
  box.append(title);
  if (row.title) box.append(id);
  const facts = make("dl", "model-facts");
  for (const [label, text] of row.facts) {
    const fact = make("div", "");
    fact.dataset.fact = label;
    if (MEANS[label]) fact.title = MEANS[label];
    fact.append(make("dt", "", label), make("dd", "", text));
    facts.append(fact);
  }
  box.append(facts);
  if (row.note) box.append(make("p", "model-note", row.note));
  if (row.problem) {
    const problem = make("p", "model-problem", `✗ ${row.problem}`);
    if (row.remedy) problem.append(" ", link("Open its page", row.remedy, ""));
    box.append(problem);
  }
  return box;
}

function figures(row) {
  const box = make("div", "model-figures");
  const sign = row.is_here ? "✓" : "↓";
  if (row.download) box.append(make("p", "model-download", `${sign} ${row.download}`));
  const list = make("ul", "model-fits");
  list.setAttribute("aria-label", "Estimated memory");
  for (const cell of row.memory) {
    const item = make("li", "fit");
    item.dataset.fit = cell.fit;
    item.classList.toggle("is-chosen", cell.chosen);
    const fit = cell.word ? `${SIGNS[cell.fit]} ${cell.word}` : "";
    item.append(make("b", "", cell.precision), make("span", "", cell.size), make("i", "", fit));
    list.append(item);
  }
  if (row.memory.length) box.append(list);
  if (row.takes) box.append(make("p", "model-takes", row.takes));
  return box;
}

function acts(row) {
  const box = make("div", "model-acts");
  const usual = row.ships ? "Try it" : "Load";
  const text = row.is_refused ? "Check again" : row.is_loaded ? "Load again" : usual;
  const load = rowButton("load", text, `${text}: ${row.id}`, () => {
    if (row.warning) ask(row.id, "load");
    else if (text === "Try it") askTry(row.id);
    else trigger("load_model", { id: row.id });
  });
  if (!row.is_away) box.append(load);
  if (row.delete) {
    const label = `${row.delete}: ${row.id}`;
    box.append(rowButton("delete", row.delete, label, () => ask(row.id, "delete")));
  }
  return box;
}

// A second click is asked for in the row itself. kind: "load" or "delete".
function question(row, kind) {
  const deletes = kind === "delete";
  const label = deletes ? `Delete ${row.id}` : `Load ${row.id}`;
  const box = withRole(make("div", "model-question"), "alertdialog", label);
  const yes = deletes ? "Yes, delete" : "Load anyway";
  const act = () => {
    close(row.id);
    trigger(deletes ? "drop_model" : "load_model", { id: row.id });
  };
  const no = rowButton("keep", deletes ? "Keep" : "Do not", "No, go back", () => close(row.id));
  box.append(make("p", "", deletes ? row.deletion : row.warning), rowButton("yes", yes, yes, act), no);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close(row.id);
  });
  return box;
}

function ask(id, kind) {
  const known = rows.get(id);
  known.question = kind;
  drawRow(known);
  known.item.querySelector('[data-act="keep"]').focus();
}

function close(id) {
  const known = rows.get(id);
  const act = known.question;
  known.question = "";
  drawRow(known);
  (known.item.querySelector(`[data-act="${act}"]`) || known.item.querySelector("button")).focus();
}

function drawRow(known) {
  const { row, item } = known;
  const focused = item.contains(document.activeElement) ? document.activeElement.dataset.act : "";
  const isMoot = known.question === "delete" ? !row.delete : !row.warning;
  if (known.question && isMoot) known.question = "";
  const asked = known.question ? question(row, known.question) : acts(row);
  item.classList.toggle("is-loaded", row.is_loaded);
  item.classList.toggle("is-first", row.ships && !row.is_loaded);
  item.replaceChildren(words(row), figures(row), asked);
  if (focused) (item.querySelector(`[data-act="${focused}"]`) || item.querySelector("button")).focus();
}

function place(row) {
  let known = rows.get(row.id);
  if (!known) {
    known = { item: make("li", "model"), seen: "", question: "" };
    known.item.dataset.id = row.id;
    rows.set(row.id, known);
  }
  const now = JSON.stringify(row);
  known.row = row;
  if (known.seen !== now) drawRow(known);
  known.seen = now;
  return known.item;
}

// ---- all ----

function drawSection(name, found) {
  const { box, list } = sections[name];
  const items = found.map(place);
  box.hidden = !items.length;
  const isSame = items.length === list.children.length;
  if (!isSame || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
}

function draw(view) {
  if (!view) return;
  document.getElementById("models-column").classList.toggle("for-guests", Boolean(view.guest));
  say(guest, view.guest || "");
  say(memory, view.memory || "");
  say(said, view.said || "");
  say(status, view.guest ? "" : SEARCH[view.search]);
  const wanted = new Set(view.rows.map((row) => row.id));
  for (const id of rows.keys()) if (!wanted.has(id)) rows.delete(id);
  for (const name of Object.keys(GROUPS)) {
    drawSection(name, view.rows.filter((row) => row.group === name));
  }
  root.dataset.search = view.search || "";
}

function beginTry() {
  const id = takeTry();
  if (id) trigger("load_model", { id });
}

// The server looks things up only for a tab that somebody sees.
function refresh() {
  if (isInSight()) trigger("refresh");
}

root.replaceChildren(guest, memory, said);
for (const [name, title] of Object.entries(GROUPS)) {
  const box = make("section", "models-group");
  const list = make("ul", "models-list");
  const heading = make("h3", "", title);
  heading.id = `models-${name}`;
  box.setAttribute("aria-labelledby", heading.id);
  box.hidden = true;
  box.append(heading, list);
  sections[name] = { box, list };
  root.append(box);
  if (name === "known") root.append(status);
}
onValue(draw);
every(REFRESH_MS, refresh);
refresh();
window.addEventListener("medusa-try", beginTry);
beginTry();
