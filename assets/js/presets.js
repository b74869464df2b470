// Below the presets: the one that is picked as a file, such a file taken in, and it deleted. The value
// is {"name": of it, "is_own": can it be deleted, "takes": are files taken in, "at": when, "text": its
// file, to be saved now}.
import { blockOf } from "./block.js";
import { button, make, say } from "./elements.js";
import { notify } from "./page.js";

const { root, trigger, onValue } = blockOf("presets");
const MOST = 200_000; // bytes of a file
const ASK_MS = 6000; // that the second click may take
const chooser = Object.assign(make("input"), { type: "file", accept: ".toml", hidden: true });
const saver = button("", "Save as a file", () => trigger("give_preset"));
const taker = button("", "Import a file", () => chooser.click());
const dropper = button("", "Delete", drop);
let savedAt = Date.now() / 1000; // what was to be saved before this page is not
let asking = 0; // the timer of the second click

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

async function take(file) {
  try {
    if (file.size > MOST) throw Error("it is larger than 200 kB");
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    trigger("take_preset", { name: file.name.replace(/\.toml$/i, ""), text });
  } catch (error) {
    const why = error instanceof TypeError ? "it is no text in UTF-8" : error.message;
    notify("warning", `${file.name} was not imported: ${why}`, 10);
  }
}

function draw(line) {
  if (!line) return;
  forget();
  saver.disabled = !line.name;
  taker.hidden = !line.takes;
  dropper.hidden = !line.is_own;
  if (!line.text || line.at <= savedAt) return;
  savedAt = line.at;
  const url = URL.createObjectURL(new Blob([line.text], { type: "application/toml" }));
  Object.assign(document.createElement("a"), { href: url, download: `${line.name}.toml` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

chooser.addEventListener("change", () => {
  take(chooser.files[0]);
  chooser.value = ""; // the same file may be chosen again
});
root.replaceChildren(saver, taker, dropper, chooser);
onValue(draw);
