// A line in the empty Chat page: the demo is a toy, and a real model is one click away. OFFER: the
// model, as rows.offer has it; empty where it would have to be downloaded and there is no network. Guests
// load no models.
const take = button("offer-take", OFFER.text, () => askTry(OFFER.id));

function meet() {
  const model = window.medusaModel;
  root.hidden = !OFFER.id || !model?.isDemo || model.isGuest;
}

root.replaceChildren(make("p", "offer-text", OFFER.toy), take);
window.addEventListener("medusa-model", meet);
meet();
