// Charts with a shared crosshair and zoom: pale raw values, strong smoothed ones, and values in the legend.

import { el, number, percent, put, seconds, svg } from "./dom.js";

const HEIGHT = 168, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const DASHES = ["", "5 3", "1.5 3", "8 3 1.5 3", "3 2", "10 4"];
const MAX_POINTS = 1500; // points drawn of a curve, about as many as there are pixels
export const colourOf = place => `var(--curve-${place % 6 + 1})`;
/** Curves of the same colour differ in their dashes. */
export const dashOf = place => DASHES[(place + Math.floor(place / 6)) % DASHES.length];

/** The looks of a chart's curves: what is called alike has one colour on the whole page, as long as a chart is not left
 * with two of it. `meanings` are the names that several charts have, each with its place. */
export function looksOf(names, meanings) {
  const places = names.map(name => meanings.get(name) ?? null);
  const taken = new Set(places.filter(place => place !== null).map(place => place % 6));
  const free = [...Array(6).keys(), ...names.keys()].filter(place => !taken.has(place));
  return places.map(place => place ?? free.shift()).map(place => ({ hue: colourOf(place), dash: dashOf(place) }));
}

/** The state that the charts of a page share: crosshair, zoom, smoothing, and what is along the axis. */
export function chartGroup() {
  const charts = new Set();
  const group = { at: null, zoom: null, smooth: .25, charts, along: null };
  /** Where the crosshair is, in words. */
  group.where = at => group.along ? group.along.format(at) : `step ${at}`;
  /** The place after one, by keys. */
  group.next = (from, direction) => group.along ? group.along.next(from, direction) : from + direction;
  group.draw = () => charts.forEach(chart => chart.draw());
  group.point = at => { group.at = at; charts.forEach(chart => chart.point()); };
  group.focus = zoom => { group.zoom = zoom; group.changed?.(); group.draw(); };
  const observer = new ResizeObserver(() => group.draw());
  group.add = chart => { charts.add(chart); observer.observe(chart.node); };
  group.close = () => observer.disconnect();
  return group;
}

