// Who holds what: a card for each rank, by pipeline stage, with its part of attention and its experts of a layer; who has an expert, and what is lost with a rank or its host. Words and patterns say what colours say.

import { ask, disclosure, h, moment, s, said, table, whole } from "./dom.js";
import { swatch } from "./chart.js";

const WHY = { start: "the start", members: "members connected anew", balance: "experts moved for even loads", mend: "experts moved to more hosts" };
const WIDE = 120, HIGH = 9;
const many = (n, one, more = `${one}s`) => `${whole(n)} ${n === 1 ? one : more}`;
const spans = (numbers) => {
  const out = [];
  for (const n of [...new Set(numbers)].sort((a, b) => a - b)) if (out.length && n === out.at(-1)[1] + 1) out.at(-1)[1] = n; else out.push([n, n]);
  return out;
};
const list = (numbers) => spans(numbers).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");

export class Holders {
  constructor(id) {
    Object.assign(this, { id, layer: "", expert: 0, dead: "", at: "", focus: 0 });
    this.title = h("div");
    this.layers = h("select", { onchange: () => { this.layer = this.layers.value; this.draw(); } });
    this.number = h("input", { type: "number", min: "0", value: "0", oninput: () => { this.expert = Math.max(0, Math.floor(Number(this.number.value) || 0)); this.draw(); } });
    this.deaths = h("select", { onchange: () => this.choose(this.deaths.value) });
    this.times = h("select", { onchange: () => { this.at = this.times.value; this.ask(); } });
    this.bar = h("div", { class: "bar" }, ...[["layer", this.layers], ["expert", this.number], ["what if", this.deaths], ["as of", this.times]].map(([name, input]) => h("label", {}, `${name} `, input)));
    this.answer = h("div", { class: "answer", "aria-live": "polite" });
    this.help = h("p", { class: "quiet help" });
    this.stages = h("div", { onkeydown: (e) => this.key(e) });
    this.stages.addEventListener("click", (e) => { const card = e.target.closest("button[data-rank]"); if (card) this.choose(this.dead === card.dataset.rank ? "" : card.dataset.rank, Number(card.dataset.rank)); });
    this.ranks = disclosure("Table of ranks", () => this.table());
    this.element = h("div", { class: "holders" }, this.title, this.bar, this.answer, this.help, this.stages, this.ranks);
  }

  /** `run` as the page has it. Asks the server for what is so at the chosen time. */
  async ask(run = this.run, tone = this.tone, several = this.several) {
    Object.assign(this, { run, tone, several });
    const placed = run.lists.placed ?? [];
    if (!placed.some((p) => String(p.at) === this.at)) this.at = "";
    const asked = this.at, found = await ask(`/run/${this.id}/holders${asked ? `?at=${asked}` : ""}`).catch(() => null);
    if (asked !== this.at) return;
    this.found = found;
    this.options(this.times, [["", "now"], ...placed.slice(0, -1).reverse().map((p) => [String(p.at), `step ${whole(p.step)}: ${WHY[p.why] ?? p.why}`])], this.at);
    this.draw();
  }

  options(select, entries, value) {
    select.replaceChildren(...entries.map(([v, text]) => h("option", { value: v }, text)));
    select.value = value;
    select.parentElement.hidden = entries.length < 2;
  }

  choose(dead, focus = this.focus) {
    Object.assign(this, { dead, focus });
    this.draw();
  }

  // ---- what is known -------------------------------------------------------------------------------------------------

  get place() { return this.found.layers.find(([name]) => name === this.layer); }
  name(rank) { const uid = this.found.members[rank]; return h("span", {}, `rank ${rank}`, uid ? h("span", { class: "quiet" }, " (", said(uid), ")") : null); }
  experts([, stage, , ep]) { const place = this.place; return place && place[1] === stage ? this.found.tables[place[2]][ep] ?? [] : []; }
  /** Ranks that are lost together with the chosen one. */
  get loss() { return this.dead.startsWith("h") ? this.found.with_host[this.dead.slice(1)] : this.found.alone[Number(this.dead)]; }
  domain(rank) { return this.found.hosts[rank] ?? rank; }

  /** Experts of the layer that one host (or rank) alone has, where some have replicas. */
  only() {
    const on = new Map();
    if (!this.found.replicas || this.found.left_out) return new Set();
    for (const row of this.found.ranks) for (const e of this.experts(row)) on.set(e, (on.get(e) ?? new Set()).add(this.domain(row[0])));
    return new Set([...on].filter(([, hosts]) => hosts.size === 1).map(([e]) => e));
  }

