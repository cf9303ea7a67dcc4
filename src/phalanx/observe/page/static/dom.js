// Elements, numbers as text, and what is asked of the server. Texts of logs become text nodes and nothing else.

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** A text of a log, whose direction of writing stays its own. */
export const said = (text) => h("bdi", {}, String(text ?? ""));

export const byId = (id) => document.getElementById(id);
export const finite = (x) => typeof x === "number" && Number.isFinite(x);
export const colour = (i) => `var(--s${i % 8})`;
export const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 5", "1 4", "12 4", "3 2 8 2"];

export function count(x) {
  if (!finite(x)) return "–";
  for (const [power, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(x) >= 0.9995 * power) return short(x / power) + " " + letter;
  return short(x);
}

const short = (x) => (Math.abs(x) >= 99.95 ? x.toFixed(0) : String(Number(x.toPrecision(3))));

export function digits(x) {
  if (!finite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace("e+", "e");
  return size >= 99.95 ? x.toFixed(0) : String(Number(x.toPrecision(4)));
}

export const whole = (x) => (finite(x) ? Math.round(x).toLocaleString("en-US") : "–");
export const percent = (x) => (finite(x) ? (100 * x).toFixed(1) + " %" : "–");

export function bytes(x) {
  if (!finite(x)) return "–";
  let power = 0;
  while (Math.abs(x) >= 1023.5 && power < 5) { x /= 1024; power++; }
  return `${Number(x.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

export function seconds(x) {
  if (!finite(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((x * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((x * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(x.toPrecision(3))} s`;
  if (size < 3600) return `${Math.floor(x / 60)} min ${Math.round(x % 60)} s`;
  if (size < 172800) return `${Math.floor(x / 3600)} h ${Math.floor((x % 3600) / 60)} min`;
  return size < 1e10 ? `${Math.floor(x / 86400)} d ${Math.floor((x % 86400) / 3600)} h` : "–";
}

export const moment = (at) => (finite(at) && at > 0 && at < 8e9 ? new Date(at * 1000).toLocaleString() : "–");

export async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 200));
  return answer.json();
}

export function table(titles, rows, numeric = [], more = "") {
  const cls = (i) => (numeric.includes(i) ? "n" : null);
  return h("div", { class: `scroll ${more}`, tabindex: "0", role: "region", "aria-label": "table" },
    h("table", {},
      h("thead", {}, h("tr", {}, ...titles.map((t, i) => h("th", { scope: "col", class: cls(i) }, t)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, i) => h("td", { class: cls(i) }, cell instanceof Node ? cell : said(cell))))))));
}

/** A disclosure whose content is made when it is opened, and again whenever `refresh` is called while it is open and nobody reads it. */
export function disclosure(title, make) {
  const body = h("div");
  const element = h("details", { ontoggle: () => element.refresh() }, h("summary", {}, title), body);
  element.refresh = () => element.open && !(body.childNodes.length && body.contains(document.activeElement)) && body.replaceChildren(make());
  return element;
}
