// The curves of a chart as a table: exact values, read without a pointer and without eyes, with links to each step.

import { el, keepFocus, number, percent, put, seconds } from "./dom.js";
import { dataTable } from "./data_table.js";
import { linkTo } from "./address.js";

const MAX_ROWS = 200; // the latest steps

/** `node`, and `set(charts)` with the shown charts: {title, unit, scale, curves: [{name, points}]}. */
export function valuesTable(run) {
  const holder = el("div"), select = el("select", { id: "values-of", on: { change: () => fill() } });
  const node = el("details", { class: "panel values", on: { toggle: () => fill() } }, el("summary", {}, el("h2", {}, "Values"), el("span", { class: "dim small" }, "the curves as a table")),
    el("label", { class: "row centre", for: "values-of" }, el("span", { class: "label" }, "Chart"), select), holder);
  let charts = [];
  function fill() {
    if (!node.open) return;
    const chart = charts.find(({ title }) => title === select.value) ?? charts[0];
    keepFocus(holder, () => put(holder, chart ? table(run, chart) : null));
  }
  return { node, set(shown) {
    const titles = shown.map(({ title }) => title), before = select.value;
    if (titles.join("\n") !== charts.map(({ title }) => title).join("\n")) {
      put(select, titles.map(title => el("option", { value: title, selected: title === before }, title)));
    }
    charts = shown;
    node.hidden = !charts.length;
    fill();
  } };
}
function table(run, { title, unit, scale, curves }) {
  const format = scale === "share" ? percent : scale === "time" ? seconds : value => number(value, 4);
  const columns = curves.map(({ points }) => new Map(points)), steps = [...new Set(curves.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => b - a).slice(0, MAX_ROWS);
  const links = step => step < 1 ? String(step) : el("a", { href: linkTo(run.name, "rollouts", null, { step }), "aria-label": `rollouts of step ${step}` }, step);
  const changed = step => step < 2 ? "" : el("a", { href: linkTo(run.name, "compare", `${step - 1}-${step}`), "aria-label": `what changed from step ${step - 1} to ${step}` }, "what changed");
  return dataTable(`${title}, ${unit}`, ["Step", ...curves.map(({ name }) => name), "Since the step before"], steps.map(step => [links(step), ...columns.map(column => format(column.get(step))), changed(step)]), { textFrom: curves.length + 1 });
}
