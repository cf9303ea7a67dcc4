// A chart of one or more figures over steps, with a band from the least to the largest value where a point stands for several steps.

import { DASHES, colour, digits, disclosure, finite, h, s, table, whole } from "./dom.js";

const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 190, MOST_TABLE = 60;

/** `shared` has the chosen range of steps, which all charts have in common, and is told of a new one: {range, choose(range)}. */
export class Chart {
  constructor({ title, unit = "", format = digits, base = 10, shared }) {
    Object.assign(this, { title, unit, format, base, shared, series: [], at: null, drag: null });
    this.value = h("output", { class: "value", "aria-live": "off" });
    this.svg = s("svg", { tabindex: "0", role: "application", "aria-roledescription": "chart", focusable: "true" });
    this.legend = h("div", { class: "legend" });
    this.details = disclosure("Table", () => this.table());
    this.element = h("div", { class: "chart" }, h("h3", {}, unit ? `${title}, ${unit}` : title), this.value, this.svg, this.legend, this.details);
    this.svg.addEventListener("pointermove", (e) => this.point(e));
    this.svg.addEventListener("pointerleave", () => { if (!this.drag) this.read(null); });
    this.svg.addEventListener("pointerdown", (e) => { if (e.button === 0) { this.drag = this.stepAt(e); if (e.pointerType === "mouse") this.svg.setPointerCapture(e.pointerId); } });
    this.svg.addEventListener("pointerup", (e) => this.drop(e));
    this.svg.addEventListener("pointercancel", () => { this.drag = null; });
    this.svg.addEventListener("dblclick", () => this.shared.choose(null));
    this.svg.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /** series: [{name, tone, points: [[step, mean, low, high]], marks: boolean}] */
  show(series) {
    this.series = series.filter((one) => one.points.length);
    this.element.hidden = !this.series.length;
    this.draw();
    this.details.refresh();
  }

  bounds() {
    const chosen = this.shared.range;
    let first = Infinity, last = -Infinity, low = Infinity, high = -Infinity, least = Infinity, largest = -Infinity;
    for (const one of this.series) for (const [step, , , , from = step, to = step] of one.points) { first = Math.min(first, from); last = Math.max(last, to); }
    if (chosen) [first, last] = chosen;
    for (const one of this.series) for (const [step, mean, l, u] of one.points) if (step >= first && step <= last && finite(mean)) {
      low = Math.min(low, mean); high = Math.max(high, mean); least = Math.min(least, finite(l) ? l : mean); largest = Math.max(largest, finite(u) ? u : mean);
    }
    if (!finite(low)) [low, high] = [0, 1];
    const span = high - low;
    low = Math.max(Math.min(low, least), low - 0.6 * span); // single values far off would flatten the curve
    high = Math.min(Math.max(high, largest), high + 0.6 * span);
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
    const bottom = low >= 0 && low - margin < 0 ? 0 : low - margin;
    return { first, last: last > first ? last : first + 1, low: bottom, high: high + margin };
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.series.length) return;
    const b = this.bounds();
    this.width = width;
    this.b = b;
    const X = (step) => LEFT + ((step - b.first) / (b.last - b.first)) * (width - LEFT - RIGHT);
    const Y = (v) => HEIGHT - BOTTOM - ((Math.min(Math.max(v, b.low), b.high) - b.low) / (b.high - b.low)) * (HEIGHT - TOP - BOTTOM);
    this.X = X; this.Y = Y;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const v of ticks(b.low, b.high, 5, { base: this.base })) parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: Y(v), y2: Y(v) }), s("text", { class: "axis", x: LEFT - 6, y: Y(v) + 4, "text-anchor": "end" }, this.format(v)));
    for (const v of ticks(b.first, b.last, Math.max(3, Math.floor(width / 90)), { integers: true })) parts.push(s("text", { class: "axis", x: X(v) > width - 40 ? width - 2 : X(v), y: HEIGHT - 6, "text-anchor": X(v) > width - 40 ? "end" : "middle" }, whole(v)));
    this.series.forEach((one, i) => parts.push(...this.lines(one, i)));
    this.over = s("g");
    parts.push(this.over);
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.words());
    this.legend.replaceChildren(...(this.series.length > 1 ? this.series.map((one) => h("span", {}, swatch(one.tone, one.marks), one.name)) : []));
    this.cursor();
  }

  lines(one, i) {
    const shown = one.points.filter(([step], n, all) => (all[n + 1] ?? [step])[0] >= this.b.first && (all[n - 1] ?? [step])[0] <= this.b.last);
    const color = colour(one.tone), out = [];
    let path = "", above = [], below = [], pen = false;
    for (const [step, mean, low, high] of shown) {
      if (!finite(mean)) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${this.X(step).toFixed(1)} ${this.Y(mean).toFixed(1)}`;
      pen = true;
      if (finite(low) && finite(high)) { above.push(`${this.X(step).toFixed(1)} ${this.Y(high).toFixed(1)}`); below.unshift(`${this.X(step).toFixed(1)} ${this.Y(low).toFixed(1)}`); }
    }
    const clip = `clip-${Math.round(this.width)}`;
    if (!i) out.push(s("clipPath", { id: clip }, s("rect", { x: LEFT, y: 0, width: Math.max(0, this.width - LEFT - RIGHT + 1), height: HEIGHT })));
    const inside = { "clip-path": `url(#${clip})` };
    if (above.length > 1) out.push(paint(s("path", { class: "band", d: `M${above.join("L")}L${below.join("L")}Z`, ...inside }), "fill", color));
    out.push(paint(s("path", { class: "curve", d: path, "stroke-dasharray": one.marks ? "2 3" : DASHES[one.tone % 8] || null, ...inside }), "stroke", color));
    if (one.marks || shown.length === 1) for (const [step, mean] of shown.slice(-200)) if (finite(mean) && step >= this.b.first && step <= this.b.last) out.push(paint(s("circle", { class: "dot", cx: this.X(step), cy: this.Y(mean), r: 3 }), "fill", color));
    return out;
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect(), b = this.b;
    if (!b) return 1;
    const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT);
    return Math.round(b.first + Math.min(1, Math.max(0, share)) * (b.last - b.first));
  }

  point(event) { this.read(this.stepAt(event)); }

  drop(event) {
    const from = this.drag, to = this.stepAt(event);
    this.drag = null;
    if (from !== null && Math.abs(this.X(to) - this.X(from)) > 8) this.shared.choose([Math.min(from, to), Math.max(from, to)]);
    else this.cursor();
  }

  key(event) {
    if (!this.b) return;
    const { first, last } = this.b, span = last - first, at = this.at ?? last;
    const all = this.series.flatMap((one) => one.points.map((p) => p[0])).sort((a, c) => a - c);
    const near = { ArrowRight: () => all.find((x) => x > at && x <= last), ArrowLeft: () => all.findLast((x) => x < at && x >= first), Home: () => all.find((x) => x >= first), End: () => all.findLast((x) => x <= last),
      PageDown: () => Math.min(last, at + Math.ceil(span / 10)), PageUp: () => Math.max(first, at - Math.ceil(span / 10)) };
    if (near[event.key]) { this.value.setAttribute("aria-live", "polite"); this.read(near[event.key]() ?? at); }
    else if (event.key === "+" || event.key === "=") this.shared.choose(clamp(at - span / 4, at + span / 4, first, last));
    else if (event.key === "-") this.shared.choose(this.shared.range ? [Math.max(1, Math.floor(first - span / 2)), Math.ceil(last + span / 2)] : null);
    else if (event.key === "Escape" || event.key === "0") this.shared.choose(null);
    else return;
    event.preventDefault();
  }

  /** Tell the values at a step; null: none. */
  read(step) {
    this.at = step;
    this.cursor();
  }

  cursor() {
    if (!this.over) return;
    this.over.replaceChildren();
    this.value.replaceChildren(this.at === null ? this.newest() : "");
    if (this.at === null) return;
    const parts = [];
    let where = "";
    this.series.forEach((one) => {
      const found = nearest(one.points, this.at);
      if (!found) return;
      where ||= steps(found);
      const [step, mean, low, high] = found, range = finite(low) && low !== high ? ` (${this.format(low)} to ${this.format(high)})` : "";
      parts.push(`${this.series.length > 1 ? one.name + " " : ""}${this.format(mean)}${range}`);
      if (finite(mean) && step >= this.b.first && step <= this.b.last) this.over.append(paint(s("circle", { class: "dot", cx: this.X(step), cy: this.Y(mean), r: 4 }), "fill", colour(one.tone)));
    });
    const x = this.X(this.at);
    this.over.prepend(s("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (this.drag !== null && this.drag !== this.at) { const [a, c] = [this.X(this.drag), x].sort((p, q) => p - q); this.over.prepend(s("rect", { class: "chosen", x: a, y: TOP, width: c - a, height: HEIGHT - TOP - BOTTOM })); }
    this.value.replaceChildren(`${where}: ${parts.join("; ")}`);
  }

  newest() {
    return this.series.map((one) => `${this.series.length > 1 ? one.name + " " : ""}${this.format(one.points.at(-1)[1])}`).join("; ");
  }

  words() {
    const { first, last } = this.b;
    return `${this.title}: ${this.series.map((one) => `${one.name} from ${this.format(one.points[0][1])} to ${this.format(one.points.at(-1)[1])}`).join("; ")}; steps ${whole(first)} to ${whole(last)}. Arrow keys read values.`;
  }

  table() {
    if (!this.b) return "";
    const rows = [];
    for (const one of this.series) {
      const shown = one.points.filter(([step]) => step >= this.b.first && step <= this.b.last), stride = Math.ceil(shown.length / MOST_TABLE) || 1;
      for (let n = (shown.length - 1) % stride; n < shown.length; n += stride) { const [, mean, low, high] = shown[n]; rows.push([one.name, steps(shown[n]).replace(/^steps? /, ""), this.format(mean), finite(low) ? this.format(low) : "", finite(high) ? this.format(high) : ""]); }
    }
    return table(["", "step", "mean", "least", "largest"], rows, [1, 2, 3, 4]);
  }
}

export function swatch(i, marks = false) {
  const line = paint(s("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": marks ? "2 3" : DASHES[i % 8] || null }), "stroke", colour(i));
  return s("svg", { class: "mark", viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" }, line, marks ? paint(s("circle", { cx: 13, cy: 5, r: 3 }), "fill", colour(i)) : null);
}

/** Colours are set by the object model: the policy of this page allows no style in attributes. */
export function paint(element, property, value) {
  element.style[property] = value;
  return element;
}

function clamp(from, to, first, last) {
  const [a, b] = [Math.max(first, Math.floor(from)), Math.min(last, Math.ceil(to))];
  return b - a >= 2 ? [a, b] : [first, last];
}

/** The steps that a point stands for. */
const steps = ([step, , , , first = step, last = step]) => (last > first ? `steps ${whole(first)} to ${whole(last)}` : `step ${whole(first)}`);

function nearest(points, step) {
  let best = null;
  for (const p of points) if (!best || Math.abs(p[0] - step) <= Math.abs(best[0] - step)) best = p;
  return best;
}

export function ticks(low, high, most, { base = 10, integers = false } = {}) {
  const raw = (high - low) / most, power = base ** Math.floor(Math.log(raw || 1) / Math.log(base) + 1e-9);
  let step = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map((m) => m * power).find((m) => m >= raw) || 1;
  if (integers) step = Math.max(1, Math.round(step));
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * Math.abs(step) && out.length < 20; v += step) out.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return out;
}