  // ---- words ---------------------------------------------------------------------------------------------------------

  who() {
    const place = this.place, f = this.found;
    if (!place) return f.replicas ? "The log does not tell which rank has which expert: they are too many for one line." : "Nothing is known of experts.";
    if (this.expert >= f.experts) return `A layer has experts 0 to ${f.experts - 1}.`;
    const copies = new Map(), edp = f.stages[place[1]].degrees.edp;
    for (const row of f.ranks) {
      const slots = this.experts(row).filter((e) => e === this.expert).length;
      if (slots) copies.set(`${row[2]}.${row[3]}`, [...(copies.get(`${row[2]}.${row[3]}`) ?? []), [row[0], slots]]);
    }
    const number = edp * f.tables[place[2]].filter((held) => held.includes(this.expert)).length, out = [`Expert ${this.expert} of ${place[0]}: `, h("strong", {}, many(number, "copy", "copies")), ", on "];
    [...copies.values()].forEach((ranks, i) => {
      if (i) out.push(i === copies.size - 1 && copies.size === number ? " and " : ", ");
      ranks.forEach(([rank, slots], k) => out.push(k ? " with " : "", this.name(rank), slots > 1 && !k ? ` in ${slots} slots` : ""));
    });
    if (copies.size < number) out.push(` and ${number - copies.size} more`);
    return h("span", {}, ...out, ".");
  }

  overall() {
    const f = this.found, unit = Object.keys(f.with_host).length ? "host" : "rank", seen = new Set();
    if (!f.layers.length || f.left_out) return "";
    let sole = 0;
    for (const [rank] of f.ranks) { const at = this.domain(rank); if (!seen.has(at)) { seen.add(at); sole += (f.with_host[at] ?? f.alone[rank]).lost; } }
    const all = f.layers.length * f.experts;
    if (!sole) return `Every expert of every layer is on 2 ${unit}s or more.`;
    return sole === all ? `Every expert is on one ${unit} only.` : `${whole(sole)} of the ${whole(all)} experts of all layers ${sole === 1 ? "is" : "are"} on one ${unit} only.`;
  }

  checkpoint() {
    const placed = this.run.lists.placed ?? [], next = placed.findIndex((p) => String(p.at) === this.at) + 1, until = this.at && placed[next] ? placed[next].at : Infinity;
    const saved = (this.run.lists.checkpoints ?? []).filter((k) => k.at <= until).map((k) => k.step);
    return saved.length ? `the checkpoint of step ${whole(Math.max(...saved))}` : "the beginning, for there is no checkpoint";
  }

  outcome() {
    const f = this.found, loss = this.loss, single = loss.ranks.length === 1, out = [single ? "If " : "If the host of ranks ", single ? this.name(loss.ranks[0]) : list(loss.ranks), single ? " dies: " : " is lost: "];
    const state = [];
    if (loss.lost) {
      const left = loss.lost - loss.named.length;
      state.push(`${many(loss.lost, "expert")} ${loss.lost === 1 ? "has" : "have"} no other copy (${loss.named.map(([layer, e]) => `${e} of ${layer}`).join(", ")}${left > 0 ? ` and ${whole(left)} more` : ""}). `);
    } else if (f.layers.length) state.push(loss.fewer ? `no expert loses its last copy; ${many(loss.fewer, "expert")} in all layers ${loss.fewer === 1 ? "has" : "have"} a copy fewer. ` : "no expert is lost. ");
    if (!loss.dense) state.push(`No other rank has ${single ? "its part" : "their parts"} of the weights beside the experts. `);
    out.push(...state, h("strong", {}, ...this.consequence(loss)));
    return h("p", {}, ...out);
  }

  consequence(loss) {
    const f = this.found, left = (f.size || f.world) - loss.ranks.length;
    if (!f.size && !this.run.lists.recoveries?.length) return [`The run ends, as its ranks are fixed; it resumes from ${this.checkpoint()}.`];
    const waits = left < f.minimum ? ` The run waits until it has ${many(f.minimum, "member")} again.` : "";
    if (loss.lost || !loss.dense) return [`The run goes back to ${this.checkpoint()}.`, waits];
    if (f.holders < 2) return [`Other state may be on one host only; then the run goes back to ${this.checkpoint()}, else the others go on.`, waits];
    return [`The ${many(left, "other")} ${left === 1 ? "goes" : "go"} on from the last step.`, waits];
  }

