// Before Gradio's own script: light or dark without a flash, the skeleton, and what is told. Runs
// once, at the top of the body.
(() => {
  const LOOK = "medusa-look";
  const DRAFT = "medusa-draft";
  const UNHEARD = "medusa-unheard"; // what of it was under way, and what was said before
  const system = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const asked = new URLSearchParams(location.search).get("__theme");

  // place: localStorage or sessionStorage.
  function kept(place, name) {
    try {
      return window[place].getItem(name);
    } catch {
      return null; // storage is switched off: the choice lasts as long as the page
    }
  }

  // ---- light and dark ----

  function applyLook() {
    const look = document.documentElement.dataset.look;
    const isDark = !paper.matches && (look === "dark" || (look !== "light" && system.matches));
    if (document.body.classList.contains("dark") !== isDark)
      document.body.classList.toggle("dark", isDark);
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  }

  const first = asked === "dark" || asked === "light" ? asked : kept("localStorage", LOOK);
  document.documentElement.dataset.look = first === "dark" || first === "light" ? first : "system";
  applyLook();
  for (const medium of [system, paper]) medium.addEventListener("change", applyLook);
  new MutationObserver(applyLook).observe(document.body, { attributeFilter: ["class"] });
  new MutationObserver(applyLook).observe(document.documentElement, {
    attributeFilter: ["data-look"],
  });

  // ---- the skeleton goes when the page, or the login, is there ----

  // Gradio draws part after part, each of which moves the others: nothing of it is seen before all
  // are in their places, or have had time enough.
  const PARTS = ["#header .status-line", "#box textarea", "#send", "#examples button, #history .message", "#tree .playbar"];
  const LATEST = 4000;

  const drawn = new MutationObserver(() => {
    if (document.getElementById("header")) document.documentElement.classList.add("is-drawn");
    if (!document.querySelector("#header .status-line, gradio-app input")) return;
    drawn.disconnect();
    settle(performance.now() + LATEST);
  });
  drawn.observe(document.body, { childList: true, subtree: true });

  function settle(latest, before = "", same = 0) {
    const isLogin = !document.getElementById("header");
    const parts = PARTS.map((part) => document.querySelector(part)?.getBoundingClientRect());
    const now = parts.map((box) => (box ? `${box.x} ${box.y} ${box.width}` : "")).join();
    const isStill = now === before && parts.every((box) => box);
    if (isLogin || (isStill && same === 2) || performance.now() > latest) show();
    else setTimeout(() => settle(latest, now, isStill ? same + 1 : 0), 30);
  }

  // Gradio's loader, once gone, goes on asking for 60 frames a second for ever. Its module keeps the
  // function it found while the page was loading: this one, which has time afterwards.
  const SELDOM = 1000;
  const frame = window.requestAnimationFrame;
  let isShown = false;
  window.requestAnimationFrame = (act) =>
    isShown ? setTimeout(() => frame.call(window, act), SELDOM) : frame.call(window, act);

  function show() {
    isShown = true;
    window.requestAnimationFrame = frame;
    document.documentElement.classList.add("is-settled");
    document.getElementById("first")?.remove();
    restoreDraft();
  }

  // ---- what there is to tell ----

  function notify(level, text, seconds) {
    const notices = document.getElementById("notices");
    const note = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    note.className = level;
    note.title = "Click to close";
    note.addEventListener("click", () => note.remove());
    for (const other of [...notices.children]) if (other.textContent === text) other.remove();
    notices.append(note);
    if (seconds) setTimeout(() => note.remove(), seconds * 1000);
  }

  // from link.js and the modules (page.js)
  window.addEventListener("medusa-notice", ({ detail }) => notify(...detail));

  // ---- what is written stays over a reload ----

  // What stands in the conversation or waits there.
  function said() {
    const all = document.querySelectorAll("#history .as-typed, .next-line > span");
    return Array.from(all, (one) => one.textContent).join("\n");
  }

  let taken = ""; // the message that is under way
  window.addEventListener("medusa-taken", ({ detail }) => (taken = detail));

  function keepDraft() {
    const box = document.querySelector("#box textarea");
    try {
      if (!box?.value) return;
      sessionStorage.setItem(DRAFT, box.value);
      sessionStorage.setItem(UNHEARD, JSON.stringify([taken, said()]));
    } catch {
      // nothing can be kept
    }
  }

  let isRestored = false;
  let isAttached = false; // what was said is here, or a frame away
  window.addEventListener("medusa-model", () => (isAttached = true)); // next.js, with the first view

  function forgetDraft() {
    for (const name of [DRAFT, UNHEARD]) sessionStorage.removeItem(name);
  }

  addEventListener("pagehide", keepDraft); // whoever has it load again: we, Gradio, or the user
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) keepDraft(); // a phone ends a hidden tab without a word
    else if (isRestored) forgetDraft(); // it did not: the box has it
  });

  // A draft without the message that was under way when the page was left, if that has arrived.
  function unsent(draft) {
    const [taken, before] = JSON.parse(kept("sessionStorage", UNHEARD) || '["", ""]');
    const now = said();
    const isHere = taken && now !== before && now.endsWith(taken.trim());
    return isHere && draft.startsWith(taken) ? draft.slice(taken.length) : draft;
  }

  // The page may draw the box anew while it loads, empty: set it until it has held for a second, in
  // which it is known what has arrived.
  function restoreDraft(held = 0, tries = 0) {
    const draft = kept("sessionStorage", DRAFT);
    if (!draft) return void (isRestored = true);
    const box = document.querySelector("#box textarea");
    const text = unsent(draft);
    const isTyped = box?.value && box.value !== draft && box.value !== text;
    if (held === 4 || tries === 120 || isTyped) {
      isRestored = true;
      return forgetDraft();
    }
    const holds = Boolean(box) && box.value === text;
    if (box && !holds) {
      box.value = text;
      box.dispatchEvent(new Event("input", { bubbles: true }));
    }
    setTimeout(() => restoreDraft(holds && isAttached ? held + 1 : 0, box ? tries + 1 : tries), 250);
  }
})();
