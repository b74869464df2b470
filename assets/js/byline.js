// Below an answer: which model gave it and how fast. It stands before the buttons of its row, so that
// a screen reader comes to it after the answer, and in their line, so that nothing moves for it.
let bylines = new Map(); // row -> [model, speed]

function drawByline(bar, now) {
  const old = bar.querySelector(":scope > .byline");
  const whole = now?.filter(Boolean).join(" · ");
  if (old?.title === whole) return;
  old?.remove();
  if (!now) return;
  const [model, speed] = now;
  const box = make("div", "byline");
  box.title = whole;
  box.append(make("span", "byline-model", model));
  const inOneLine = speed.replace(/(?<=\w) (?=\w)/g, "\u00a0"); // each figure with its unit
  if (speed) box.append(make("span", "", ` · ${inOneLine}`));
  bar.prepend(box);
}
