// The system prompt opens below its button, over the chat.
function prompt(isWanted) {
  const [box, opener] = ["system-box", "system-button"].map((id) => document.getElementById(id));
  if (!box || box.classList.contains("is-open") === isWanted) return;
  box.classList.toggle("is-open", isWanted);
  opener.setAttribute("aria-expanded", String(isWanted));
  if (isWanted) box.querySelector("textarea").focus();
  else if (box.contains(document.activeElement)) opener.focus();
}

document.addEventListener("click", ({ target }) => {
  const isOpener = Boolean(target.closest?.("#system-button"));
  const wasOpen = document.querySelector("#system-box.is-open") !== null;
  if (isOpener) prompt(!wasOpen);
  else if (wasOpen && !target.closest("#system-box")) prompt(false);
});
document.addEventListener(
  "keydown",
  (event) => {
    if (event.key !== "Escape" || !document.querySelector("#system-box.is-open")) return;
    event.preventDefault();
    prompt(false);
  },
  true,
);
