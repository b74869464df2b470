// The line at the top: the first facts of the model, and a list of all; or one sentence. Text goes in by textContent only,
// and only what changed is touched: an open list stays open, a screen reader hears sentences only.
import { blockOf } from "./block.js";
import { button, make, say, withRole } from "./elements.js";

const { root, trigger, onValue, every } = blockOf("status");
const bar = make("div", "status-line");
const sentence = withRole(make("span", "sentence"), "status");
const facts = make("dl", "facts");
const notes = make("details", "notes");
const list = make("ul", "");
const again = button("again", "Load again", () => {
  again.hidden = true; // the next look shows what comes of it
  trigger("load_again");
});
notes.append(make("summary", "", "details"), list);
bar.append(make("span", "dot"), sentence, again, facts, notes);
root.replaceChildren(bar);
let listed = "";
const SHOWN = 3; // facts beside the dot: model, precision, device

function drawFacts(all) {
  while (facts.children.length > all.length) facts.lastChild.remove();
  all.forEach(([label, text], place) => {
    let fact = facts.children[place];
    if (!fact) {
      fact = make("div", "fact");
      fact.append(make("dt", "visually-hidden"), make("dd", "what"));
      facts.append(fact);
    }
    fact.dataset.fact = label;
    say(fact.firstChild, label);
    say(fact.lastChild, text);
  });
}

function drawNotes(line) {
  const told = line.facts.map(([label, text, why]) => `${label} ${text}${why && ": "}${why}`);
  const all = [...told, ...line.notes];
  notes.hidden = !all.length;
  if (all.join("\n") === listed) return;
  listed = all.join("\n");
  list.replaceChildren(...all.map((note) => make("li", "", note)));
}

function draw(line) {
  if (!line) return;
  bar.dataset.status = line.status;
  say(sentence, line.text);
  again.hidden = !line.again;
  bar.classList.toggle("has-part", line.part !== null);
  if (line.part !== null) bar.style.setProperty("--part", line.part);
  drawFacts(line.facts.slice(0, SHOWN));
  drawNotes(line);
}

// A click or Esc elsewhere closes the list.
document.addEventListener("click", (event) => {
  if (notes.open && !notes.contains(event.target)) notes.open = false;
});
notes.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !notes.open) return;
  event.stopPropagation();
  notes.open = false;
  notes.firstChild.focus();
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
