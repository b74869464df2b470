// Messages that wait for the end of an answer, each with a way to drop it; and what this tab is to
// ask for next: "refresh" (something changed elsewhere) or "follow" (an answer runs). conversation:
// which one this tab shows; guest: whose it is, of a guest. Both are kept, and posted on opening.
const root = element.querySelector(".next-block") || element;
let seen = "";
let asked = 0;
let newest = 0; // of the views that came
let mine = ""; // the key of this tab, which counts them

function line(text, place) {
  const row = document.createElement("div");
  const what = document.createElement("span");
  const drop = document.createElement("button");
  row.className = "next-line";
  what.textContent = `next: ${text}`;
  drop.type = "button";
  drop.textContent = "×";
  drop.title = "Do not send it";
  drop.setAttribute("aria-label", `Do not send: ${text.slice(0, 60)}`);
  drop.addEventListener("click", () => trigger("drop", { place }));
  row.append(what, drop);
  return row;
}

function skipButton() {
  const node = document.createElement("button");
  node.type = "button";
  node.className = "skip";
  node.textContent = "show the rest of this answer now";
  node.addEventListener("click", () => window.medusaShow.skip());
  return node;
}

function keep(conversation, guest) {
  try {
    sessionStorage.setItem("medusa-chat", conversation); // this tab's, for a reload
    localStorage.setItem("medusa-chat", conversation); // for the next tab
    if (guest) localStorage.setItem("medusa-chat-guest", guest);
  } catch {
    // a browser that keeps nothing begins a new chat in each tab
  }
}

function show() {
  const value = props.value || "";
  if (!value || value === seen) return;
  seen = value;
  const { pending, ask, number, conversation, guest, key, is_demo, view } = JSON.parse(value);
  if (key !== mine) [mine, newest] = [key, 0];
  // it came late, and has put older things in the place of what the stream brought
  if (view && view < newest) following?.abort();
  newest = Math.max(newest, view);
  if (conversation) keep(conversation, guest);
  root.replaceChildren(...pending.map(line));
  if (pending.length && window.medusaShow.isOn()) root.append(skipButton());
  if (window.medusaModel?.isDemo !== is_demo) {
    window.medusaModel = { isDemo: is_demo, isGuest: Boolean(guest) };
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
