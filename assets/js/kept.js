// What the browser keeps of the settings: the value is JSON, written down as it comes.
function keep() {
  if (props.value) store("localStorage", "medusa-chat-settings", props.value);
}

watch("value", keep);
