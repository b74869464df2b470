// The card at the top of the Models tab: the model that is there, and how a load goes. The value is
// one JSON object. Text goes in by textContent only.
import { blockOf } from "./block.js";
import { button, make, say } from "./elements.js";
import { followTry } from "./offer.js";

const { root, trigger, onValue } = blockOf("pick");
const loaded = make("p", "pick-loaded");
const card = make("div", "pick-card");
const text = make("p", "pick-text"); // the only part that is read aloud: figures change too often
const figures = make("p", "pick-figures");
const bar = make("progress", "pick-bar");
const remedy = make("a", "pick-remedy", "Open its page");
const halt = button("pick-halt", "", () => trigger("halt"));

function drawLoaded(model) {
  if (!model) {
    loaded.replaceChildren("No model is loaded.");
    return;
  }
  const parts = [make("strong", "", model.name), ` · ${model.facts}`];
  parts.push(make("span", "pick-memory", `memory ${model.memory}`));
  loaded.replaceChildren(make("span", "pick-label", "Loaded "), ...parts);
}

function draw(view) {
  root.hidden = !view;
  if (!view) return;
  drawLoaded(view.loaded);
  card.dataset.stage = view.stage;
  card.hidden = view.stage === "idle";
  text.setAttribute("role", view.stage === "failed" ? "alert" : "status");
  say(text, view.text);
  say(figures, view.figures);
  bar.hidden = !view.is_running;
  if (view.part === null) bar.removeAttribute("value");
  else bar.value = view.part;
  remedy.hidden = !view.link;
  if (view.link) remedy.href = view.link;
  say(halt, view.is_running ? "Cancel" : "Close");
  followTry(view);
}

bar.max = 1;
bar.setAttribute("aria-label", "Progress of the load");
remedy.target = "_blank";
remedy.rel = "noopener noreferrer";
card.append(text, figures, bar, remedy, halt);
root.replaceChildren(loaded, card);
onValue(draw);
