// Pictures of many cells or spans, drawn on a canvas: loads of experts over steps, and lanes of a recorded step. Both are read with the pointer or the arrow keys.

import { bytes, digits, disclosure, finite, h, said, seconds, table, whole } from "./dom.js";

const LEFT = 56, BOTTOM = 20;

export const load = (code) => (code === 0 ? null : code === 1 ? 0 : Math.exp((code - 128) / 18));

/** Blue below the mean, grey at it, orange to red above; hatched: no token. Chosen so that it reads with any colour vision, by lightness alone too. */
function shade(value, dark) {
  const at = Math.max(-1, Math.min(1, Math.log2(value) / 2));
  const [low, middle, high] = dark ? [[86, 180, 233], [40, 46, 54], [255, 148, 85]] : [[0, 90, 160], [238, 240, 243], [196, 72, 0]];
  const end = at < 0 ? low : high, share = Math.abs(at);
  return middle.map((m, i) => Math.round(m + (end[i] - m) * share));
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

/** A canvas of rows that fits its element, is drawn anew when that changes, and tells what is at a place. */
class Picture {
  constructor(label) {
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.value = h("output", { class: "value quiet", "aria-live": "polite" }, " ");
    this.canvas.addEventListener("pointermove", (e) => { const box = this.canvas.getBoundingClientRect(); this.point(e.clientX - box.left, e.clientY - box.top); });
    this.canvas.addEventListener("keydown", (e) => this.key(e) && e.preventDefault());
    this.canvas.addEventListener("focus", () => this.focused?.());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  begin(height) {
    const width = this.canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return null;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) { this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio); this.canvas.style.height = `${height}px`; }
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11.5px system-ui, sans-serif";
    this.width = width;
    this.ink = (name) => style.getPropertyValue(name).trim();
    return pen;
  }
}

export class Heat extends Picture {
  /** `row`: what a row is ("expert"). */
  constructor(title, row) {
    super(title);
    Object.assign(this, { title, row, at: null });
    this.details = disclosure("Table of the newest column", () => this.table());
    this.element = h("div", { class: "heat" }, h("h3", {}, title), this.value, this.canvas, legend(), this.details);
  }

  /** `numbers`: what the rows are called, where not 0, 1, 2. */
  show(map, numbers = []) {
    this.numbers = numbers;
    this.map = map && map.columns ? { ...map, codes: Uint8Array.from(atob(map.codes), (c) => c.charCodeAt(0)) } : null;
    this.element.hidden = !this.map;
    if (this.map) for (let c = 0, last = 0, told = (this.told = []); c < this.map.columns; c++) told.push(this.map.codes[c * this.map.rows] ? (last = c) : last);
    this.draw();
    this.details.refresh();
  }

  /** What was told last, up to a column. */
  code(column, row) { return this.map.codes[this.told[column] * this.map.rows + row]; }

  draw() {
    if (!this.map) return;
    const { rows, columns, width: steps } = this.map, high = Math.max(4, Math.min(18, Math.floor(340 / rows))), pen = this.begin(rows * high + BOTTOM);
    if (!pen) return;
    const wide = (this.width - LEFT - 4) / columns, dark = isDark();
    this.geometry = { high, wide };
    for (let c = 0; c < columns; c++) for (let r = 0; r < rows; r++) {
      const value = load(this.code(c, r));
      if (value === null) continue;
      const x = Math.floor(LEFT + c * wide), y = r * high, broad = Math.floor(LEFT + (c + 1) * wide) - x || 1;
      pen.fillStyle = value > 0 ? `rgb(${shade(value, dark)})` : this.ink("--ink");
      pen.fillRect(x, y, broad, high);
      if (value <= 0.002) { pen.fillStyle = this.ink("--paper"); for (let d = 1; d < high; d += 3) pen.fillRect(x, y + d, broad, 1); }
    }
    pen.fillStyle = this.ink("--quiet");
    pen.textAlign = "right";
    for (let r = 0, every = Math.ceil(14 / high); r < rows; r += every) pen.fillText(this.numbers[r] ?? r, LEFT - 6, Math.max(10, r * high + Math.min(high, 14) - 2));
    for (const share of [0, 0.5, 1]) { const step = Math.max(1, Math.round(share * columns * steps)); pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center"; pen.fillText(`${share === 0.5 ? "" : "step "}${whole(step)}`, LEFT + share * (this.width - LEFT - 4), rows * high + 15); }
    if (this.at) { pen.strokeStyle = this.ink("--focus"); pen.lineWidth = 2; pen.strokeRect(LEFT + this.at[0] * wide - 1, this.at[1] * high - 1, Math.max(4, wide + 2), high + 2); }
  }

  point(x, y) {
    if (!this.map) return;
    const { high, wide } = this.geometry ?? { high: 1, wide: 1 };
    this.read(Math.floor((x - LEFT) / wide), Math.floor(y / high));
  }

  read(column, row) {
    const { rows, columns, width } = this.map;
    this.at = [Math.max(0, Math.min(columns - 1, column)), Math.max(0, Math.min(rows - 1, row))];
    const [c, r] = this.at, value = load(this.code(c, r)), first = this.told[c] * width + 1;
    const steps = width > 1 ? `steps ${whole(first)} to ${whole(first + width - 1)}` : `step ${whole(first)}`;
    this.value.replaceChildren(`${steps}, ${this.row} ${this.numbers[r] ?? r}: ${value === null ? "not told" : value <= 0.002 ? "no token" : `${digits(Number(value.toPrecision(3)))} times the mean`}`);
    this.draw();
  }

  key(event) {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageDown: [0, 10], PageUp: [0, -10], Home: [-1e9, 0], End: [1e9, 0] }[event.key];
    if (!move || !this.map) return false;
    const [c, r] = this.at ?? [this.map.columns - 1, 0];
    this.read(c + move[0], r + move[1]);
    return true;
  }

