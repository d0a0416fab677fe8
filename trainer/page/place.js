// An address names what is seen, so that it can be sent: #/RUN/rollouts?stop=done, #/RUN/rollouts/17?token=153.

export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view, ...rest] = path.split("/").map(decodeURIComponent);
  const which = rest.join("/");
  const name = view === "rollouts" && which ? "rollout" : ["rollouts", "group"].includes(view) ? view : "run";
  return { run: run || null, view: name, which, asked: Object.fromEntries(new URLSearchParams(query)) };
}
export function link(run, view, which, asked) {
  const parts = [run, view === "run" ? null : view === "rollout" ? "rollouts" : view, which].filter(one => one !== null && one !== undefined);
  const given = Object.entries(asked ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#/${parts.map(encodeURIComponent).join("/")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}
/** What else the address says, without another view being made. */
export function note(asked) {
  const here = place();
  history.replaceState(null, "", link(here.run ?? "", here.view, here.which || null, { ...here.asked, ...asked }));
}
