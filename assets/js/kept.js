// What the browser keeps of the settings under KEY: the value is JSON, written down as it comes.
function keep() {
  if (props.value) store("localStorage", KEY, props.value);
}

watch("value", keep);

// Gradio does not tell a screen reader whether they are open.
function tellOpen() {
  const opener = document.querySelector(`#${PANEL} > .label-wrap`);
  if (!opener) return void setTimeout(tellOpen, 50); // it is not there yet
  const tell = () => opener.setAttribute("aria-expanded", String(opener.matches(".open")));
  new MutationObserver(tell).observe(opener, { attributeFilter: ["class"] });
  tell();
}
tellOpen();

// On a narrow page the composer lies over the settings where they open.
document.addEventListener("click", ({ target }) => {
  const opener = target.closest?.("#settings > .label-wrap");
  requestAnimationFrame(() => opener?.matches(".open") && opener.parentElement.scrollIntoView());
});
