// A table of figures in a panel: the first column names the row, the others are numbers.

import { el } from "./dom.js";

/** `rows` are lists of cells: texts or nodes. The table scrolls in its panel, also by keys. */
export function dataTable(title, heads, rows, { textFrom = Infinity, caption = title } = {}) {
  const kind = index => index && index < textFrom ? "number" : null;
  return el("section", { class: "panel flush data", "aria-label": title },
    el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `${title}, table` }, el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: kind(index) }, head)))),
      el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell, index) => el("td", { class: kind(index + 1) }, cell))))))));
}
