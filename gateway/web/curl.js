// The call as a curl command. The token appears only as a variable.
import { token } from "./dom.js";

const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;
const base = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

function line(method, path, body) {
  const parts = ["curl -s", method === "POST" ? "" : `-X ${method}`, token() ? '-H "Authorization: Bearer $MTRL_TOKEN"' : "",
    path.includes("$") ? `"${base()}${path}"` : `${base()}${path}`, body === undefined ? "" : `-d ${quoted(JSON.stringify(body))}`];
  return parts.filter(Boolean).join(" ");
}

export function curl(tool, call, opening) {
  if (tool.hints.pure && tool.audience === "policy") return line("POST", "/v1/calls", call);
  return [
    `id=$(${line("POST", "/v1/sessions", opening)} | python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')`,
    line("POST", "/v1/sessions/$id/calls", call),
    line("DELETE", "/v1/sessions/$id"),
  ].join("\n");
}