  // ---- the picture ---------------------------------------------------------------------------------------------------

  draw() {
    const f = this.found, run = this.run, head = run.head;
    const label = this.at ? (run.lists.placed.find((p) => String(p.at) === this.at) ?? {}).folding : head.folding_now;
    this.title.replaceChildren(...[this.several ? h("h3", {}, swatch(this.tone), said(head.run || run.folder)) : "", h("p", {}, "folding ", h("strong", {}, said(label ?? "")), f?.ranks.length ? `: ${many(f.world, "rank")}${f.stages.length > 1 ? ` in ${f.stages.length} stages` : ""}` : "", this.at ? `, as it was from ${moment(Number(this.at))}` : "")]);
    const known = Boolean(f?.ranks.length);
    for (const part of [this.bar, this.answer, this.help, this.stages, this.ranks]) part.hidden = !known;
    if (!known) { this.title.append(h("p", { class: "quiet" }, "The logs do not tell who holds what.")); return; }
    const names = f.layers.map(([name]) => name);
    if (!names.includes(this.layer)) this.layer = names[0] ?? "";
    this.options(this.layers, names.map((name) => [name, name.replace(/^layer /, "")]), this.layer);
    this.number.max = Math.max(0, f.experts - 1);
    this.number.parentElement.hidden = !names.length;
    const hosts = Object.entries(f.with_host).map(([host, { ranks }]) => [`h${host}`, `the host of ranks ${list(ranks)} is lost`]);
    const deaths = [["", "all live"], ...hosts, ...f.ranks.map(([rank]) => [String(rank), `rank ${rank} dies`])];
    if (!deaths.some(([value]) => value === this.dead)) this.dead = "";
    this.options(this.deaths, deaths, this.dead);
    this.answer.replaceChildren(h("p", {}, this.who()), this.dead ? this.outcome() : h("p", {}, this.overall()));
    const only = this.only(), unit = hosts.length ? "host" : "rank";
    this.help.replaceChildren(`Press a rank to see what is lost with it. On the keyboard: Tab to the ranks, arrow keys go from one to the next, Enter chooses.${f.replicas ? ` ×2: in two slots of the rank.${only.size ? ` !: on one ${unit} only.` : ""}` : ""}`);
    const dead = new Set(this.dead ? this.loss.ranks : []), had = this.stages.contains(document.activeElement);
    if (!f.ranks.some(([rank]) => rank === this.focus)) this.focus = 0;
    this.stages.replaceChildren(...f.stages.map((stage, i) => this.stage(stage, i, only, dead)), f.idle.length ? h("p", {}, "Idle: ", ...f.idle.flatMap((uid, i) => [i ? ", " : "", said(uid)]), ".") : "", f.left_out ? h("p", { class: "quiet" }, `${whole(f.left_out)} more ranks are not drawn.`) : "");
    if (had) this.stages.querySelector('button[tabindex="0"]')?.focus();
    this.ranks.refresh();
  }

  stage(stage, number, only, dead) {
    const f = this.found, d = stage.degrees, part = (axes) => axes.filter((a) => d[a] > 1).map((a) => `${a} ${d[a]}`).join(" × ") || "one part";
    const layers = stage.layers === null ? "" : stage.layers === "" ? ", embedding or head alone" : `, ${/[-,]/.test(stage.layers) ? "layers" : "layer"} ${stage.layers.replaceAll("-", "–")}`;
    const last = stage.first + stage.ranks - 1, ranks = f.ranks.filter((row) => row[1] === number);
    return h("div", { class: "stage" },
      h("h4", {}, f.stages.length > 1 ? `Stage ${number}${layers}: ` : layers ? `${layers.slice(2)[0].toUpperCase()}${layers.slice(3)}: ` : "", `${stage.ranks > 1 ? `${f.stages.length > 1 || layers ? "ranks" : "Ranks"} ${stage.first}–${last}` : `rank ${stage.first}`}; attention ${part(["tp", "cp", "dp"])}, experts ${part(["etp", "ep", "edp"])}`),
      h("div", { class: "cards", role: "group", "aria-label": f.stages.length > 1 ? `ranks of stage ${number}` : "ranks" }, ...ranks.map((row) => this.card(row, d, only, dead))));
  }

