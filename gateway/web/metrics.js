// Parses /metrics: outcomes and durations of calls by tool.

const LINE = /^(\w+)\{([^}]*)\} (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function labels(text) {
  const found = {};
  for (const [, name, value] of text.matchAll(LABEL))
    found[name] = value.replace(/\\(.)/g, (_, sign) => sign === "n" ? "\n" : sign);
  return found;
}

/** By tool: `outcomes` with counts, `calls`, `sum` of seconds, and `bins` of [upper bound in seconds, calls]. */
export function perTool(text) {
  const tools = new Map();
  const of = name => {
    if (!tools.has(name)) tools.set(name, { outcomes: {}, calls: 0, sum: 0, bins: [] });
    return tools.get(name);
  };
  for (const line of text.split("\n")) {
    const [, name, inside, value] = LINE.exec(line) ?? [];
    if (name === "mtrl_calls_total") {
      const { tool, outcome } = labels(inside);
      of(tool).outcomes[outcome] = Number(value);
      of(tool).calls += Number(value);
    } else if (name === "mtrl_call_seconds_bucket") {
      const { tool, le } = labels(inside);
      of(tool).bins.push([le === "+Inf" ? Infinity : Number(le), Number(value)]);
    } else if (name === "mtrl_call_seconds_sum") of(labels(inside).tool).sum = Number(value);
  }
  for (const one of tools.values()) one.bins = one.bins.map(([to, n], place, all) => [to, n - (all[place - 1]?.[1] ?? 0)]);
  return tools;
}

/** Upper bound of the bin in which a quantile of the durations lies. */
export function quantile(bins, share) {
  const wanted = share * bins.reduce((sum, [, n]) => sum + n, 0);
  let sum = 0;
  return wanted ? bins.find(([, n]) => (sum += n) >= wanted)[0] : null;
}