/** The points of a curve with centred means. */
function smooth(points, share) {
  const reach = Math.round(points.length * share / 5);
  if (!reach) return points;
  const sums = [0];
  for (const [, value] of points) sums.push(sums.at(-1) + value);
  return points.map(([step], index) => {
    const from = Math.max(0, index - reach), to = Math.min(points.length, index + reach + 1);
    return [step, (sums[to] - sums[from]) / (to - from)];
  });
}
function thinOut(points) {
  const stride = Math.ceil(points.length / MAX_POINTS);
  return stride < 2 ? points : points.filter((_, index) => index % stride === 0 || index === points.length - 1);
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
  const step = [1, 2, 5, 10].map(factor => factor * size).find(factor => factor >= rough);
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

const SUPERSCRIPTS = { "-": "⁻", ...Object.fromEntries([..."⁰¹²³⁴⁵⁶⁷⁸⁹"].map((sign, digit) => [digit, sign])) };
const formatPower = value => `10${[...String(Math.round(Math.log10(value)))].map(sign => SUPERSCRIPTS[sign]).join("")}`;

/** A chart's axes, crosshair, zoom and legend; `paint` draws its content. */
function chartFrame(shared, title, unit, { range, scale, paint, legend, label, owners, remove }) {
  const plot = svg("svg", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${title}, ${unit}: a step`, "aria-describedby": "chart-keys", "aria-valuenow": 0, height: HEIGHT });
  const legendList = el("ul", { class: "legend" });
  const when = el("span", { class: "when number" });
  const node = el("section", { class: "panel chart" },
    el("header", { class: "row between" }, el("h3", {}, title, " ", el("span", { class: "dim small unit" }, unit)), when,
      remove ? el("button", { class: "quiet", "aria-label": `Remove ${title}`, on: { click: remove } }, "×") : null), plot, legendList);
  const self = { node, title };
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM });
  const selection = svg("rect", { class: "marked", y: TOP, height: HEIGHT - BOTTOM - TOP });
  let map = null, dragStart = null, keyStart = null; // where a selection starts: by pointer in pixels, by keys in steps

  self.draw = () => {
    const width = plot.clientWidth || 320, [first, last] = shared.zoom ?? shared.span();
    const x = step => LEFT + (step - first) / (last - first || 1) * (width - LEFT - RIGHT);
    const [low, high] = range(first, last);
    const transform = scale === "log" ? Math.log10 : value => value;
    const y = value => TOP + (transform(high) - transform(value)) / (transform(high) - transform(low) || 1) * (HEIGHT - TOP - BOTTOM);
    map = { x, step: pixel => first + (pixel - LEFT) / (width - LEFT - RIGHT) * (last - first), first, last, width, y };
    const marks = scale === "log" ? ticks(transform(low), transform(high), 3).filter(Number.isInteger).map(formatPower => 10 ** formatPower) : ticks(low, high, 3);
    const clip = `clip-${title.replace(/\W/g, "")}`;
    put(plot,
      svg("clipPath", { id: clip }, svg("rect", { x: LEFT - 3, y: TOP - 3, width: Math.max(0, width - LEFT - RIGHT + 6), height: HEIGHT - TOP - BOTTOM + 6 })),
      marks.map(value => [svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, scale === "share" ? `${Math.round(value * 100)} %` : scale === "log" ? formatPower(value) : number(value, 3))]),
      ticks(first, last, Math.min(8, width / 90)).filter(Number.isInteger).map(step =>
        svg("text", { class: "tick", x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, shared.along ? shared.along.tick(step) : number(step))),
      svg("g", { "clip-path": `url(#${clip})` }, paint({ x, y, first, last, width })), selection, cross);
    self.point();
  };
  self.point = () => {
    if (!map) return;
    const shown = shared.at !== null && shared.at >= map.first && shared.at <= map.last;
    cross.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) { cross.setAttribute("x1", map.x(shared.at)); cross.setAttribute("x2", map.x(shared.at)); }
    if (keyStart !== null && shared.at === null) clearSelection();
    const [a, b] = keySelection();
    if (keyStart !== null) showSelection(map.x(a), map.x(b));
    put(when, keyStart !== null ? shared.along ? `${shared.where(a)} to ${shared.where(b)}` : `steps ${a} to ${b}` : shown ? shared.where(shared.at) : "");
    put(legendList, legend(shared.at));
    for (const [name, value] of Object.entries({ valuemin: map.first, valuemax: map.last, valuenow: shared.at ?? map.last, valuetext: `${shared.where(shared.at ?? map.last)}: ${label(shared.at)}` })) plot.setAttribute(`aria-${name}`, value);
  };

  /** The run whose curve is nearest to a point: of several runs, a click opens that one. */
  const nearestOwner = (step, pixel) => owners().map(({ owner, value }) => ({ owner, away: pixel === null || value(step) === undefined ? Infinity : Math.abs(map.y(value(step)) - pixel) }))
    .reduce((best, one) => best && best.away <= one.away ? best : one, null)?.owner;
  const clamp = at => { const inside = Math.min(map.last, Math.max(map.first, at)); return shared.along ? inside : Math.round(inside); };
  const showSelection = (a, b) => { selection.setAttribute("x", Math.min(a, b)); selection.setAttribute("width", Math.abs(b - a)); };
  const keySelection = () => [keyStart, shared.at].sort((first, second) => first - second);
  const clearSelection = () => { keyStart = null; showSelection(0, 0); };
  const zoom = (a, b) => { clearSelection(); if (b > a) shared.focus([a, b]); };
  plot.addEventListener("pointermove", event => {
    if (!map) return;
    const pixel = event.clientX - plot.getBoundingClientRect().left;
    shared.point(clamp(map.step(pixel)));
    if (dragStart !== null) showSelection(dragStart, pixel);
  });
  plot.addEventListener("pointerdown", event => {
    if (event.button) return;
    dragStart = event.clientX - plot.getBoundingClientRect().left;
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointerup", event => {
    const end = event.clientX - plot.getBoundingClientRect().left, [a, b] = [dragStart, end].sort((first, second) => first - second);
    dragStart = null;
    clearSelection();
    if (b - a > 8) zoom(clamp(map.step(a)), clamp(map.step(b)));
    else shared.open?.(clamp(map.step(end)), nearestOwner(clamp(map.step(end)), event.clientY - plot.getBoundingClientRect().top));
  });
  plot.addEventListener("pointerleave", () => dragStart === null && shared.point(null));
  plot.addEventListener("keydown", event => {
    const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (direction) {
      const from = shared.at ?? (direction > 0 ? map.first - 1 : map.last + 1), to = clamp(shared.next(from, direction));
      if (event.shiftKey) keyStart ??= clamp(from); else clearSelection();
      shared.point(to);
    } else if (keyStart !== null && event.key === "Enter") zoom(...keySelection());
    else if (event.key === "Enter" && shared.at !== null) shared.open?.(shared.at, nearestOwner(shared.at, null));
    else if (keyStart !== null && event.key === "Escape") { clearSelection(); self.point(); } else return;
    event.preventDefault();
  });
  plot.addEventListener("blur", () => shared.point(null));
  return self;
}

const formatValue = (scale, value) => value === null || value === undefined ? "–" : scale === "share" ? percent(value) : number(value, 3);
function legendItem(name, value, stroke, pattern, more) {
  return el("li", {}, svg("svg", { width: 18, height: 8, "aria-hidden": true },
    svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke, "stroke-width": more ? 7 : 2, "stroke-dasharray": pattern || null })),
    el("span", { class: "called" }, name), el("b", { class: "number" }, value));
}

