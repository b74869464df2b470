// Hands what the model said about one node to the panel, which draws it. Shows nothing itself.
function tell() {
  if (!props.value) return;
  document.dispatchEvent(new CustomEvent("medusa-peek", { detail: JSON.parse(props.value) }));
}
watch("value", tell);
