// Messages that wait for the end of an answer, each with a way to drop it; and what this tab is to
// ask for next: "refresh" (something changed elsewhere) or "follow" (an answer runs). conversation:
// which one this tab shows: it is kept, and posted on opening. guest: whether a guest looks.
import { blockOf } from "./block.js";
import { button, fillIn, make } from "./elements.js";
import { follow, stream } from "./follow.js";
import { unmarkPage } from "./inert.js";
import { messageUnderWay, page, setUnderWay, store, stored, tell } from "./page.js";
import { show } from "./show.js";

const { root, trigger, onValue, every } = blockOf("next");
unmarkPage();
let asked = 0;
let newest = 0; // of the views that came
let mine = ""; // the key of this tab, which counts them
let [taken, given, heard] = [0, 0, 0]; // of what was in the box, what goes back, what was asked for
window.addEventListener("medusa-unanswered", () => setUnderWay("")); // link.js gave up

function row(text, place) {
  const node = make("div", "next-line");
  const drop = button("", "×", () => trigger("drop", { place, text }));
  drop.title = "Do not send it";
  drop.setAttribute("aria-label", `Do not send: ${text.slice(0, 60)}`);
  node.append(make("span", "", `next: ${text}`), drop);
  return node;
}

function skipButton() {
  return button("skip", "show the rest of this answer now", () => show.skip());
}

function keep({ conversation, temporary }) {
  store("sessionStorage", "medusa-chat", conversation); // this tab's, for a reload
  // For the next tab, which shall not know of a temporary chat: it was an empty one of the list before.
  const isKnown = temporary && stored("localStorage", "medusa-chat") === conversation;
  if (!temporary || isKnown) store("localStorage", "medusa-chat", temporary ? "" : conversation);
}

// What the box held at the key or the click: what is typed before Gradio looks at it is not a part.
let held = null;
let heldAt = 0;
let left = null; // and at New chat: the draft that stays behind
function hold(event) {
  const { type, key, shiftKey, isComposing, target } = event;
  const box = document.querySelector("#box textarea");
  const isEnter = key === "Enter" && !shiftKey && !isComposing && target === box;
  if (isEnter || (type === "click" && target.closest?.("#send"))) {
    const isBegun = held !== null && performance.now() < heldAt + 1000; // Gradio reads all settings
    if (messageUnderWay() || isBegun) {
      event.preventDefault(); // the one before is under way: it would be sent twice
      event.stopPropagation();
      return;
    }
    [held, heldAt] = [box.value, performance.now()];
  }
  const isNew = type === "click" && target.closest?.("#clear"); // of an empty one it goes along
  if (isNew) left = document.querySelector("#history .message-row") ? box.value : "";
}
for (const type of ["keydown", "click"]) document.addEventListener(type, hold, true);

// posted: the values of an event that empties the box, its own at `place`.
export function takeBox(posted, place) {
  const { value } = document.querySelector("#box textarea");
  setUnderWay(held !== null && value.startsWith(held) ? held : value);
  held = null;
  if (place in posted) posted[place] = messageUnderWay();
  return posted;
}

// What is written in one conversation and not sent waits there while another is shown.
const DRAFTS = "medusa-drafts";
const drafts = new Map(JSON.parse(stored("sessionStorage", DRAFTS) || "[]")); // conversation -> text
let written = ""; // the conversation that the box belongs to
function changeDraft(conversation) {
  if (written && conversation !== written) {
    const { value } = document.querySelector("#box textarea");
    const stays = left !== null && value.startsWith(left) ? left : value;
    drafts.set(written, stays);
    store("sessionStorage", DRAFTS, JSON.stringify([...drafts].filter(([, text]) => text)));
    fillBox((drafts.get(conversation) || "") + value.slice(stays.length));
  }
  [written, left] = [conversation, null];
}

function fillBox(text) {
  const box = document.querySelector("#box textarea");
  box.dir = "auto";
  fillIn(box, text);
}

// What is typed while the server answers stays.
function settleBox(line) {
  const box = document.querySelector("#box textarea");
  let text = box.value;
  if (line.taken > taken && text.startsWith(messageUnderWay())) {
    text = text.slice(messageUnderWay().length);
  }
  if (line.heard > heard) setUnderWay("");
  if (line.given > given) text = text.trim() ? `${line.back}\n\n${text}` : line.back;
  [taken, given] = [Math.max(taken, line.taken), Math.max(given, line.given)];
  heard = Math.max(heard, line.heard);
  fillBox(text);
}

function take(line) {
  if (!line) return;
  const { pending, ask, number, conversation, guest, key, is_demo, model, drafter, view } = line;
  if (key !== mine) [mine, newest, taken, given, heard] = [key, view, 0, 0, 0];
  const isLook = ask === "refresh"; // no view: its number is that of the one before
  const isInTurn = isLook || view === newest || view === newest + 1;
  if (!isInTurn) trigger("redraw"); // one came late over what is newer, or is lost
  if (!isLook && view < newest) return void stream.ends?.abort();
  if (conversation) changeDraft(conversation);
  settleBox(line);
  newest = Math.max(newest, view);
  if (conversation) keep(line);
  root.replaceChildren(...pending.map(row));
  if (pending.length && show.isOn()) root.append(skipButton());
  const names = document.documentElement.style; // of the switch beside Send
  if (drafter) names.setProperty("--drafter", JSON.stringify(drafter));
  const known = page.model;
  if (known?.isDemo !== is_demo || known.model !== model) {
    page.model = { isDemo: is_demo, isGuest: guest, model };
    tell("medusa-model");
  }
  if (line.watched) tell("medusa-watched");
  if (number <= asked) return;
  asked = number;
  if (ask === "refresh") trigger("refresh");
  // The first lines of a stream say what later ones only add to: whoever draws them listens first.
  if (ask === "follow") Promise.all(["live", "tree"].map((name) => blockOf(name).begun)).then(() => follow(key));
}

onValue(take);

// A clock of our own: any event of Gradio's costs every part of the page, and who follows an answer
// knows what becomes of it.
const LOOK_EVERY = 1000; // ms
every(LOOK_EVERY, () => {
  if (!stream.isOpen) trigger("tick");
});
