// Blocks of code get a label with their language, where the answer names one. It is drawn by a style
// sheet from an attribute: what is copied, selected or tinted of an answer has no word of it.
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

labelCode("history");
labelCode("live-text");
