// What is along the charts: steps, or the tokens or the time that were spent up to them.

import { integer, number, seconds } from "./dom.js";

export const isPhase = name => /^time\/[^/]+_s$/.test(name);
export const secondsOf = line => Object.entries(line).reduce((sum, [name, value]) => sum + (isPhase(name) ? value ?? 0 : 0), 0);
export const AXES = {
  step: null,
  tokens: { of: line => line["tokens/sampled"] ?? 0, format: at => `${integer(at)} tokens`, tick: at => number(at) },
  time: { of: secondsOf, format: seconds, tick: at => at ? seconds(at) : "0" },
};
/** What is along the charts: steps, or the tokens or the time that were spent up to them. `shown()` are the runs. */
export function axis(shown) {
  let chosen = "step";
  const places = new Map(); // by history: how many lines were added up, and the place of each step
  const placesOf = history => {
    let known = places.get(history);
    if (!known || known.name !== chosen || known.lines > history.lines.length) places.set(history, known = { name: chosen, lines: 0, sum: 0, at: new Map() });
    for (; known.lines < history.lines.length; known.lines += 1) { const line = history.lines[known.lines]; known.at.set(line.step, known.sum += AXES[chosen].of(line)); }
    return known.at;
  };
  const self = { at: (history, line) => AXES[chosen] ? placesOf(history).get(line.step) : line.step,
    stepAt: (run, at) => {
      const history = shown().find(history => history.run.name === run);
      return AXES[chosen] && history ? history.lines.reduce((best, line) => Math.abs(self.at(history, line) - at) < Math.abs(self.at(history, best) - at) ? line : best).step : at;
    },
    choose: (name, shared) => {
      chosen = name;
      shared.along = AXES[name] && { ...AXES[name], next: (from, direction) => {
        const all = shown().flatMap(history => history.lines.map(line => self.at(history, line))).filter(at => (at - from) * direction >= 1);
        return all.length ? all.reduce((best, at) => Math.abs(at - from) < Math.abs(best - from) ? at : best) : from;
      } };
      shared.at = null;
      shared.focus(null);
    } };
  return self;
}
