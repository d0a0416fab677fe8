// Trying one tool: a form made from its schema, or its arguments as text; the call is the one that a policy would make.
import { ABSENT, Mistake, control, parsed } from "./form.js";
import { ask, el, put } from "./dom.js";
import { copyButton, fold, resultView } from "./result.js";
import { curl } from "./curl.js";

/** A session that was opened to try tools ends by itself after so long. */
const TTL_S = 600;
const sessions = new Map();

export function attempt(tool) {
  const pure = tool.hints.pure && tool.audience === "policy";
  let form = control(tool.parameters), raw = null;
  const fields = el("div", {}, form.node), said = el("div", { class: "stack", "aria-live": "polite" });
  const create = el("textarea", { rows: 2, spellcheck: "false", placeholder: '{"ground_truth": "7"}', id: "create" });
  const run = el("button", { class: "first", type: "submit" }, "Call"), code = el("pre", { class: "wrap" });
  const how = el("div", { class: "small dim row centre" });

  const written = () => {
    if (raw) return raw.value;
    const value = form.read();
    return JSON.stringify(value === ABSENT ? {} : value);
  };
  const call = () => ({ tool_calls: [{ id: "try", type: "function", function: { name: tool.name, arguments: written() } }],
    layout: "parts", ...(tool.audience === "loop" ? { audience: "loop" } : {}) });
  const opening = () => ({ tools: [tool.name], ttl_s: TTL_S, ...(create.value.trim() ? { create: { [tool.name]: parsed(create.value, "What its session is opened with", create) } } : {}) });
  const show = () => { try { code.textContent = curl(tool, call(), opening()); } catch (error) { code.textContent = `# ${error.message}`; } };

  const swap = () => {
    const mode = modes.querySelector("input:checked").value;
    try {
      if (mode === "json" && !raw) {
        raw = el("textarea", { rows: 6, spellcheck: "false", class: "raw", "aria-label": "Arguments as JSON" });
        const value = form.read();
        raw.value = JSON.stringify(value === ABSENT ? {} : value, null, 2);
        put(fields, raw);
      } else if (mode === "form" && raw) {
        form = control(tool.parameters, { start: parsed(raw.value, "This", raw) });
        raw = null;
        put(fields, form.node);
      }
      said.querySelector("[role=alert]")?.remove();
    } catch (error) {
      raw ? (modes.querySelector("[value=json]").checked = true) : (modes.querySelector("[value=form]").checked = true, raw = null);
      complain(said, error);
    }
    show();
  };
  const modes = el("fieldset", { class: "modes row centre small", on: { change: swap } }, el("legend", { class: "unseen" }, "How arguments are written"),
    [["form", "Form"], ["json", "JSON"]].map(([value, words], at) =>
      el("label", {}, el("input", { type: "radio", name: "mode", value, checked: at === 0 }), words)));

  const submit = async event => {
    event.preventDefault();
    run.disabled = true;
    put(said, el("p", { class: "dim small waiting" }, "Waiting for the tool …"));
    try {
      const answer = await send(tool, pure, call(), opening);
      put(said, resultView(answer.results[0]));
    } catch (error) { complain(said, error); } finally { run.disabled = false; tellSession(); }
  };
  const tellSession = () => {
    const id = sessions.get(tool.name);
    if (pure) put(how, "It keeps no state, so that no session is needed.");
    else if (!id) put(how, "A session is opened for it, and kept for further calls.");
    else put(how, "Its session is open.", el("button", { type: "button", class: "quiet", on: { click: async () => {
      await ask(`v1/sessions/${id}`, { method: "DELETE" }).catch(() => null);
      sessions.delete(tool.name);
      tellSession();
    } } }, "Close it"));
  };
  const keyed = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.requestSubmit(); };
  const node = el("form", { class: "stack", on: { submit, keydown: keyed, input: show } },
    el("div", { class: "row between centre" }, el("h3", {}, "Try it"), modes), fields,
    pure ? null : fold("What its session is opened with", el("label", { class: "label", for: "create" }, "Arguments of its create, as JSON"), create),
    el("div", { class: "row centre" }, run, el("span", { class: "tiny dim keyhint" }, el("kbd", {}, "Ctrl"), " ", el("kbd", {}, "Enter"))), how, said,
    fold("The same with curl", code, copyButton(() => code.textContent)));
  tellSession();
  show();
  return node;
}

async function send(tool, pure, call, opening) {
  if (pure) return ask("v1/calls", { method: "POST", body: call });
  for (const fresh of [false, true]) {
    if (fresh || !sessions.has(tool.name)) sessions.set(tool.name, (await ask("v1/sessions", { method: "POST", body: opening() })).id);
    try { return await ask(`v1/sessions/${sessions.get(tool.name)}/calls`, { method: "POST", body: call }); } catch (error) {
      sessions.delete(tool.name);
      if (fresh || error.status !== 404) throw error;  // it had expired: once more, in a new one
    }
  }
}

function complain(said, error) {
  put(said, el("div", { class: "notice small", data: { outcome: error instanceof Mistake ? "invalid" : "error" }, role: "alert" },
    el("p", {}, error.message), error.remedy ? el("p", { class: "remedy" }, error.remedy) : null));
  if (error instanceof Mistake) { error.node.setAttribute("aria-invalid", "true"); error.node.focus(); }
}
