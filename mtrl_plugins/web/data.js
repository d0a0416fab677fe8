// The page's data, from the server, and the addresses of its views,
// such as #/RUN/rollouts?stop=done and #/RUN/rollouts/17?token=153.

import { fetchJson, fetchResponse } from "./dom.js";

export function parseAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view, ...rest] = path.split("/").map(decodeURIComponent);
  const item = rest.join("/");
  const name = view === "rollouts" && item ? "rollout" : ["rollouts", "group", "compare"].includes(view) ? view : "run";
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

const runUrl = (run, rest = "") => `../v1/runs/${encodeURIComponent(run)}${rest}`;
const mediaUrls = new Map();

export const fetchRuns = () => fetchJson("../v1/runs");
export const fetchMetrics = (run, from) => fetchJson(runUrl(run, `/metrics?from=${from}`));
export const saveNotes = (run, body) => fetchJson(runUrl(run, "/notes"), { method: "POST", body });
export const fetchAlarms = run => fetchJson(runUrl(run, "/alarms"));
export const fetchChoices = run => fetchJson(runUrl(run, "/choices"));
export const fetchRollout = (run, place) => fetchJson(runUrl(run, `/rollouts/${place}`));
export const fetchGroup = (run, name) => fetchJson(runUrl(run, `/group?name=${encodeURIComponent(name)}`));
/** The digest of a step; undefined if it has no rollouts. */
export const fetchSteps = async (run, step) => (await fetchJson(runUrl(run, `/steps?step=${step}`)))[0];
/** Tool calls by tool and step. */
/** The URL of media by its sha256. */
export async function mediaUrl(run, digest, mime) {
  const key = `${run}/${digest}`;
  if (!mediaUrls.has(key)) {
    const bytes = await (await fetchResponse(runUrl(run, `/blobs/${digest}`))).arrayBuffer();
    mediaUrls.set(key, URL.createObjectURL(new Blob([bytes], { type: mime })));
  }
  return mediaUrls.get(key);
}
/** Rows of the table: {total, rows, ...}. */
export const fetchRows = (run, params, signal) => fetchJson(runUrl(run, `/rollouts?${new URLSearchParams(params)}`), { signal });