  table() {
    if (!this.map) return "";
    const last = this.map.columns - 1;
    const rows = [...Array(this.map.rows).keys()].map((r) => [r, load(this.code(last, r))]).sort((a, b) => (b[1] ?? -1) - (a[1] ?? -1));
    return table([this.row, "times the mean"], rows.map(([r, v]) => [this.numbers[r] ?? r, v === null ? "not told" : digits(Number(v.toPrecision(3)))]), [0, 1]);
  }
}

function legend() {
  const steps = [0, 0.25, 0.5, 1, 2, 4].map((value) => {
    const box = h("canvas", { width: "22", height: "10", class: "swatch", "aria-hidden": "true" });
    const paint = () => { const pen = box.getContext("2d"); pen.fillStyle = value ? `rgb(${shade(value, isDark())})` : isDark() ? "#e8ebef" : "#1b1f24"; pen.fillRect(0, 0, 22, 10); if (!value) { pen.fillStyle = isDark() ? "#14171b" : "#fff"; for (let y = 1; y < 10; y += 3) pen.fillRect(0, y, 22, 1); } };
    paint();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    return h("span", {}, box, value === 0 ? "no token" : value === 1 ? "the mean" : value === 4 ? "4 times or more" : value === 0.25 ? "a quarter or less" : digits(value));
  });
  return h("div", { class: "legend" }, ...steps);
}

const KINDS = [["computing", "--s0"], ["waiting: nothing hid it", "--s1"], ["message hidden behind work", "--s2"]];
const ROW = 13, HEAD = 18, SIDE = 118;

export class Lanes extends Picture {
  constructor() {
    super("Lanes of a recorded step");
    this.zoom = null;
    this.boxes = h("div", { class: "legend" });
    this.costs = h("div");
    this.note = h("p", { class: "quiet" });
    this.element = h("div", { class: "lanes" }, this.value, this.boxes, h("div", { class: "scroll" }, this.canvas), this.note, this.costs);
    this.canvas.addEventListener("pointerdown", (e) => { this.from = this.timeAt(e); });
    this.canvas.addEventListener("pointerup", (e) => { const to = this.timeAt(e); if (this.from !== undefined && Math.abs(to - this.from) > this.span() / 100) this.choose([Math.min(this.from, to), Math.max(this.from, to)]); this.from = undefined; });
    this.canvas.addEventListener("dblclick", () => this.choose(null));
  }

  show(found) {
    this.found = found.ranks ? found : null;
    this.element.hidden = false;
    this.canvas.hidden = !this.found;
    if (!this.found) { this.value.replaceChildren(said(found.problem ?? "nothing was recorded")); this.costs.replaceChildren(); this.boxes.replaceChildren(); this.note.replaceChildren(); return; }
    this.rows = found.ranks.flatMap((rank) => rank.lanes.map((lane, i) => ({ rank, lane, first: i === 0 })));
    this.value.replaceChildren(this.words());
    this.boxes.replaceChildren(...KINDS.map(([name, color], i) => h("span", {}, sample(color, i), name)));
    const left = found.left_out ? `${found.left_out} more ranks are not drawn. ` : "";
    this.note.replaceChildren(`${left}Drag to look closer, Esc shows the whole step; arrow keys go from span to span. Phases of the same step for Perfetto: phalanx trace.`);
    this.costs.replaceChildren(h("h3", {}, "What communication cost a rank in the step"), table(["", "sent", "waited", "hidden", "hidden share"],
      found.exposure.map((e) => [e.what, bytes(e.sent_bytes), seconds(e.exposed_s), seconds(e.hidden_s), finite(e.hidden_share) ? `${Math.round(100 * e.hidden_share)} %` : "–"]), [1, 2, 3, 4]));
    this.draw();
  }

  words() { return `step ${whole(this.found.step)}: ${seconds(this.found.seconds)} on ${this.found.ranks.length} rank${this.found.ranks.length === 1 ? "" : "s"}`; }
  range() { return this.zoom ?? [0, this.found.seconds * 1e6 || 1]; }
  span() { const [a, b] = this.range(); return b - a; }
  timeAt(event) { const box = this.canvas.getBoundingClientRect(), [a] = this.range(); return a + ((event.clientX - box.left - SIDE) / Math.max(1, this.width - SIDE - 4)) * this.span(); }
  choose(range) { this.zoom = range; this.draw(); }

