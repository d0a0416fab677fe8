// Addresses of views, such as #/RUN/rollouts?stop=done and #/RUN/rollouts/17?token=153.

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
