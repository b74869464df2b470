// The bin below the list of conversations: what was deleted, brought back or removed for good.
import { blockOf } from "./block.js";
import { button, make, say } from "./elements.js";
import { gone } from "./row.js";

const { trigger } = blockOf("conversations");
const ASK_MS = 6000; // that the second click may take
const EMPTY = "Empty the bin";
const REALLY = "Remove all for good?";

export const opener = button("", "Bin", () => trigger("show_bin", { shown: true }));
export const bin = make("section", "bin");
const rows = make("ul", "bin-rows");
const none = make("p", "chat-list-empty", "The bin is empty.");
const emptier = button("bin-empty", EMPTY, empty);
const back = button("bin-back", "‹ Conversations", () => {
  trigger("show_bin", { shown: false });
  opener.focus();
});
let asking = 0; // the timer of the second click
let drawn = "";

function empty() {
  if (!asking) {
    say(emptier, REALLY);
    emptier.classList.add("is-sure");
    asking = setTimeout(forget, ASK_MS);
    return;
  }
  forget();
  trigger("empty_bin");
}

function forget() {
  clearTimeout(asking);
  asking = 0;
  say(emptier, EMPTY);
  emptier.classList.remove("is-sure");
}

function rowOf([id, title, days]) {
  const row = make("li", "bin-row");
  const words = make("span", "chat-row-words");
  words.append(Object.assign(make("span", "chat-row-title", title || "New chat"), { dir: "auto" }));
  words.append(make("span", "chat-row-excerpt", days === 1 ? "1 day left" : `${days} days left`));
  const restore = button("bin-restore", "Restore", () => {
    gone.delete(id);
    trigger("restore_conversation", { id });
    (row.nextElementSibling?.querySelector("button") || back).focus();
  });
  restore.setAttribute("aria-label", `Restore: ${title}`);
  row.append(words, restore);
  return row;
}

// count: how many lie there. binned: they, [id, title, days left] each; null where they are not shown.
export function drawBin(count, binned) {
  say(opener, count ? `Bin (${count})` : "Bin");
  const isOpened = bin.hidden && binned !== null;
  bin.hidden = binned === null;
  if (bin.hidden) return forget();
  const now = JSON.stringify(binned);
  if (drawn !== now) rows.replaceChildren(...binned.map(rowOf));
  drawn = now;
  none.hidden = binned.length > 0;
  emptier.hidden = !binned.length;
  if (isOpened) back.focus();
}

bin.setAttribute("aria-label", "Bin");
bin.append(back, make("p", "bin-told", "Conversations stay here for 30 days."), none, rows, emptier);
bin.hidden = true;
