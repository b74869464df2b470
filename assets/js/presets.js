// Below the presets: the one that is picked as a file, such a file taken in, and it deleted. The value
// is {"own": names of the user's own, which can be deleted, "takes": are files taken in, "name", "text":
// of a file to be saved now, "at": when}. Which one the conversation has, its line in the list says.
import { blockOf } from "./block.js";
import { button, make, say } from "./elements.js";
import { notify } from "./page.js";
import { download } from "./saved.js";

const { root, trigger, onValue } = blockOf("presets");
const MOST = 200_000; // bytes of a file
const ASK_MS = 6000; // that the second click may take
const chooser = Object.assign(make("input"), { type: "file", accept: ".toml", hidden: true });
const saver = button("", "Save as a file", () => trigger("give_preset"));
const taker = button("", "Import a file", () => chooser.click());
const dropper = button("", "Delete", drop);
let savedAt = 0; // by the server's clock
let asking = 0; // the timer of the second click
let known = { own: [], takes: false };

function drop() {
  if (asking) {
    forget();
    trigger("drop_preset");
    return;
  }
  say(dropper, "Delete for good?");
  asking = setTimeout(forget, ASK_MS);
}

function forget() {
  clearTimeout(asking);
  asking = 0;
  say(dropper, "Delete");
}

async function takeIn(file) {
  try {
    if (file.size > MOST) throw Error("it is larger than 200 kB");
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    trigger("take_preset", { name: file.name.replace(/\.toml$/i, ""), text });
  } catch (error) {
    const why = error instanceof TypeError ? "it is no text in UTF-8" : error.message;
    notify("warning", `${file.name} was not imported: ${why}`, 10);
  }
}

// The name of the conversation's preset, which the drawer's button shows (conversations.js).
function pickedNow() {
  return document.querySelector("#settings > .label-wrap > span")?.dataset.preset || "";
}

function draw() {
  const picked = pickedNow();
  forget();
  saver.disabled = !picked;
  taker.hidden = !known.takes;
  dropper.hidden = !known.own.includes(picked);
}

function take(line) {
  if (!line) return;
  known = line;
  draw();
  if (!line.text || line.at <= savedAt) return;
  savedAt = line.at;
  download(new Blob([line.text], { type: "application/toml" }), `${line.name}.toml`);
}

chooser.addEventListener("change", () => {
  takeIn(chooser.files[0]);
  chooser.value = ""; // the same file may be chosen again
});
root.replaceChildren(saver, taker, dropper, chooser);
onValue(take);
window.addEventListener("medusa-preset", draw);
