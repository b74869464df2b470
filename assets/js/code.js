// Blocks of code get a label with their language, where the answer names one. It is drawn by a style
// sheet from an attribute: what is copied, selected or tinted of an answer has no word of it.
import { whenDrawn } from "./drawn.js";

function labelCode(id) {
  const label = () => {
    const fresh = document.querySelectorAll(`#${id} .code_wrap:not([data-language]) code[class]`);
    for (const code of fresh) {
      const name = /(?:^|\s)language-(\S+)/.exec(code.className)?.[1] ?? "";
      code.closest(".code_wrap").dataset.language = name;
    }
  };
  whenDrawn(id, label);
  label();
}

// Gradio's own copy has lost the first line's indentation.
const COPIED = 2000; // ms that it says so
document.addEventListener(
  "click",
  async (event) => {
    const copy = event.target.closest?.(".copy_code_button");
    if (!copy || !navigator.clipboard) return; // there is none without HTTPS: Gradio does what it can
    event.stopPropagation();
    await navigator.clipboard.writeText(copy.parentElement.querySelector("code").textContent.trimEnd());
    const done = copy.querySelector(".check");
    done.style.opacity = "1";
    setTimeout(() => (done.style.opacity = "0"), COPIED);
  },
  true,
);

labelCode("history");
labelCode("live-text");
