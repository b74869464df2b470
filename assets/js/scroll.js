// The conversation follows what is written at its end. Whoever scrolls up by hand stays there, with a
// button that leads back; a new turn is always shown. Only a hand ends the following: Gradio draws
// the rows anew, and the scroll position that it leaves says nothing.
import { button, whenDrawn } from "./elements.js";

const NEAR = 90; // px from the end that count as the end
const BY_HAND = ["wheel", "touchmove", "pointerdown", "keydown"];
const HAND_MS = 700; // how long after it a scroll is still the hand's

export function scrollWith(box) {
  const jump = button("jump-to-end", "↓ Newest", () => follow());
  jump.hidden = true;
  box.after(jump);
  let follows = true;
  let handAt = -HAND_MS;
  let turns = 0;
  let edited = null;

  const isAtEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  const show = () => (jump.hidden = follows || isAtEnd());

  function follow() {
    follows = true;
    handAt = -HAND_MS; // what a wheel still rolls is over
    box.scrollTop = box.scrollHeight;
    show();
  }

  function count() {
    const now = box.querySelectorAll("#history .user-row").length;
    if (now > turns) follows = true;
    turns = now;
  }

  function settle() {
    if (follows && turns) follow(); // without any, the beginning is to be seen
    else show();
  }

  // A message that is edited gets its box where its text began, which may be far above what is seen.
  function showEdit() {
    const now = box.querySelector("#history .edit-textarea");
    if (now && now !== edited) {
      follows = false;
      for (const part of [now.closest(".message-row")?.nextElementSibling, now]) {
        part?.scrollIntoView({ block: "nearest" });
      }
    }
    edited = now;
  }

  for (const name of BY_HAND) {
    box.addEventListener(name, () => (handAt = performance.now()), { passive: true });
  }
  box.addEventListener(
    "scroll",
    () => {
      if (performance.now() < handAt + HAND_MS) follows = isAtEnd();
      show();
    },
    { passive: true },
  );
  whenDrawn("history", count);
  whenDrawn("history", showEdit);
  count();
  const sizes = new ResizeObserver(settle);
  for (const block of [box, ...box.children]) sizes.observe(block);
  new MutationObserver(() => {
    for (const block of box.children) sizes.observe(block); // Gradio may have put another there
    requestAnimationFrame(settle);
  }).observe(box, { childList: true, subtree: true });
  box.addEventListener("medusa-fold", () => (follows = false)); // what was unfolded is read from its start
  document.getElementById("send")?.addEventListener("click", follow);
}
