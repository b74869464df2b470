// How many tokens the message in the box takes, and how many of the context are left then: the model's
// own tokenizer counts, a moment after the last key.
import { blockOf } from "./block.js";
import { say } from "./elements.js";
import { wordsOfCount } from "./format.js";

const { root, trigger, onValue, every } = blockOf("count");
const PAUSE_MS = 400; // without a key, before it is asked
const AGAIN_MS = 1500; // while an answer runs
let timer = 0;
let asked = 0; // numbers the questions: an older answer is not shown
let counted = ""; // the text that was asked about last

function box() {
  return document.querySelector("#box textarea");
}

function askIn(ms) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    counted = box().value;
    asked += 1;
    if (counted) trigger("count", { text: counted, asked });
  }, ms);
}

function draw(told) {
  if (told?.asked !== asked || !counted) return;
  if (told.wait) {
    askIn(AGAIN_MS);
    return;
  }
  say(root, "left" in told ? wordsOfCount(told.message, told.left) : "");
  root.classList.toggle("is-over", told.left < 0);
  root.title = told.left < 0 ? "The oldest messages will be left out" : "Tokens of this message, and left in the context";
}

// Keys, files, examples and what leaves the box without a key: all change its text.
let seen = "";
every(200, () => {
  const value = box()?.value ?? "";
  if (value === seen) return;
  seen = value;
  if (value) askIn(PAUSE_MS);
  else {
    counted = "";
    clearTimeout(timer);
    say(root, "");
  }
});
onValue(draw);
