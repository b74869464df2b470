// A line in the empty Chat page: the demo is a toy, and a real model is one click away. OFFER: the
// model, as rows.offer has it; empty where it would have to be downloaded and there is no network. Guests
// load no models.
import { blockOf } from "./block.js";
import { button, make } from "./elements.js";
import { page } from "./page.js";
import { askTry } from "./try.js";

const { root, given } = blockOf("offer");
const { text, toy, id } = given.OFFER;
const take = button("offer-take", text, () => askTry(id));

function meet() {
  const model = page.model;
  root.hidden = !id || !model?.isDemo || model.isGuest;
}

root.replaceChildren(make("p", "offer-text", toy), take);
window.addEventListener("medusa-model", meet);
meet();
