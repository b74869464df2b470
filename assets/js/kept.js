// What the browser keeps of the settings: the value is JSON, written down as it comes.
function keep() {
  if (!props.value) return;
  try {
    localStorage.setItem("medusa-chat-settings", props.value);
  } catch {
    // a browser that keeps nothing begins with the defaults each time
  }
}

watch("value", keep);
