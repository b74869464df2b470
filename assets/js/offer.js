// A line in the empty Chat page: the demo is a toy, and a real model is one click away. It is asked
// for there or in a row of the Models tab, begun by the rows, and ended by the card of the load.
import { button, make } from "./elements.js";
import { page } from "./page.js";

// OFFER: the model, as rows.offer has it; empty where it would have to be downloaded and there is no
// network. Guests load no models.
export function begin({ root, given }) {
  const { text, toy, id } = given.OFFER;

  function meet() {
    const model = page.model;
    root.hidden = !id || !model?.isDemo || model.isGuest;
  }

  root.replaceChildren(
    make("p", "offer-text", toy),
    button("offer-take", text, () => askTry(id)),
  );
  window.addEventListener("medusa-model", meet);
  meet();
}

let tried = null; // {id, stage}

export function openTab(name) {
  const tabs = [...document.querySelectorAll("#tabs [role=tab]")];
  tabs.find((tab) => tab.textContent.trim() === name)?.click();
}

export function askTry(id) {
  tried = { id, stage: "asked" };
  openTab("Models"); // where the load is seen, and can be cancelled
  window.dispatchEvent(new Event("medusa-try"));
}

// The model that is to be loaded now; once for each click.
export function takeTry() {
  if (tried?.stage !== "asked") return null;
  tried.stage = "begun";
  return tried.id;
}

// What the card shows of a load. An outcome that stood there before the click is not its own.
export function followTry(view) {
  if (!tried || tried.stage === "asked") return;
  if (view.is_running) tried.stage = "running";
  else if (tried.stage === "running") {
    const { id } = tried;
    tried = null;
    if (view.stage === "done" && view.loaded?.name === id) showAnswer();
  }
}

// A question that the page offers, where nothing was said yet: a short answer, the last one.
function showAnswer() {
  openTab("Chat");
  const empty = document.getElementById("empty");
  if (empty && !empty.classList.contains("hide")) {
    [...empty.querySelectorAll("#examples button")].pop()?.click();
  }
}
