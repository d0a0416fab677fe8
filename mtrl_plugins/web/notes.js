// Notes and tags of a run.

import { Refusal, el, put } from "./dom.js";
import { saveNotes } from "./data.js";

/** Notes and tags of a run, which are kept in its folder. */
export function notesPanel(run, several) {
  const text = el("textarea", { rows: 3, "aria-label": `Notes on ${run.name}`, placeholder: "What was tried, and what came of it", value: run.notes });
  const tags = el("input", { "aria-label": `Tags of ${run.name}`, placeholder: "tags, with commas between them", value: run.tags.join(", ") });
  const said = el("span", { class: "dim small", role: "status" });
  const save = async () => {
    const body = { notes: text.value, tags: tags.value.split(",").map(tag => tag.trim()).filter(Boolean) };
    try { Object.assign(run, await saveNotes(run.name, body)); put(said, "saved"); } catch (error) { if (!(error instanceof Refusal)) throw error; put(said, `${error.message} ${error.remedy}`); }
  };
  return el("details", { class: "panel notes", open: Boolean(run.notes) }, el("summary", {}, el("h2", {}, several ? `Notes on ${run.name}` : "Notes"), el("span", { class: "dim small" }, "and tags")),
    el("div", { class: "stack" }, text, el("div", { class: "row centre" }, el("div", { class: "grow" }, tags), el("button", { on: { click: save } }, "Save"), said)));
}
