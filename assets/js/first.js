// Before Gradio's own script: light or dark without a flash, the skeleton, and what is said when
// the server is gone. Runs once, at the top of the body.
(() => {
  const LOOK = "medusa-look";
  const DRAFT = "medusa-draft";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const asked = new URLSearchParams(location.search).get("__theme");

  function kept(store, name) {
    try {
      return store.getItem(name);
    } catch {
      return null; // storage is switched off: the choice lasts as long as the page
    }
  }

  // ---- light and dark ----

  function applyLook() {
    const look = document.documentElement.dataset.look;
    const isDark = look === "dark" || (look !== "light" && system.matches);
    if (document.body.classList.contains("dark") !== isDark)
      document.body.classList.toggle("dark", isDark);
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  }

  const first = asked === "dark" || asked === "light" ? asked : kept(localStorage, LOOK);
  document.documentElement.dataset.look = first === "dark" || first === "light" ? first : "system";
  applyLook();
  system.addEventListener("change", applyLook);
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

  // ---- the server is gone ----

  const PAUSE = 2500;
  const PATIENCE = 10000; // a busy server is not a lost one
  const root = ((window.gradio_config || {}).root || "").replace(/\/$/, "");
  const lost = document.getElementById("lost");
  let misses = 0;
  let program = null;

  function say(title, text) {
    lost.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }), text);
    lost.hidden = false;
    document.documentElement.classList.add("is-lost");
  }

  function unsay() {
    lost.hidden = true;
    document.documentElement.classList.remove("is-lost");
  }

  function keepDraft() {
    const box = document.querySelector("#box textarea");
    try {
      if (box && box.value) sessionStorage.setItem(DRAFT, box.value);
    } catch {
      // nothing can be kept
    }
  }

  addEventListener("pagehide", keepDraft); // whoever has it load again: we, Gradio, or the user

  // The page may draw the box anew while it loads, empty: set it until it has held for a second.
  function restoreDraft(held = 0, tries = 0) {
    const draft = kept(sessionStorage, DRAFT);
    if (!draft) return;
    const box = document.querySelector("#box textarea");
    if (held === 4 || tries === 120 || (box && box.value && box.value !== draft)) {
      sessionStorage.removeItem(DRAFT);
      return;
    }
    const holds = Boolean(box && box.value);
    if (box && !holds) {
      box.value = draft;
      box.dispatchEvent(new Event("input", { bubbles: true }));
    }
    setTimeout(() => restoreDraft(holds ? held + 1 : 0, box ? tries + 1 : tries), 250);
  }

  async function ask() {
    try {
      const limit = AbortSignal.timeout(PATIENCE);
      const path = `${root}/gradio_api/app_id`;
      const answer = await fetch(path, { cache: "no-store", signal: limit });
      if (answer.status === 410 || answer.status === 401) return "ended";
      return answer.ok ? (await answer.json()).app_id : null;
    } catch {
      return null;
    }
  }

  async function look() {
    const found = document.hidden && !misses ? program : await ask();
    if (found === "ended") {
      say("This link has ended", "Ask the person who gave it to you for a new one.");
      return;
    }
    if (found === null) {
      misses++;
      if (misses === 2)
        say(
          "No connection to medusa-chat",
          "The program was closed, or the network is gone. This page comes back by itself.",
        );
    } else if (program !== null && found !== program) {
      location.reload(); // another program answers: nothing of this page is known to it
      return;
    } else {
      if (misses >= 2) unsay();
      misses = 0;
      program = found;
    }
    setTimeout(look, misses ? 1000 : PAUSE);
  }
  look();
})();