/** Curves: {name, points: [[step, value]], hue, dash, sparse}. */
export function lineChart(shared, { title, unit, scale, remove }) {
  let curves = [];
  const range = (first, last) => {
    if (scale === "share") return [0, 1];
    const inside = curves.flatMap(curve => curve.points.filter(([step]) => step >= first && step <= last).map(([, value]) => value));
    let low = inside.reduce((least, curve) => Math.min(least, curve), Infinity), high = inside.reduce((most, curve) => Math.max(most, curve), -Infinity);
    if (!inside.length) [low, high] = [0, 1];
    if (scale === "log") return [Math.max(low, high * 1e-9) * .8, high * 1.25];
    if (low >= 0 && low < high * .6) low = 0;
    const padding = (high - low || Math.abs(high) || 1) * .06;
    return [low === 0 ? 0 : low - padding, high + padding];
  };
  const path = (points, { x, y }) => points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const paint = scales => curves.flatMap(curve => {
    const smoothed = curve.sparse || curve.points.length < 12 ? curve.points : smooth(curve.points, shared.smooth);
    const style = { fill: "none", stroke: curve.hue, "stroke-linejoin": "round", "stroke-linecap": "round" };
    return [
      smoothed === curve.points ? null : svg("path", { ...style, d: path(thinOut(curve.points), scales), "stroke-width": 1, opacity: .28 }),
      svg("path", { ...style, d: path(thinOut(smoothed), scales), "stroke-width": 1.8, "stroke-dasharray": curve.dash || null }),
      curve.sparse || curve.points.length < 12 ? curve.points.map(([step, value]) => svg("circle", { cx: scales.x(step), cy: scales.y(value), r: 2.4, fill: curve.hue })) : null,
    ];
  });
  const value = (curve, step) => (step === null ? curve.points.at(-1) : nearest(curve.points, step))?.[1];
  const self = chartFrame(shared, title, unit, { range, scale, paint, remove,
    legend: step => curves.map(curve => legendItem(curve.name, formatValue(scale, value(curve, step)), curve.hue, curve.dash)),
    owners: () => curves.map(curve => ({ owner: curve.owner, value: step => value(curve, step) })),
    label: step => curves.map(curve => `${curve.name} ${formatValue(scale, value(curve, step))}`).join(", ") });
  self.set = values => { curves = values.map(curve => ({ ...curve, points: scale === "log" ? curve.points.filter(([, v]) => v > 0) : curve.points })).filter(curve => curve.points.length); self.draw(); };
  return self;
}

/** Stacked layers: {name, points: [[step, seconds]], hue}, all over the same steps. */
export function stackedChart(shared, { title, unit }) {
  let layers = [];
  const sums = (first, last) => (layers[0]?.points ?? []).map(([step], index) => [step, layers.reduce((sum, layer) => sum + layer.points[index][1], 0)])
    .filter(([step]) => step >= first && step <= last).map(([, sum]) => sum);
  const paint = ({ x, y }) => {
    const steps = layers[0]?.points.map(([step]) => step) ?? [], base = steps.map(() => 0);
    const half = steps.length > 1 ? (x(steps[1]) - x(steps[0])) / 2 : 12, gap = half > 2.5 ? .5 : 0;
    return layers.map(layer => {
      const parts = layer.points.map(([step, spent], position) => {
        const low = base[position], high = low + spent;
        base[position] = high;
        return spent ? `M${(x(step) - half + gap).toFixed(1)} ${y(low).toFixed(1)}V${y(high).toFixed(1)}H${(x(step) + half - gap).toFixed(1)}V${y(low).toFixed(1)}Z` : "";
      });
      return svg("path", { d: parts.join(""), fill: layer.hue });
    });
  };
  const valueAt = (layer, step) => step === null ? null : nearest(layer.points, step)?.[1];
  const totalOf = layer => layer.points.reduce((sum, [, value]) => sum + value, 0);
  const grandTotal = () => layers.reduce((sum, layer) => sum + totalOf(layer), 0) || 1;
  const formatLayer = (layer, step) => step === null ? `${Math.round(totalOf(layer) / grandTotal() * 100)} %` : seconds(valueAt(layer, step));
  const self = chartFrame(shared, title, unit, { scale: "linear", paint, range: (first, last) => [0, sums(first, last).reduce((most, layer) => Math.max(most, layer), 1e-6) * 1.05],
    legend: step => layers.map(layer => legendItem(layer.name, formatLayer(layer, step), layer.hue, "", true)),
    owners: () => layers.map(layer => ({ owner: layer.owner, value: () => undefined })),
    label: step => layers.map(layer => `${layer.name} ${formatLayer(layer, step)}`).join(", ") });
  self.set = values => { layers = values; self.draw(); };
  return self;
}

const BINS_HEIGHT = 28, BIN_WIDTH = 10;
/** A histogram: how many values are in each of some bins of equal width. */
export function histogram({ low, high, counts }, format) {
  const most = Math.max(...counts, 1), words = `${format(low)} to ${format(high)}: ${counts.join(", ")}`;
  return svg("svg", { class: "histogram", role: "img", "aria-label": words, width: counts.length * BIN_WIDTH, height: BINS_HEIGHT }, svg("title", {}, words),
    counts.map((many, place) => svg("rect", { x: place * BIN_WIDTH, y: BINS_HEIGHT - many / most * BINS_HEIGHT, width: BIN_WIDTH - 1, height: many / most * BINS_HEIGHT })));
}
