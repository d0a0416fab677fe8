// Tools: how often each was called, how long its calls took, and how they ended, for a range of steps and by step.

import { el, integer, put, seconds } from "./dom.js";
import { fetchTools, linkTo } from "./data.js";
import { dataTable } from "./data_table.js";

const SHARES = [["p50", "p50"], ["p95", "p95"], ["max", "slowest"]];

export async function view({ frame, run, address }) {
  const found = await fetchTools(run.name, address.params.step ?? "");
  const slowness = ([, digest]) => digest.times.p95 ?? -1, tools = Object.entries(found.tools).sort((a, b) => slowness(b) - slowness(a));
  const chosen = tools.find(([name]) => name === address.params.tool) ?? tools[0];
  put(frame, el("header", { class: "top stack" }, el("h1", { class: "question" }, "Tools"), stepForm(run, address, found)),
    tools.length ? [dataTable("All tools", ["Tool", "Calls", ...SHARES.map(([, title]) => title), "Outcomes"], tools.map(([name, digest]) => toolRow(run, found, name, digest, name === chosen[0])), { textFrom: 5, caption: "All tools, the slowest first; choose one to see its steps" }),
      dataTable(`${chosen[0]} by step`, ["Step", "Calls", ...SHARES.map(([, title]) => title), "Outcomes"], chosen[1].steps.toReversed().map(digest =>
        [el("a", { href: linkTo(run.name, "rollouts", null, { step: digest.step, tool: chosen[0] }) }, digest.step), ...figures(run, digest)]), { textFrom: 5 })]
      : el("div", { class: "panel empty", role: "status" }, el("p", {}, address.params.step ? "No tool was called in these steps." : "No tool has been called yet.")));
  return { title: `Tools of ${run.name}`, actions: { Escape: () => history.back() } };
}
function stepForm(run, address, found) {
  const field = el("input", { id: "tool-steps", value: address.params.step ?? "", placeholder: found.first === null ? "" : `${found.first}-${found.last}`, autocomplete: "off", class: "step-field" });
  const show = event => { event.preventDefault(); location.hash = linkTo(run.name, "tools", null, { ...address.params, step: field.value.trim() }); };
  return el("form", { class: "row centre", on: { submit: show } }, el("label", { class: "label", for: "tool-steps" }, "Steps"), field, el("button", { type: "submit" }, "Show"),
    found.first === null ? null : el("span", { class: "dim small" }, `the calls of step ${found.first} to ${found.last}`));
}
function toolRow(run, found, name, digest, isChosen) {
  return [el("a", { class: "mono", href: linkTo(run.name, "tools", null, { step: `${found.first}-${found.last}`, tool: name }), "aria-current": isChosen ? "true" : null }, name), ...figures(run, digest)];
}
function figures(run, digest) {
  const slowest = digest.slowest === null ? "–" : el("a", { href: linkTo(run.name, "rollout", digest.slowest), title: `in rollout ${digest.slowest}` }, seconds(digest.times.max));
  return [integer(digest.calls), seconds(digest.times.p50), seconds(digest.times.p95), slowest,
    el("span", { class: "row" }, Object.entries(digest.outcomes).map(([outcome, times]) => el("span", { class: "chip", data: { outcome } }, `${integer(times)} ${outcome}`)))];
}
