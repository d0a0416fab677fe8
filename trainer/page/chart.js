// Charts that share a crosshair and a zoom: raw values pale, smoothed ones strong, and a legend that holds the numbers.

import { el, number, percent, put, seconds, svg } from "./dom.js";

const HEIGHT = 168, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const DASHES = ["", "5 3", "1.5 3", "8 3 1.5 3", "3 2", "10 4"];
const MOST = 1500; // points of a curve: more than there are pixels say nothing more
export const hue = place => `var(--curve-${place % 6 + 1})`;
/** Curves that have a hue in common differ in their dashes. */
export const dash = place => DASHES[(place + Math.floor(place / 6)) % DASHES.length];

/** What all charts of a page have in common. */
export function board() {
  const charts = new Set();
  const all = { at: null, zoom: null, smooth: .25, charts };
  all.draw = () => charts.forEach(one => one.draw());
  all.point = at => { all.at = at; charts.forEach(one => one.point()); };
  all.focus = zoom => { all.zoom = zoom; all.changed?.(); all.draw(); };
  const watch = new ResizeObserver(() => all.draw());
  all.add = chart => { charts.add(chart); watch.observe(chart.node); };
  all.close = () => watch.disconnect();
  return all;
}

/** The values of a curve, each as the mean of those around it. */
export function smooth(points, share) {
  const reach = Math.round(points.length * share / 5);
  if (!reach) return points;
  const sums = [0];
  for (const [, value] of points) sums.push(sums.at(-1) + value);
  return points.map(([step], place) => {
    const from = Math.max(0, place - reach), to = Math.min(points.length, place + reach + 1);
    return [step, (sums[to] - sums[from]) / (to - from)];
  });
}
function thin(points) {
  const each = Math.ceil(points.length / MOST);
  return each < 2 ? points : points.filter((_, place) => place % each === 0 || place === points.length - 1);
}
/** The point at a step, or the last before it. */
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  if (high < 0 || step < points[0][0]) return null;
  while (low < high) { const middle = (low + high + 1) >> 1; if (points[middle][0] <= step) low = middle; else high = middle - 1; }
  return points[low];
}
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(one => one * size).find(one => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

const RAISED = { "-": "⁻", ...Object.fromEntries([..."⁰¹²³⁴⁵⁶⁷⁸⁹"].map((sign, digit) => [digit, sign])) };
const power = value => `10${[...String(Math.round(Math.log10(value)))].map(sign => RAISED[sign]).join("")}`;

/** A frame with axes, crosshair and zoom; `paint` puts something into it, and `values` tells the legend. */
function frame(shared, title, unit, { range, scale, paint, legend, label }) {
  const plot = svg("svg", { class: "plot", tabindex: 0, role: "img", height: HEIGHT });
  const listed = el("ul", { class: "legend" });
  const when = el("span", { class: "when number" });
  const node = el("section", { class: "panel chart" },
    el("header", { class: "row between" }, el("h3", {}, title, " ", el("span", { class: "dim small unit" }, unit)), when), plot, listed);
  const self = { node, title };
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM });
  const marked = svg("rect", { class: "marked", y: TOP, height: HEIGHT - BOTTOM - TOP });
  let map = null, begun = null, held = null; // where a mark begins: by the pointer, in pixels; by the keys, in steps

  self.draw = () => {
    const width = plot.clientWidth || 320, [first, last] = shared.zoom ?? shared.span();
    const x = step => LEFT + (step - first) / (last - first || 1) * (width - LEFT - RIGHT);
    const [low, high] = range(first, last);
    const bend = scale === "log" ? Math.log10 : value => value;
    const y = value => TOP + (bend(high) - bend(value)) / (bend(high) - bend(low) || 1) * (HEIGHT - TOP - BOTTOM);
    map = { x, step: pixel => first + (pixel - LEFT) / (width - LEFT - RIGHT) * (last - first), first, last, width };
    const marks = scale === "log" ? ticks(bend(low), bend(high), 3).filter(Number.isInteger).map(power => 10 ** power) : ticks(low, high, 3);
    const clip = `clip-${title.replace(/\W/g, "")}`;
    put(plot,
      svg("clipPath", { id: clip }, svg("rect", { x: LEFT - 3, y: TOP - 3, width: Math.max(0, width - LEFT - RIGHT + 6), height: HEIGHT - TOP - BOTTOM + 6 })),
      marks.map(value => [svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, scale === "share" ? `${Math.round(value * 100)} %` : scale === "log" ? power(value) : number(value, 3))]),
      ticks(first, last, Math.min(8, width / 90)).filter(Number.isInteger).map(step =>
        svg("text", { class: "tick", x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, number(step))),
      svg("g", { "clip-path": `url(#${clip})` }, paint({ x, y, first, last, width })), marked, cross);
    self.point();
  };
  self.point = () => {
    if (!map) return;
    const shown = shared.at !== null && shared.at >= map.first && shared.at <= map.last;
    cross.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) { cross.setAttribute("x1", map.x(shared.at)); cross.setAttribute("x2", map.x(shared.at)); }
    if (held !== null && shared.at === null) drop();
    const [a, b] = span();
    if (held !== null) box(map.x(a), map.x(b));
    put(when, held !== null ? `steps ${a} to ${b}` : shown ? `step ${shared.at}` : "");
    put(listed, legend(shared.at));
    plot.setAttribute("aria-label", `${title}, ${unit}: ${label(shared.at)}`);
  };

  const clamp = step => Math.round(Math.min(map.last, Math.max(map.first, step)));
  const box = (a, b) => { marked.setAttribute("x", Math.min(a, b)); marked.setAttribute("width", Math.abs(b - a)); };
  const span = () => [held, shared.at].sort((one, two) => one - two);
  const drop = () => { held = null; box(0, 0); };
  const zoom = (a, b) => { drop(); if (b > a) shared.focus([a, b]); };
  plot.addEventListener("pointermove", event => {
    if (!map) return;
    const pixel = event.clientX - plot.getBoundingClientRect().left;
    shared.point(clamp(map.step(pixel)));
    if (begun !== null) box(begun, pixel);
  });
  plot.addEventListener("pointerdown", event => {
    if (event.button) return;
    begun = event.clientX - plot.getBoundingClientRect().left;
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointerup", event => {
    const end = event.clientX - plot.getBoundingClientRect().left, [a, b] = [begun, end].sort((one, two) => one - two);
    begun = null;
    b - a > 8 ? zoom(clamp(map.step(a)), clamp(map.step(b))) : drop();
  });
  plot.addEventListener("pointerleave", () => begun === null && shared.point(null));
  plot.addEventListener("dblclick", () => shared.focus(null));
  plot.addEventListener("keydown", event => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (way) {
      const from = shared.at ?? (way > 0 ? map.first - 1 : map.last + 1), to = clamp(from + way);
      if (event.shiftKey) held ??= clamp(from); else drop();
      shared.point(to);
    } else if (held !== null && event.key === "Enter") zoom(...span());
    else if (held !== null && event.key === "Escape") { drop(); self.point(); } else return;
    event.preventDefault();
  });
  plot.addEventListener("blur", () => shared.point(null));
  return self;
}

