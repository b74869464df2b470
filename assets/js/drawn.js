// Acts when something in a block of the conversation was drawn, by whomever. Each asks for its own
// block: the answer that comes is drawn 25 times a second, and a long history is dear to look at.
export function whenDrawn(id, act) {
  new MutationObserver((seen) => {
    const block = document.getElementById(id);
    if (seen.some(({ target }) => block?.contains(target) || target.contains(block))) act();
  }).observe(document.getElementById("conversation"), {
    childList: true,
    subtree: true,
    characterData: true,
  });
}
