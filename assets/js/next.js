// Messages that wait for the end of an answer, each with a way to drop it; and what this tab is to
// ask for next: "refresh" (something changed elsewhere) or "follow" (an answer runs). conversation:
// which one this tab shows; guest: whose it is, of a guest. Both are kept, and posted on opening.
const root = element.querySelector(".next-block") || element;
let seen = "";
let asked = 0;
let newest = 0; // of the views that came
let mine = ""; // the key of this tab, which counts them
let [taken, given] = [0, 0]; // of what was in the box, and what goes back into it
window.medusaTaken = "";

function row(text, place) {
  const node = make("div", "next-line");
  const drop = button("", "×", () => trigger("drop", { place, text }));
  drop.title = "Do not send it";
  drop.setAttribute("aria-label", `Do not send: ${text.slice(0, 60)}`);
  node.append(make("span", "", `next: ${text}`), drop);
  return node;
}

function skipButton() {
  return button("skip", "show the rest of this answer now", () => window.medusaShow.skip());
}

function keep(conversation, guest) {
  store("sessionStorage", "medusa-chat", conversation); // this tab's, for a reload
  store("localStorage", "medusa-chat", conversation); // for the next tab
  if (guest) store("localStorage", "medusa-chat-guest", guest);
}

// What the box held at the key or the click: what is typed before Gradio looks at it is not a part.
let held = null;
let left = null; // and at New chat: the draft that stays behind
function hold({ type, key, shiftKey, isComposing, target }) {
  const box = document.querySelector("#box textarea");
  const isSent = key === "Enter" && !shiftKey && !isComposing && target === box;
  if (isSent || (type === "click" && target.closest?.("#send"))) held = box.value;
  if (type === "click" && target.closest?.("#clear")) left = box.value;
}
for (const type of ["keydown", "click"]) document.addEventListener(type, hold, true);

// posted: the values of an event that empties the box, its own at `place`.
window.medusaTake = (posted, place) => {
  const { value } = document.querySelector("#box textarea");
  window.medusaTaken = held !== null && value.startsWith(held) ? held : value;
  held = null;
  if (place in posted) posted[place] = window.medusaTaken;
  return posted;
};

// What is written in one conversation and not sent waits there while another is shown.
const drafts = new Map(); // conversation -> text
let written = ""; // the conversation that the box belongs to
function changeDraft(conversation) {
  if (written && conversation !== written) {
    const { value } = document.querySelector("#box textarea");
    const stays = left !== null && value.startsWith(left) ? left : value;
    drafts.set(written, stays);
    fillBox((drafts.get(conversation) || "") + value.slice(stays.length));
  }
  [written, left] = [conversation, null];
}

function fillBox(text) {
  const box = document.querySelector("#box textarea");
  box.dir = "auto";
  if (text === box.value) return;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

// What is typed while the server answers stays.
function settleBox(line) {
  const box = document.querySelector("#box textarea");
  let text = box.value;
  if (line.taken > taken && text.startsWith(window.medusaTaken)) {
    text = text.slice(window.medusaTaken.length);
  }
  if (line.taken > taken) window.medusaTaken = "";
  if (line.given > given) text = text.trim() ? `${line.back}\n\n${text}` : line.back;
  [taken, given] = [Math.max(taken, line.taken), Math.max(given, line.given)];
  fillBox(text);
}

function show() {
  const value = props.value || "";
  if (!value || value === seen) return;
  seen = value;
  const line = JSON.parse(value);
  const { pending, ask, number, conversation, guest, key, is_demo, model, view } = line;
  if (key !== mine) [mine, newest, taken, given] = [key, 0, 0, 0];
  if (conversation) changeDraft(conversation);
  settleBox(line);
  // it came late, and has put older things in the place of what the stream brought
  if (view && view < newest) following?.abort();
  newest = Math.max(newest, view);
  if (conversation) keep(conversation, guest);
  root.replaceChildren(...pending.map(row));
  if (pending.length && window.medusaShow.isOn()) root.append(skipButton());
  const known = window.medusaModel;
  if (known?.isDemo !== is_demo || known.model !== model) {
    window.medusaModel = { isDemo: is_demo, isGuest: Boolean(guest), model };
    tell("medusa-model");
  }
  if (number <= asked) return;
  asked = number;
  if (ask === "refresh") trigger("refresh");
  if (ask === "follow") follow(key);
}

watch("value", show);
show();

// A clock of our own: any event of Gradio's costs every part of the page, and who follows an answer
// knows what becomes of it.
const LOOK_EVERY = 1000; // ms
const clock = setInterval(() => {
  if (!element.isConnected) clearInterval(clock);
  else if (!isFollowing) trigger("tick");
}, LOOK_EVERY);