const told = (scale, value) => value === null || value === undefined ? "–" : scale === "share" ? percent(value) : number(value, 3);
function item(name, value, stroke, pattern, more) {
  return el("li", {}, svg("svg", { width: 18, height: 8, "aria-hidden": true },
    svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke, "stroke-width": more ? 7 : 2, "stroke-dasharray": pattern || null })),
    el("span", { class: "called" }, name), el("b", { class: "number" }, value));
}

/** Curves: {name, points: [[step, value]], hue, dash, sparse}. */
export function lines(shared, { title, unit, scale }) {
  let curves = [];
  const range = (first, last) => {
    if (scale === "share") return [0, 1];
    const inside = curves.flatMap(one => one.points.filter(([step]) => step >= first && step <= last).map(([, value]) => value));
    let low = inside.reduce((least, one) => Math.min(least, one), Infinity), high = inside.reduce((most, one) => Math.max(most, one), -Infinity);
    if (!inside.length) [low, high] = [0, 1];
    if (scale === "log") return [Math.max(low, high * 1e-9) * .8, high * 1.25];
    if (low >= 0 && low < high * .6) low = 0;
    const air = (high - low || Math.abs(high) || 1) * .06;
    return [low === 0 ? 0 : low - air, high + air];
  };
  const path = (points, { x, y }) => points.map(([step, value], place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const paint = at => curves.flatMap(one => {
    const even = one.sparse || one.points.length < 12 ? one.points : smooth(one.points, shared.smooth);
    const style = { fill: "none", stroke: one.hue, "stroke-linejoin": "round", "stroke-linecap": "round" };
    return [
      even === one.points ? null : svg("path", { ...style, d: path(thin(one.points), at), "stroke-width": 1, opacity: .28 }),
      svg("path", { ...style, d: path(thin(even), at), "stroke-width": 1.8, "stroke-dasharray": one.dash || null }),
      one.sparse || one.points.length < 12 ? one.points.map(([step, value]) => svg("circle", { cx: at.x(step), cy: at.y(value), r: 2.4, fill: one.hue })) : null,
    ];
  });
  const value = (one, step) => (step === null ? one.points.at(-1) : nearest(one.points, step))?.[1];
  const self = frame(shared, title, unit, { range, scale, paint,
    legend: step => curves.map(one => item(one.name, told(scale, value(one, step)), one.hue, one.dash)),
    label: step => curves.map(one => `${one.name} ${told(scale, value(one, step))}`).join(", ") });
  self.set = given => { curves = given.map(one => ({ ...one, points: scale === "log" ? one.points.filter(([, v]) => v > 0) : one.points })).filter(one => one.points.length); self.draw(); };
  return self;
}

/** Layers that add up: {name, points: [[step, seconds]]}, all over the same steps. */
export function stack(shared, { title, unit }) {
  let layers = [];
  const sums = (first, last) => (layers[0]?.points ?? []).map(([step], place) => [step, layers.reduce((sum, one) => sum + one.points[place][1], 0)])
    .filter(([step]) => step >= first && step <= last).map(([, sum]) => sum);
  const paint = ({ x, y }) => {
    const steps = layers[0]?.points.map(([step]) => step) ?? [], base = steps.map(() => 0);
    const half = steps.length > 1 ? (x(steps[1]) - x(steps[0])) / 2 : 12, gap = half > 2.5 ? .5 : 0;
    return layers.map((one, place) => {
      const parts = one.points.map(([step, spent], at) => {
        const low = base[at], high = low + spent;
        base[at] = high;
        return spent ? `M${(x(step) - half + gap).toFixed(1)} ${y(low).toFixed(1)}V${y(high).toFixed(1)}H${(x(step) + half - gap).toFixed(1)}V${y(low).toFixed(1)}Z` : "";
      });
      return svg("path", { d: parts.join(""), fill: hue(place) });
    });
  };
  const at = (one, step) => step === null ? null : nearest(one.points, step)?.[1];
  const whole = one => one.points.reduce((sum, [, value]) => sum + value, 0);
  const all = () => layers.reduce((sum, one) => sum + whole(one), 0) || 1;
  const says = (one, step) => step === null ? `${Math.round(whole(one) / all() * 100)} %` : seconds(at(one, step));
  const self = frame(shared, title, unit, { scale: "linear", paint, range: (first, last) => [0, sums(first, last).reduce((most, one) => Math.max(most, one), 1e-6) * 1.05],
    legend: step => layers.map((one, place) => item(one.name, says(one, step), hue(place), "", true)),
    label: step => layers.map(one => `${one.name} ${says(one, step)}`).join(", ") });
  self.set = given => { layers = given; self.draw(); };
  return self;
}
