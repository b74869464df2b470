// Rank accuracies as a table whose cells are tinted: the number stands in each of them.
import { make, say, scrollRegion } from "./elements.js";
import { percent } from "./format.js";

export function heatCard() {
  const card = make("section", "tune-card wide");
  const heading = make("h3", "", "How often each head is right");
  const words = make("p", "tune-words");
  const scroll = scrollRegion("heat-scroll", "Rank accuracies by head, scrollable");
  card.append(heading, words, scroll);
  return { card, words, scroll };
}

export function drawHeat(heat, table) {
  say(heat.words, `${table.name}. ${table.note}`);
  heat.scroll.replaceChildren(heatTable(table));
}

function heatTable(table) {
  const grid = make("table", "heat");
  grid.append(make("caption", "", `${table.name}: share right, by head and rank`));
  const head = make("tr", "");
  const name = (text) => {
    const cell = make("th", "", text);
    cell.scope = "col";
    return cell;
  };
  const ranks = table.rows[0].map((_, rank) => name(`top-${rank + 1}`));
  head.append(name("head"), ...ranks, name(`any of ${table.rows[0].length}`));
  const top = make("thead", "");
  top.append(head);
  const body = make("tbody", "");
  table.rows.forEach((row, place) => body.append(heatRow(row, place)));
  grid.append(top, body);
  return grid;
}

function heatRow(row, place) {
  const line = make("tr", "");
  const label = make("th", "", `head ${place + 1}`);
  label.scope = "row";
  line.append(label);
  row.forEach((share) => {
    const cell = make("td", "tinted", percent(share));
    cell.style.setProperty("--share", Math.min(1, Math.sqrt(share)).toFixed(3));
    line.append(cell);
  });
  line.append(make("td", "sum", percent(row.reduce((a, b) => a + b, 0))));
  return line;
}
