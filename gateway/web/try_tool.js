// The "Try it" panel of a tool: arguments from a form or as JSON, and the same call that a policy would make.
import { ABSENT, InputError, control, parseJson } from "./schema_form.js";
import { fetchJson, el, put } from "./dom.js";
import { fold, resultView } from "./result.js";

/** Idle time after which a session expires that could not be closed, such as that of a browser that crashed. */
const TTL_S = 600;
const sessions = new Map(), busy = new Set();

/** Closes the sessions that were opened here and that no call uses; a call's own closes after it. */
export function closeSessions() {
  for (const [name, id] of sessions) if (!busy.has(name)) { sessions.delete(name); closeSession(id); }
}
const closeSession = id => fetchJson(`v1/sessions/${id}`, { method: "DELETE", keepalive: true }).catch(() => null);
addEventListener("pagehide", () => { busy.clear(); closeSessions(); });

export function tryTool(tool) {
  const pure = tool.hints.pure && tool.audience === "policy";
  let form = control(tool.parameters), raw = null;
  const fields = el("div", {}, form.node), output = el("div", { class: "stack", "aria-live": "polite" });
  const create = el("textarea", { rows: 2, spellcheck: "false", placeholder: '{"ground_truth": "7"}', id: "create" });
  const run = el("button", { class: "first", type: "submit" }, "Call");

  const argumentsJson = () => {
    if (raw) return raw.value;
    const value = form.read();
    return JSON.stringify(value === ABSENT ? {} : value);
  };
  const call = () => ({ tool_calls: [{ id: "try", type: "function", function: { name: tool.name, arguments: argumentsJson() } }],
    layout: "parts", ...(tool.audience === "loop" ? { audience: "loop" } : {}) });
  const sessionBody = () => ({ tools: [tool.name], ttl_s: TTL_S, ...(create.value.trim() ? { create: { [tool.name]: parseJson(create.value, "Session arguments", create) } } : {}) });

  const switchMode = () => {
    const mode = modes.querySelector("input:checked").value;
    try {
      if (mode === "json" && !raw) {
        raw = el("textarea", { rows: 6, spellcheck: "false", class: "raw", "aria-label": "Arguments as JSON" });
        const value = form.read();
        raw.value = JSON.stringify(value === ABSENT ? {} : value, null, 2);
        put(fields, raw);
      } else if (mode === "form" && raw) {
        form = control(tool.parameters, { start: parseJson(raw.value, "This", raw) });
        raw = null;
        put(fields, form.node);
      }
      output.querySelector("[role=alert]")?.remove();
    } catch (error) {
      raw ? (modes.querySelector("[value=json]").checked = true) : (modes.querySelector("[value=form]").checked = true, raw = null);
      showError(output, error);
    }
  };
  const modes = el("fieldset", { class: "modes row centre small", on: { change: switchMode } }, el("legend", { class: "unseen" }, "Argument format"),
    [["form", "Form"], ["json", "JSON"]].map(([value, words], at) =>
      el("label", {}, el("input", { type: "radio", name: "mode", value, checked: at === 0 }), words)));

  const submit = async event => {
    event.preventDefault();
    run.disabled = true;
    busy.add(tool.name);
    put(output, el("p", { class: "dim small waiting" }, "Waiting for the tool …"));
    try {
      const answer = await send(tool, pure, call(), sessionBody);
      put(output, resultView(answer.results[0]));
    } catch (error) { showError(output, error); } finally {
      run.disabled = false;
      busy.delete(tool.name);
      if (!keep.checked || !node.isConnected) await close();
      showSession();
    }
  };
  const showSession = () => {
    const id = sessions.get(tool.name);
    put(isOpen, id ? ["It is open until you leave.", el("button", { type: "button", class: "quiet", on: { click: close } }, "Close")] : null);
  };
  const close = async () => {
    const id = sessions.get(tool.name);
    sessions.delete(tool.name);
    showSession();
    if (id) await closeSession(id);
  };
  const keep = el("input", { type: "checkbox", class: "keep", on: { change: () => keep.checked || close() } }), isOpen = el("span", { role: "status" });
  const sessionNote = el("div", { class: "small dim row centre" }, pure ? "The tool keeps no state, so it needs no session."
    : [el("label", { class: "row centre tightrow" }, keep, "Keep the session for further calls"), isOpen]);
  const keyed = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.requestSubmit(); };
  const node = el("form", { class: "stack", on: { submit, keydown: keyed } },
    el("div", { class: "row between centre" }, el("h3", {}, "Try it"), modes), fields,
    pure ? null : fold("Session arguments", el("label", { class: "label", for: "create" }, "Arguments of the tool's create, as JSON"), create),
    el("div", { class: "row centre" }, run, el("span", { class: "tiny dim keyhint" }, el("kbd", {}, "Ctrl"), " ", el("kbd", {}, "Enter"))), sessionNote, output);
  showSession();
  return node;
}

async function send(tool, pure, call, sessionBody) {
  if (pure) return fetchJson("v1/calls", { method: "POST", body: call });
  for (const fresh of [false, true]) {
    if (fresh || !sessions.has(tool.name)) sessions.set(tool.name, (await fetchJson("v1/sessions", { method: "POST", body: sessionBody() })).id);
    try { return await fetchJson(`v1/sessions/${sessions.get(tool.name)}/calls`, { method: "POST", body: call }); } catch (error) {
      sessions.delete(tool.name);
      if (fresh || error.status !== 404) throw error;  // the session had expired: retry in a new one
    }
  }
}

function showError(output, error) {
  put(output, el("div", { class: "notice small", data: { outcome: error instanceof InputError ? "invalid" : "error" }, role: "alert" },
    el("p", {}, error.message), error.remedy ? el("p", { class: "remedy" }, error.remedy) : null));
  if (error instanceof InputError) { error.node.setAttribute("aria-invalid", "true"); error.node.focus(); }
}
