// An answer that was saved as a file: its text, word by word beside the steps that they came in.
import { make } from "./elements.js";
import { recorded } from "./file_place.js";
import { answerWords } from "./steps.js";
import { bars } from "./timeline.js";
import "./tree.js";

const { title, question, text, line } = recorded;
const answer = make("p", "answer");
const dark = matchMedia("(prefers-color-scheme: dark)");

function drawText() {
  let at = line.at;
  answer.append(text.slice(0, at));
  line.lengths.forEach((length, step) => {
    const part = make("span", "", text.slice(at, (at += length)));
    part.dataset.step = step;
    answer.append(part);
  });
  answer.append(text.slice(at));
}

function markStep() {
  answer.querySelector(".now")?.classList.remove("now");
  const now = answer.querySelector(`[data-step="${bars.getAttribute("aria-valuenow") - 1}"]`);
  now?.classList.add("now");
  now?.scrollIntoView({ block: "nearest" });
}

function applyLook() {
  document.body.classList.toggle("dark", dark.matches);
  document.documentElement.style.colorScheme = dark.matches ? "dark" : "light";
}

document.title = `${title} · medusa-chat`;
const head = make("h1", "", "Saved from medusa-chat. Click a word, or move with ← and →.");
document.getElementById("said").append(head, make("p", "question", question), answer);
drawText();
applyLook();
dark.addEventListener("change", applyLook);
answer.addEventListener("click", ({ target }) => {
  if (target.dataset.step) answerWords.go(Number(target.dataset.step));
});
document.addEventListener("keydown", (event) => {
  const isKey = ["ArrowLeft", "ArrowRight", " "].includes(event.key);
  if (!isKey || event.defaultPrevented || event.target !== document.body) return;
  bars.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, cancelable: true }));
  event.preventDefault();
});
new MutationObserver(markStep).observe(bars, { attributeFilter: ["aria-valuenow"] });