  card(row, degrees, only, dead) {
    const [rank, , edp, ep, tp, cp, dp, etp] = row, f = this.found, held = this.experts(row), holds = held.includes(this.expert), gone = dead.has(rank);
    const at = (pairs) => pairs.filter(([axis]) => degrees[axis] > 1).map(([axis, i]) => `${axis} ${i}`).join(" ") || "whole";
    const attention = f.stages[row[1]].layers === "" ? "none" : at([["tp", tp], ["cp", cp], ["dp", dp]]), where = at([["etp", etp], ["ep", ep], ["edp", edp]]);
    const uid = f.members[rank], counts = new Map();
    for (const e of held) counts.set(e, (counts.get(e) ?? 0) + 1);
    const words = f.replicas ? [...counts].sort(([a], [b]) => a - b).flatMap(([e, n]) => [h("span", { class: e === this.expert ? "chip this" : "chip" }, `${e}${n > 1 ? `×${n}` : ""}${only.has(e) ? "!" : ""}`), " "]) : [list(held)];
    const label = [`rank ${rank}`, uid, `attention ${attention}`, held.length ? `experts ${list(held)}` : "no experts of this layer", holds ? `holds expert ${this.expert}` : "", gone ? "lost" : ""].filter(Boolean).join(", ");
    return h("button", { type: "button", class: `card${holds ? " holds" : ""}${gone ? " gone" : ""}`, "data-rank": rank, "aria-pressed": String(this.dead === String(rank)), "aria-label": label, tabindex: rank === this.focus ? "0" : "-1" },
      h("span", { class: "line" }, h("strong", {}, `rank ${rank}`), gone ? h("span", { class: "badge" }, "✕ lost") : holds ? h("span", { class: "badge" }, `✓ has ${this.expert}`) : ""),
      uid ? h("span", { class: "quiet member" }, said(uid)) : "",
      h("span", { class: "quiet" }, `attention ${attention}`), strip(attention === "none" ? [] : [[tp / degrees.tp, 1 / degrees.tp, "part"]]),
      h("span", { class: "quiet" }, `experts ${where}`), strip(this.ticks(held, holds)),
      h("span", { class: "chips" }, ...(held.length ? words : ["none of this layer"])));
  }

  /** Where the experts stand among all of a layer: [begin, width, class], in parts of 1. */
  ticks(held, holds) {
    const all = this.found.experts || 1;
    return [...spans(held).map(([a, b]) => [a / all, (b - a + 1) / all, "own"]), ...(holds ? [[this.expert / all, 1 / all, "mine"]] : [])];
  }

  key(event) {
    const cards = [...this.stages.querySelectorAll("button[data-rank]")], now = cards.indexOf(document.activeElement);
    if (now < 0) return;
    const top = cards[now].getBoundingClientRect().top, across = Math.max(1, cards.filter((c) => Math.abs(c.getBoundingClientRect().top - top) < 2).length);
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + across, ArrowUp: now - across, Home: 0, End: cards.length - 1 }[event.key];
    if (event.key === "Escape" && this.dead) this.choose("");
    else if (to === undefined) return;
    else { const card = cards[Math.max(0, Math.min(cards.length - 1, to))]; cards[now].tabIndex = -1; card.tabIndex = 0; this.focus = Number(card.dataset.rank); card.focus(); }
    event.preventDefault();
  }

  table() {
    const f = this.found, shown = ["tp", "cp", "dp", "etp", "ep", "edp"].filter((axis) => f.stages.some((stage) => stage.degrees[axis] > 1));
    const columns = { tp: 4, cp: 5, dp: 6, etp: 7, ep: 3, edp: 2 }, staged = f.stages.length > 1;
    return table(["rank", ...(f.members.length ? ["member"] : []), ...(staged ? ["stage"] : []), ...shown, this.layer ? `experts of ${this.layer}` : "experts"],
      f.ranks.map((row) => [row[0], ...(f.members.length ? [f.members[row[0]] ?? ""] : []), ...(staged ? [row[1]] : []), ...shown.map((axis) => row[columns[axis]]), list(this.experts(row))]));
  }
}

/** A bar that stands for the whole, with parts of it filled. */
function strip(parts) {
  const bar = s("svg", { class: "strip", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "all", x: 0, y: 2, width: WIDE, height: HIGH - 4 }));
  for (const [begin, width, kind] of parts) bar.append(s("rect", { class: kind, x: begin * WIDE, y: kind === "mine" ? 0 : 2, width: Math.max(kind === "mine" ? 2.5 : 0.8, width * WIDE), height: kind === "mine" ? HIGH : HIGH - 4 }));
  return bar;
}
