// What the browser keeps of the settings under KEY: the value is JSON, written down as it comes.
function keep() {
  if (props.value) store("localStorage", KEY, props.value);
}

watch("value", keep);

// On a narrow page the composer lies over the settings where they open.
document.addEventListener("click", ({ target }) => {
  const opener = target.closest?.("#settings > .label-wrap");
  requestAnimationFrame(() => opener?.matches(".open") && opener.parentElement.scrollIntoView());
});
