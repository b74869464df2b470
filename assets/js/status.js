// The model picker in the header: the loaded model, and behind it the recent ones, all models and
// Details: a table of what is known of this one, the log of its load folded below; or one sentence. Text goes in by textContent only, and only what changed
// is touched: an open menu stays open, a screen reader hears sentences only.
import { blockOf } from "./block.js";
import { button, make, say, withRole } from "./elements.js";
import { openTab } from "./offer.js";
import { notify, store, stored } from "./page.js";

const { root, trigger, onValue, every } = blockOf("status");
const SHOWN = 3; // facts in the button: model, precision, device
const TOLD = "medusa-chat-told"; // what was said last: once is enough
const bar = make("div", "status-line");
const sentence = withRole(make("span", "sentence"), "status");
const notes = make("details", "notes");
const opener = make("summary", "");
const facts = make("span", "facts");
const menu = make("div", "menu");
const recent = make("div", "recent");
const all = button("all-models", "All models", () => {
  notes.open = false;
  openTab("Models");
});
const table = make("table", "model-details");
const log = make("details", "load-log");
const lines = make("ul", "");
const again = button("again", "Load again", () => {
  again.hidden = true; // the next look shows what comes of it
  trigger("load_again");
});
const halt = button("again halt", "Cancel", () => trigger("halt"));
opener.append(make("span", "dot"), facts);
log.append(make("summary", "", "Log of the load"), lines);
menu.append(recent, all, table, log);
notes.append(opener, menu);
bar.append(make("span", "dot"), sentence, halt, again, notes);
root.replaceChildren(bar);
let listed = "";
let offered = "";

function drawFacts(told) {
  while (facts.children.length > told.length) facts.lastChild.remove();
  told.forEach(([label, text], place) => {
    let fact = facts.children[place];
    if (!fact) {
      fact = make("span", "fact");
      fact.append(make("span", "visually-hidden"), make("span", "what"));
      facts.append(fact);
    }
    fact.dataset.fact = label;
    say(fact.firstChild, `${label} `);
    say(fact.lastChild, text);
  });
}

function drawDetails(line) {
  notes.hidden = !line.facts.length;
  const now = JSON.stringify([line.facts, line.notes]);
  if (now === listed) return;
  listed = now;
  const rows = line.facts.map(([label, text, why]) => {
    const row = make("tr");
    const name = make("th", "", label);
    const told = make("td", "", text);
    name.scope = "row";
    if (why) told.append(make("small", "", why));
    row.append(name, told);
    return row;
  });
  table.replaceChildren(make("caption", "", "Details"), ...rows);
  lines.replaceChildren(...line.notes.map((note) => make("li", "", note)));
  log.hidden = !line.notes.length;
}

// models: [name, its precision] each. One click loads it; meanwhile none is offered.
function drawRecent(models, isBusy) {
  const now = JSON.stringify([models, isBusy]);
  if (now === offered) return;
  offered = now;
  const rows = models.map(([name, precision], place) => {
    const row = button("recent-model", name, () => {
      notes.open = false;
      trigger("load_recent", { place, name });
    });
    row.disabled = isBusy;
    row.append(make("span", "", precision));
    return row;
  });
  recent.replaceChildren(...(rows.length ? [make("h3", "", "Recent models"), ...rows] : []));
}

// Why another model was not loaded, once for each try.
function tell(line, isTried) {
  if (isTried) store("sessionStorage", TOLD, "");
  if (!line || stored("sessionStorage", TOLD) === line) return;
  store("sessionStorage", TOLD, line);
  notify("warning", line, 30);
}

function draw(line) {
  if (!line) return;
  bar.dataset.status = line.status;
  bar.classList.toggle("has-model", line.facts.length > 0);
  bar.firstChild.hidden = line.facts.length > 0; // then the button has the dot
  say(sentence, line.text);
  sentence.title = line.text;
  again.hidden = !line.again;
  halt.hidden = !line.halts;
  all.hidden = line.is_guest;
  bar.classList.toggle("has-part", line.part !== null);
  if (line.part !== null) bar.style.setProperty("--part", line.part);
  drawFacts(line.facts.slice(0, SHOWN));
  drawDetails(line);
  drawRecent(line.recent, line.halts);
  tell(line.told, line.halts);
}

// A click or Esc elsewhere closes the list.
document.addEventListener("click", (event) => {
  if (notes.open && !notes.contains(event.target)) notes.open = false;
});
notes.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !notes.open) return;
  event.stopPropagation();
  notes.open = false;
  opener.focus();
});
onValue(draw);

// A second between two looks; while an answer streams in, which takes the machine, more. Its end
// may be the model's: then at once.
const LOOK_EVERY = 1000; // ms
const WHILE_FOLLOWING = 5;
let looks = 0;
let isFollowing = false;
every(LOOK_EVERY, () => {
  looks++;
  if (!isFollowing || looks % WHILE_FOLLOWING === 0) trigger("refresh");
});
window.addEventListener("medusa-panel", () => (isFollowing = true));
window.addEventListener("medusa-end", () => {
  isFollowing = false;
  trigger("refresh");
});
