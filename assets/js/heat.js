// Rank accuracies as a table whose cells are tinted: the number stands in each of them.
function heatCard() {
  const card = make("section", "tune-card wide");
  const heading = make("h3", "", "How often each head is right");
  const views = withRole(make("div", "tune-views"), "group", "Where the accuracies come from");
  const words = make("p", "tune-words");
  const scroll = scrollRegion("heat-scroll", "Rank accuracies by head, scrollable");
  card.append(heading, views, words, scroll);
  return { card, views, words, scroll, chosen: 0, tables: [] };
}

function drawHeat(heat, tables) {
  heat.tables = tables;
  heat.chosen = Math.min(heat.chosen, tables.length - 1);
  const pressed = heat.views.contains(document.activeElement);
  heat.views.hidden = tables.length < 2;
  heat.views.replaceChildren(
    ...tables.map((table, place) => {
      const pick = button("", table.name, () => {
        heat.chosen = place;
        drawHeat(heat, heat.tables);
      });
      pick.setAttribute("aria-pressed", String(place === heat.chosen));
      return pick;
    }),
  );
  if (pressed) heat.views.children[heat.chosen].focus();
  const table = tables[heat.chosen];
  say(heat.words, tables.length < 2 ? `${table.name}. ${table.note}` : table.note);
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
  table.rows.forEach((row, place) => body.append(heatRow(table, row, place)));
  grid.append(top, body);
  return grid;
}

function heatRow(table, row, place) {
  const line = make("tr", "");
  const label = make("th", "", `head ${place + 1}`);
  label.scope = "row";
  line.append(label);
  row.forEach((share, rank) => {
    const cell = make("td", "tinted", percent(share));
    cell.style.setProperty("--share", Math.min(1, Math.sqrt(share)).toFixed(3));
    const asked = table.asked?.[place]?.[rank];
    if (asked !== undefined) cell.title = asked ? `compared ${count(asked)} times` : "never drafted: as calibrated";
    if (asked === 0) cell.classList.add("unasked");
    line.append(cell);
  });
  line.append(make("td", "sum", percent(row.reduce((a, b) => a + b, 0))));
  return line;
}