  place() {
    let y = HEAD;
    return this.rows.map((row) => { if (row.first) y += 6; const at = y; y += ROW; return at; });
  }

  draw() {
    if (!this.found) return;
    const places = this.place(), pen = this.begin((places.at(-1) ?? 0) + ROW + 6);
    if (!pen) return;
    const [a, b] = this.range(), scale = (this.width - SIDE - 4) / (b - a), X = (us) => SIDE + (us - a) * scale;
    pen.fillStyle = this.ink("--quiet");
    for (const share of [0, 0.5, 1]) { pen.textAlign = share === 1 ? "right" : share ? "center" : "left"; pen.fillText(seconds((a + share * (b - a)) / 1e6), SIDE + share * (this.width - SIDE - 4), 12); }
    this.rows.forEach((row, n) => {
      const y = places[n];
      pen.textAlign = "right"; pen.fillStyle = this.ink(row.first ? "--ink" : "--quiet");
      pen.fillText(row.lane.name.slice(0, 9), SIDE - 6, y + 10);
      if (row.first) { pen.textAlign = "left"; pen.fillText(`rank ${row.rank.rank}`, 0, y + 10); }
      for (const [begin, length, kind] of row.lane.spans) {
        const x = Math.max(SIDE, X(begin)), end = Math.min(this.width - 4, X(begin + length));
        if (end < SIDE || x > this.width - 4) continue;
        bar(pen, x, y, Math.max(0.7, end - x), ROW - 2, kind, this.ink(KINDS[kind]?.[1] ?? "--s6"), this.ink("--paper"));
      }
    });
    if (this.at) { const [n, i] = this.at, [begin, length] = this.rows[n].lane.spans[i]; pen.strokeStyle = this.ink("--focus"); pen.lineWidth = 2; pen.strokeRect(X(begin) - 1, places[n] - 1, Math.max(3, length * scale + 2), ROW); }
  }

  point(x, y) {
    if (!this.found) return;
    const places = this.place(), n = places.findIndex((at) => y >= at && y < at + ROW), [a] = this.range(), us = a + ((x - SIDE) / Math.max(1, this.width - SIDE - 4)) * this.span();
    const i = n < 0 ? -1 : this.rows[n].lane.spans.findIndex(([begin, length]) => us >= begin && us <= begin + length);
    this.read(i < 0 ? null : [n, i]);
  }

  read(at) {
    this.at = at;
    if (!at) this.value.replaceChildren(this.words());
    else { const { rank, lane } = this.rows[at[0]], [begin, length, kind, name] = lane.spans[at[1]]; this.value.replaceChildren(`rank ${rank.rank}, ${KINDS[kind]?.[0] ?? ""}, from ${seconds(begin / 1e6)} for ${seconds(length / 1e6)}: `, said(lane.names[name])); }
    this.draw();
  }

  key(event) {
    if (!this.found) return false;
    if (event.key === "Escape" || event.key === "0") return this.choose(null), true;
    const [n, i] = this.at ?? [0, -1];
    if (event.key === "+" || event.key === "=") { const [a, b] = this.range(), span = this.at ? this.rows[n].lane.spans[i] : null, middle = span ? span[0] + span[1] / 2 : (a + b) / 2; return this.choose([middle - (b - a) / 4, middle + (b - a) / 4]), true; }
    if (event.key === "-") { const [a, b] = this.range(); return this.choose([a - (b - a) / 2, b + (b - a) / 2]), true; }
    const row = { ArrowDown: n + 1, ArrowUp: n - 1 }[event.key] ?? n, to = { ArrowRight: i + 1, ArrowLeft: i - 1 }[event.key] ?? i;
    if (!event.key.startsWith("Arrow") || !this.rows[row]) return false;
    this.read([row, Math.max(0, Math.min(this.rows[row].lane.spans.length - 1, to))]);
    return true;
  }
}

/** Kinds differ by pattern too: waiting is hatched, hidden is a thin bar. */
function bar(pen, x, y, wide, high, kind, color, paper) {
  pen.fillStyle = color;
  if (kind === 2) return pen.fillRect(x, y + high / 3, wide, high / 3);
  pen.fillRect(x, y, wide, high);
  if (kind === 1 && wide > 3) { pen.fillStyle = paper; for (let d = 2; d < wide; d += 5) pen.fillRect(x + d, y, 1, high); }
}

function sample(color, kind) {
  const box = h("canvas", { width: "26", height: "10", class: "swatch", "aria-hidden": "true" });
  const draw = () => { const pen = box.getContext("2d"), style = getComputedStyle(document.documentElement); pen.clearRect(0, 0, 26, 10); bar(pen, 0, 0, 26, 10, kind, style.getPropertyValue(color), style.getPropertyValue("--paper")); };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return box;
}
