// The page's data, from the server or from the exported file that contains the page, and the addresses of its views,
// such as #/RUN/rollouts?stop=done and #/RUN/rollouts/17?token=153.

import { fetchJson, fetchResponse } from "./dom.js";

export function parseAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view, ...rest] = path.split("/").map(decodeURIComponent);
  const item = rest.join("/");
  const name = view === "rollouts" && item ? "rollout" : ["rollouts", "group", "compare", "tools"].includes(view) ? view : "run";
  return { run: run || null, view: name, item, params: Object.fromEntries(new URLSearchParams(query)) };
}
export function linkTo(run, view, item, params) {
  const parts = [run, view === "run" ? null : view === "rollout" ? "rollouts" : view, item].filter(part => part !== null && part !== undefined);
  const present = Object.entries(params ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#/${parts.map(encodeURIComponent).join("/")}${present.length ? `?${new URLSearchParams(present)}` : ""}`;
}
/** Changes parameters of the address without showing another view. */
export function updateAddress(params) {
  const address = parseAddress();
  history.replaceState(null, "", linkTo(address.run ?? "", address.view, address.item || null, { ...address.params, ...params }));
}

const element = document.getElementById("kept");
/** The data of an exported file; null with a server. */
export const exported = element ? JSON.parse(element.textContent) : null;

const runUrl = (run, rest = "") => `../v1/runs/${encodeURIComponent(run)}${rest}`;
const mediaUrls = new Map();

export async function fetchRuns() { return exported ? exported.about : fetchJson("../v1/runs"); }
export async function fetchMetrics(run, from) {
  return exported ? { lines: from ? [] : exported.runs[run].metrics, at: 1 } : fetchJson(runUrl(run, `/metrics?from=${from}`));
}
export async function fetchAlarms(run) { return exported ? exported.runs[run].alarms : fetchJson(runUrl(run, "/alarms")); }
export async function fetchChoices(run) { return exported ? exported.runs[run].choices : fetchJson(runUrl(run, "/choices")); }
export async function fetchRollout(run, place) {
  if (!exported) return fetchJson(runUrl(run, `/rollouts/${place}`));
  const rollout = exported.runs[run].rollouts[place];
  if (!rollout) throw new Error(`Rollout ${place} is not in this file: it holds ${Object.keys(exported.runs[run].rollouts).length} of the run's.`);
  return rollout;
}
export async function fetchGroup(run, name) {
  if (!exported) return fetchJson(runUrl(run, `/group?name=${encodeURIComponent(name)}`));
  const rollouts = Object.values(exported.runs[run].rollouts).filter(rollout => rollout.group === name);
  if (!rollouts.length) throw new Error("Nothing of this group is in this file.");
  return { group: name, rollouts: rollouts };
}
/** The digest of a step; undefined if it has no rollouts. */
export async function fetchSteps(run, step) {
  if (exported) return exported.runs[run].steps.find(digest => digest.step === step);
  return (await fetchJson(runUrl(run, `/steps?step=${step}`)))[0];
}
/** Tool calls by tool and step; the exported file has those of all its steps. */
export async function fetchTools(run, step) { return exported ? exported.runs[run].tools : fetchJson(runUrl(run, `/tools?step=${encodeURIComponent(step)}`)); }
/** The URL of media by its sha256. */
export async function mediaUrl(run, digest, mime) {
  if (exported) return exported.runs[run].blobs[digest];
  const key = `${run}/${digest}`;
  if (!mediaUrls.has(key)) {
    const bytes = await (await fetchResponse(runUrl(run, `/blobs/${digest}`))).arrayBuffer();
    mediaUrls.set(key, URL.createObjectURL(new Blob([bytes], { type: mime })));
  }
  return mediaUrls.get(key);
}
/** Rows of the table: {total, rows, ...}. */
export async function fetchRows(run, params, signal) {
  if (exported) return filterRows(exported.runs[run], params);
  return fetchJson(runUrl(run, `/rollouts?${new URLSearchParams(params)}`), { signal });
}

const SKIPPED_FIELDS = new Set(["role", "type", "id", "tool_call_id"]); // fields of a message that are not searched
function texts(value) {
  if (typeof value === "string") return [value];
  return value ? Object.entries(value).filter(([name]) => !SKIPPED_FIELDS.has(name)).flatMap(([, inner]) => texts(inner)) : [];
}
const rolloutTexts = rollout => rollout.ledgers.flatMap(ledger => ledger.entries).flatMap(entry =>
  [...texts(entry.messages), ...(entry.calls ?? []).flatMap(call => [call.name ?? "", call.arguments ?? ""])]);

/** Filters and sorts as the server does; full-text search covers only rollouts that the file has token by token. */
function filterRows({ rows, rollouts }, params) {
  const search = (params.q ?? "").trim().toLowerCase();
  const [first, last] = (params.step ?? "").split("-").map(Number);
  const matches = row => (!params.stop || row.stop === params.stop) && (!params.blame || row.blame === params.blame)
    && (!params.kind || row.kind === params.kind) && (!params.source || row.source === params.source) && (!params.group || row.grp === params.group) && (!params.tool || params.tool in row.tools)
    && (!params.outcome || params.outcome in row.outcomes)
    && (!params.step || (row.step >= first && row.step <= (last || first)))
    && (!params.success || row.success === { yes: 1, no: 0, none: null }[params.success])
    && (!params.least || (row.reward !== null && row.reward >= Number(params.least)))
    && (!params.most || (row.reward !== null && row.reward <= Number(params.most)))
    && (!search || [row.task, row.kind, row.source, row.question, row.answer, row.reason, ...(rollouts[row.place] ? rolloutTexts(rollouts[row.place]) : [])]
      .some(text => (text ?? "").toLowerCase().includes(search)));
  const descending = (params.sort ?? "").startsWith("-"), name = (params.sort || "place").replace("-", "");
  const known = value => value !== null && value !== undefined;
  const matching = rows.filter(matches).sort((a, b) => (known(b[name]) - known(a[name]))
    || (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : 0) * (descending ? -1 : 1) || a.place - b.place);
  const mean = values => values.length ? values.reduce((sum, text) => sum + text, 0) / values.length : null;
  const offset = Number(params.offset ?? 0);
  return { total: matching.length, rows: matching.slice(offset, offset + Number(params.limit ?? 100)), offset, listed: 1,
    known: rows.length, looked: Object.keys(rollouts).length, reward: mean(matching.map(row => row.reward).filter(known)),
    success: mean(matching.map(row => row.success).filter(known)) };
}
