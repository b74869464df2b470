// The link to the server, which may lose, delay and reorder what is posted. What does something is
// posted when the one before was answered, and again until it is answered itself: the server does it
// once (ui/access/once.py). Gradio would give up at the first loss and load the page again.
(() => {
  const LOOKS = /^(tick|look|pick|newest|peek|select|steps|count|watch)$/; // events in no turn, harmless twice
  const OWN = /^(models|tune|status)$/; // parts of the page that have turns of their own
  const POST = "x-medusa-post";
  const LOADS = "medusa-loads"; // how often this tab was loaded again because a part was lost
  const FIRST_PAUSE = 300;
  const PAUSE = 2500;
  const PATIENCE = 10000; // a busy server is not a lost one
  const ANSWER_WITHIN = 8000; // ms, then it is posted again, which a server that is at it joins
  const PER_CHARACTER = 0.05; // ms more: a large message takes long to arrive
  const TRIES = 12; // while the server can be reached
  const config = window.gradio_config || {};
  const root = (config.root || "").replace(/\/$/, "");
  const plainFetch = window.fetch;

  // ---- what is posted ----

  const me = [...crypto.getRandomValues(new Uint32Array(4))].join("-");
  const lanes = new Map(); // name -> {name, number, before}

  // Which turn an event waits for: views tell what has changed, each after the last. null: none.
  function laneOf(body) {
    const id = Number(/"fn_index":(\d+)/.exec(body)?.[1]); // what is typed has its quotes escaped
    const targets = config.dependencies?.find((one) => one.id === id)?.targets || [];
    if (targets.length && targets.every(([, name]) => LOOKS.test(name))) return null;
    const part = config.components?.find((one) => one.id === targets[0]?.[0])?.props.elem_id;
    const name = OWN.test(part) ? part : "chat";
    if (!lanes.has(name)) lanes.set(name, { name, number: 0, before: Promise.resolve() });
    return lanes.get(name);
  }

  function inTurn(lane, act) {
    const mine = lane.before.then(act);
    lane.before = mine;
    return mine;
  }

  // Resolves once all that was posted in the chat's turn is answered (page.js).
  window.addEventListener("medusa-answered", ({ detail }) => (detail.answered = lanes.get("chat")?.before));

  async function post(address, how) {
    for (let tries = 1; ; tries++) {
      const answer = await tryPost(address, how);
      if ([401, 409].includes(answer?.status)) return leave();
      const isOurs = answer?.headers.has(POST); // not a gateway's, whatever it says
      if (isOurs || (answer && ![404, 408].includes(answer.status) && answer.status < 500)) return answer;
      if (tries === TRIES || (answer?.status === 408 && tries > 1)) return giveUp();
      if (tries === 1) await new Promise((done) => setTimeout(done, FIRST_PAUSE));
      else await new Promise((done) => waiting.push(done));
    }
  }

  // The whole answer; null where it did not come.
  async function tryPost(address, how) {
    try {
      const limit = isOnce(how) ? ANSWER_WITHIN + how.body.length * PER_CHARACTER : PATIENCE;
      const answer = await plainFetch(address, { ...how, signal: AbortSignal.timeout(limit) });
      return new Response(await answer.text(), answer);
    } catch {
      return null;
    }
  }

  function isOnce(how) {
    return how.headers instanceof Headers && how.headers.has(POST);
  }

  function notify(...note) {
    window.dispatchEvent(new CustomEvent("medusa-notice", { detail: note })); // first.js
  }

  function giveUp() {
    notify("warning", "The server did not answer: do it again.", 10);
    return Response.json({}, { status: 504 }); // no failure of fetch, after which Gradio loads anew
  }

  // Another program answers, which knows nothing of this page, or one that wants a password again.
  function leave() {
    location.reload();
    return new Promise(() => {});
  }

  window.fetch = async (address, how = {}) => {
    const isEvent = how.method === "POST" && /\/gradio_api\/run/.test(address);
    const lane = isEvent ? laneOf(how.body) : null;
    let answer;
    if (!isEvent) answer = await plainFetch(address, how);
    else if (!lane) answer = await post(address, how);
    else {
      const headers = new Headers(how.headers);
      headers.set(POST, `${config.app_id} ${me}.${lane.name} ${++lane.number}`);
      answer = await inTurn(lane, () => post(address, { ...how, headers }));
      const isUntold = !answer.ok && lane.name === "chat"; // no view tells of it
      if (isUntold) window.dispatchEvent(new Event("medusa-unanswered"));
      if (answer.status === 413) notify("warning", await answer.clone().text(), 10);
    }
    const told = answer.headers.get("x-medusa-notice"); // ui/access/notices.py
    if (told) for (const one of JSON.parse(decodeURIComponent(told))) notify(...one);
    return answer;
  };

  // ---- what was lost of the page itself ----

  let isWhole = true;

  function timesLoaded() {
    try {
      return Number(sessionStorage.getItem(LOADS));
    } catch {
      return 0;
    }
  }

  // Gradio goes on without a part, a style as an example, and draws nothing: all is loaded again.
  function loadAgain() {
    if (!isWhole) return;
    isWhole = false;
    const times = 1 + timesLoaded();
    try {
      sessionStorage.setItem(LOADS, times);
      if (times <= TRIES) return void waiting.push(leave);
    } catch {
      // without a count it would go on for ever
    }
    say("A part of this page did not arrive", "Load it again.");
  }

  window.addEventListener("vite:preloadError", loadAgain); // from Gradio's build
  window.addEventListener("medusa-part-lost", loadAgain); // from our own modules
  document.addEventListener(
    "error",
    ({ target }) => target.matches?.("head > script, head > link[rel=stylesheet]") && loadAgain(),
    true,
  );

  // ---- whether the server can be reached ----

  const lost = document.getElementById("lost");
  const waiting = []; // who is to be told that it can
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

  async function ask() {
    try {
      const limit = AbortSignal.timeout(PATIENCE);
      const path = `${root}/gradio_api/app_id`;
      const answer = await plainFetch(path, { cache: "no-store", signal: limit });
      if (answer.status === 401) return leave();
      if (answer.status === 410) return "ended";
      return answer.ok ? (await answer.json()).app_id : null;
    } catch {
      return null;
    }
  }

  async function look() {
    const isIdle = document.hidden && !misses && !waiting.length;
    const found = isIdle ? program : await ask();
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
      leave();
      return;
    } else {
      if (misses >= 2) unsay();
      misses = 0;
      program = found;
      for (const done of waiting.splice(0)) done();
    }
    setTimeout(look, misses ? 1000 : PAUSE);
  }
  look();
})();
