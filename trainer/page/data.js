// Where the page's data come from: the server that it was loaded from, or the file that it stands in.

import { ask, reach } from "./dom.js";

const kept = document.getElementById("kept");
/** What an export holds; null where there is a server. */
export const file = kept ? JSON.parse(kept.textContent) : null;

const at = (run, rest = "") => `../v1/runs/${encodeURIComponent(run)}${rest}`;
const held = new Map();

export async function runs() { return file ? file.about : ask("../v1/runs"); }
export async function metrics(run, from) {
  return file ? { lines: from ? [] : file.runs[run].metrics, at: 1 } : ask(at(run, `/metrics?from=${from}`));
}
export async function alarms(run) { return file ? file.runs[run].alarms : ask(at(run, "/alarms")); }
export async function choices(run) { return file ? file.runs[run].choices : ask(at(run, "/choices")); }
export async function rollout(run, place) {
  if (!file) return ask(at(run, `/rollouts/${place}`));
  const found = file.runs[run].rollouts[place];
  if (!found) throw new Error(`Rollout ${place} is not in this file: it holds ${Object.keys(file.runs[run].rollouts).length} of the run's.`);
  return found;
}
export async function group(run, name) {
  if (!file) return ask(at(run, `/group?name=${encodeURIComponent(name)}`));
  const all = Object.values(file.runs[run].rollouts).filter(one => one.group === name);
  if (!all.length) throw new Error("Nothing of this group is in this file.");
  return { group: name, rollouts: all };
}
/** The address of a picture's bytes. */
export async function picture(run, digest, mime) {
  if (file) return file.runs[run].blobs[digest];
  const key = `${run}/${digest}`;
  if (!held.has(key)) {
    const bytes = await (await reach(at(run, `/blobs/${digest}`))).arrayBuffer();
    held.set(key, URL.createObjectURL(new Blob([bytes], { type: mime })));
  }
  return held.get(key);
}
/** A page of the table: {total, rows, ...}. */
export async function table(run, asked, signal) {
  if (file) return chosen(file.runs[run], asked);
  return ask(at(run, `/rollouts?${new URLSearchParams(asked)}`), { signal });
}

const UNSAID = new Set(["role", "type", "id", "tool_call_id"]); // of a message: whoever looks for words looks for none of these
function said(value) {
  if (typeof value === "string") return [value];
  return value ? Object.entries(value).filter(([name]) => !UNSAID.has(name)).flatMap(([, one]) => said(one)) : [];
}
const spoken = one => one.ledgers.flatMap(ledger => ledger.entries).flatMap(entry =>
  [...said(entry.messages), ...(entry.calls ?? []).flatMap(call => [call.name ?? "", call.arguments ?? ""])]);

/** The same as a server chooses; what was said is searched in those rollouts that the file holds whole. */
function chosen({ rows, rollouts }, asked) {
  const words = (asked.q ?? "").trim().toLowerCase();
  const [first, last] = (asked.step ?? "").split("-").map(Number);
  const fits = row => (!asked.stop || row.stop === asked.stop) && (!asked.blame || row.blame === asked.blame)
    && (!asked.kind || row.kind === asked.kind) && (!asked.group || row.grp === asked.group) && (!asked.tool || asked.tool in row.tools)
    && (!asked.outcome || asked.outcome in row.outcomes)
    && (!asked.step || (row.step >= first && row.step <= (last || first)))
    && (!asked.success || row.success === { yes: 1, no: 0, none: null }[asked.success])
    && (!asked.least || (row.reward !== null && row.reward >= Number(asked.least)))
    && (!asked.most || (row.reward !== null && row.reward <= Number(asked.most)))
    && (!words || [row.task, row.kind, row.question, row.answer, row.reason, ...(rollouts[row.place] ? spoken(rollouts[row.place]) : [])]
      .some(one => (one ?? "").toLowerCase().includes(words)));
  const down = (asked.sort ?? "").startsWith("-"), name = (asked.sort || "place").replace("-", "");
  const known = value => value !== null && value !== undefined;
  const found = rows.filter(fits).sort((a, b) => (known(b[name]) - known(a[name]))
    || (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : 0) * (down ? -1 : 1) || a.place - b.place);
  const mean = values => values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
  const offset = Number(asked.offset ?? 0);
  return { total: found.length, rows: found.slice(offset, offset + Number(asked.limit ?? 100)), offset, listed: 1,
    known: rows.length, looked: Object.keys(rollouts).length, reward: mean(found.map(row => row.reward).filter(known)),
    success: mean(found.map(row => row.success).filter(known)) };
}
